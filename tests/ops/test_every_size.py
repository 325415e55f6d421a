"""GPU kernels agree with the definition at all sizes tried, with 99 KB of shared memory a block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import pytest
import torch

import moe_kernels as mk
from tests.helpers.sinkhorn import taken
from tests.helpers.targets import TARGETS, reason_to_skip, running
from tests.ptx import cuda_launch

SM_86 = 99 * 1024  # bytes of shared memory; in tests Triton sees a GPU with this much (ptx/triton_launch.py)


def of_experts(n: int, backend: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(9, n, generator=generator).bfloat16()
    plan = mk.make_plan(torch.arange(9)[:, None] % min(n, 3), min(n, 3), backend="reference")
    w_in, w_out = (torch.randn(plan.num_experts, n, n, generator=generator).div(n**0.5).bfloat16() for _ in range(2))
    rows = mk.dispatch(x, plan, backend=backend)
    y = mk.expert_mlp(x, plan, w_in, w_out, weights=torch.ones(9, 1), activation="relu", backend=backend)
    return [rows, mk.combine(rows, plan, torch.ones(9, 1), backend=backend), y]


def of_a_tree(op: Callable[..., tuple[torch.Tensor, torch.Tensor]], n: int, backend: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    given = [torch.randn(shape, generator=generator) for shape in ((3, 4), (1, n, 4), (1, n + 1, 4))]
    return list(op(*given, gamma=1.0, backend=backend))


def small(backend: str) -> contextlib.AbstractContextManager[None]:
    return cuda_launch.device(SM_86, minor=6) if backend == "cuda" else contextlib.nullcontext()


# By operation: a call with a size n, and the largest n to test.
SIZES = {
    "kwta": (lambda n, backend: [mk.kwta(torch.randn(3, n).round(), n // 2, backend=backend)], 32769),
    "topk_gate": (lambda n, backend: list(mk.topk_gate(torch.randn(3, n), min(n, 5), backend=backend)), 16384),
    "sinkhorn": (lambda n, backend: [mk.sinkhorn(torch.randn(1, n, n), 2, backend=backend)], 1024),
    "make_plan": (lambda n, backend: [mk.make_plan(torch.arange(40)[:, None] % n, n, backend=backend).slot_row], 4097),
    "experts": (of_experts, 257),
    "tree_gate": (partial(of_a_tree, mk.tree_gate), 4095),
    "tree_route": (partial(of_a_tree, mk.tree_route), 1023),
}
GPUS = [target for target in TARGETS if target.backend in ("cuda", "triton")]


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.backend)
@pytest.mark.parametrize("op", SIZES)
def test_every_size_runs_in_99_kb(op, target):
    call, largest = SIZES[op]
    if reason := reason_to_skip(target, op if op != "experts" else "expert_mlp"):
        pytest.skip(reason)
    if not target.executed or target.interpreted:
        pytest.skip("only tests/ptx, which executes PTX without a GPU, can limit shared memory to 99 KB")
    if op == "sinkhorn":
        largest = taken(target, largest)
    sizes = {1, 2, largest - 1, largest}
    if target.backend == "cuda":
        sizes |= {2**i + d for i in (5, 6, 7, 8, 10, 12) for d in (-1, 0, 1)}
    for n in sorted(each for each in sizes if each <= largest):
        torch.manual_seed(n)
        expected = call(n, "reference")
        torch.manual_seed(n)
        with running(target), small(target.backend):
            got = call(n, target.backend)
        for each, right in zip(got, expected, strict=True):
            epsilon = 2.0**-7 if right.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(each, right, rtol=epsilon, atol=epsilon, msg=lambda text, n=n: f"{n}: {text}")
