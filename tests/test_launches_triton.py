"""How the Triton kernels are launched: options, grids, and how many compilations random sizes need."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

SCRIPT = Path(__file__).with_name("triton_launches.py")


@functools.cache
def launches(case: str, *sizes: int) -> list[dict[str, Any]]:
    """The launches of a function of this file, which runs in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), case, *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def each_kernel() -> None:
    """Every launcher once, in a dtype that takes its usual way."""
    from moe_kernels.backends.triton import combine, dispatch, grouped_gemm, kwta, plan, sinkhorn, topk_gate, tree_gate

    tokens, k, num_experts, dim = 32, 2, 8, 64
    x, grad = torch.randn(tokens, dim), torch.randn(tokens, dim)
    _, bits = kwta.kwta_fwd(x, None, 5, "index", True)
    kwta.kwta_bwd(grad, bits)
    weights, experts = topk_gate.topk_gate_fwd(torch.randn(tokens, num_experts), k, "softmax_topk")
    logits = torch.randn(tokens, num_experts)
    topk_gate.topk_gate_bwd(torch.randn(tokens, k), weights, experts, logits, num_experts, torch.float32)
    experts = torch.randint(0, num_experts, (tokens, k), dtype=torch.int32)
    offsets, row_token, row_choice, slot_row, *_ = plan.make_plan_fwd(experts, num_experts, None, None, "token")
    plan.plan_priority_fwd(torch.randn(tokens, num_experts), 4)
    rows = dispatch.dispatch_fwd(x, row_token, slot_row, offsets)
    combine.combine_fwd(rows, torch.rand(tokens, k), slot_row)
    combine.combine_bwd(grad, rows, torch.rand(tokens, k), row_token, slot_row, offsets, row_choice)
    weight, hidden = torch.randn(num_experts, dim, dim), torch.randn(rows.shape)
    _, pre = grouped_gemm.grouped_gemm_fwd(rows, weight, offsets, None, None, "gelu", True)
    grouped_gemm.grouped_gemm_bwd_weight(rows, hidden, offsets, None, None, True)
    grouped_gemm.expert_mlp_bwd_hidden(grad, weight, offsets, row_token, torch.rand(rows.shape[0]), pre, "gelu")
    grouped_gemm.activation_bwd(hidden, pre, "gelu")
    for n in (4, 128):
        scores = torch.randn(2, n, n)
        sinkhorn.sinkhorn_fwd(scores, [1.0, 0.5])
        sinkhorn.sinkhorn_bwd(scores, scores, [1.0, 0.5])
    split, leaf = torch.randn(tokens, 1, num_experts - 1), torch.randn(tokens, 1, num_experts)
    gates, _ = tree_gate.tree_gate_fwd(split, leaf, 1.0, "")
    tree_gate.tree_gate_bwd(gates, None, split, leaf, 1.0, "")
    trees = torch.randn(1, num_experts - 1, dim).bfloat16(), torch.randn(1, num_experts, dim).bfloat16()
    tree_gate.tree_gate_fused_fwd(x.bfloat16(), *trees, None, None, 1.0, "")


def test_no_kernel_leaves_contraction_to_the_compiler():
    # Fused into the first step of a butterfly sum, a product makes the lanes' copies of the result differ.
    found = launches("each_kernel")
    assert len({each["kernel"] for each in found}) >= 19
    assert not [each["kernel"] for each in found if each["options"]["enable_fp_fusion"]]


def plans() -> None:
    from moe_kernels.backends.triton import plan

    for tokens in (1, 100, 5000):
        experts = torch.randint(0, 128, (tokens, 8), dtype=torch.int32)
        plan.make_plan_fwd(experts, 128, None, None, "token")


def test_a_plan_takes_three_launches():
    names = ["_plan_count", "_plan_scan", "_plan_rank"]
    found = launches("plans")
    assert [each["kernel"] for each in found] == 3 * names
    # One warp ranks a tile: with more of them each would do all of it.
    assert {each["options"]["num_warps"] for each in found if each["kernel"] == "_plan_rank"} == {1}
