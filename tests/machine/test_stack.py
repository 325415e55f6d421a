"""The C++ kernels run on threads with small stacks, as OMP_STACKSIZE or musl may give them."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch
import moe_kernels as mk

torch.set_num_threads(2)
x = torch.randn(512, 16384, dtype=torch.float64)
assert mk.kwta(x, 100, backend="cpu").count_nonzero() == 512 * 100
logits, scores = torch.randn(4096, 64, dtype=torch.float64), torch.randn(64, 40, 40, dtype=torch.float64)
weights, experts = mk.topk_gate(logits, 2, backend="cpu")
plan = mk.make_plan(experts, 64, capacity=100, backend="cpu")
mk.plan_expert_choice(logits, 64, backend="cpu"), mk.plan_priority(logits, 64, backend="cpu")
tokens = torch.randn(4096, 48, dtype=torch.float64, requires_grad=True)
w_in, w_out = (torch.randn(64, *size, dtype=torch.float64, requires_grad=True) for size in ((48, 64), (64, 48)))
mk.expert_mlp(tokens, plan, w_in, w_out, weights=weights, backend="cpu").sum().backward()
mk.combine(mk.dispatch(tokens, plan, backend="cpu"), plan, weights, backend="cpu").sum().backward()
mk.expert_norms(tokens, w_in, w_out, backend="cpu").sum().backward()
mk.sinkhorn(scores.requires_grad_(), 20, backend="cpu").sum().backward()
mk.sinkhorn(scores[:, :8, :8], 20, tolerance=1e-9, backend="cpu").sum().backward()
split, leaf = (torch.randn(2, n, 48, dtype=torch.float64) for n in (63, 64))
mk.tree_gate(tokens, split, leaf, gamma=0.5, backend="cpu")[0].sum().backward()
mk.tree_route(tokens.detach(), split, leaf, gamma=0.5, backend="cpu")
"""


def test_kernels_run_on_threads_with_a_stack_of_128_kb():
    environment = {**os.environ, "OMP_STACKSIZE": "128k", "KMP_STACKSIZE": "128k"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr[-2000:]}"
