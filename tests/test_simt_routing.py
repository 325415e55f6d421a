"""The gate, plan, dispatch and combine kernels under the sanitizers, and their PTX in every order of warps. Their
values on all backends are tested in test_topk_gate.py, test_plan.py, test_dispatch.py and test_combine.py."""

from __future__ import annotations

import itertools

import pytest
import simt
import torch
from ptx import cuda_launch

import moe_kernels as mk
from moe_kernels.backends import cuda

MISSING = simt.unavailable() or cuda_launch.unavailable()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"simt: {MISSING}")

SEEDS = range(8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ARRAYS = ("expert_offsets", "row_token", "row_choice", "slot_row", "requested", "kept", "dropped")


def some_experts(num_tokens: int, k: int, num_experts: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Half of the choices fall on expert 0, and a few on none."""
    experts = torch.randint(-1, num_experts, (num_tokens, k), dtype=dtype)
    return torch.where(torch.rand(num_tokens, k) < 0.5, 0, experts)


def check_plan(experts: torch.Tensor, num_experts: int, **options) -> mk.RoutingPlan:
    expected = mk.make_plan(experts, num_experts, **options, backend="reference")
    got = mk.make_plan(experts, num_experts, **options, backend="cuda")
    for name in ARRAYS:
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    return got


def check_rows(plan: mk.RoutingPlan, dim: int, dtype: torch.dtype, gap: int = 0) -> None:
    """Dispatch, combine and both gradients, no further from float64 than twice what the reference in this dtype is."""
    x = torch.randn(plan.num_tokens, dim + gap).to(dtype)[:, gap:]
    weights = torch.rand(plan.slot_row.shape).masked_fill(plan.slot_row < 0, torch.nan)
    grad = torch.randn(plan.num_tokens, dim + gap).to(dtype)[:, gap:]
    results = {}
    for backend, wide in (("reference", torch.float64), ("reference", dtype), ("cuda", dtype)):
        leaves = [x.detach().to(wide).requires_grad_(), weights.detach().clone().requires_grad_()]
        rows = mk.dispatch(leaves[0], plan, backend=backend)
        y = mk.combine(rows, plan, leaves[1], backend=backend)
        results[backend, wide] = [rows, y, *torch.autograd.grad(y, leaves, grad.to(wide))]
    assert torch.equal(results["cuda", dtype][0], results["reference", dtype][0])
    for exact, same, got in zip(*results.values(), strict=True):
        error, allowed = ((each.double() - exact.double()).abs().max() for each in (got, same))
        assert error <= 2 * allowed + 1e-5, (dim, dtype)


@pytest.mark.parametrize("seed", SEEDS)
def test_plan_in_any_order_of_warps(seed: int) -> None:
    with cuda_launch.use(seed):
        for order, capacity in itertools.product(("choice", "token"), (None, 40)):
            check_plan(some_experts(600, 4, 17), 17, capacity=capacity, order=order)  # three chunks
            check_plan(some_experts(9, 3, 1500), 1500, capacity=capacity, order=order)  # two windows of experts
        check_plan(some_experts(600, 2, 5, torch.int64), 5, capacity=100, priority=torch.randn(600).round())


@pytest.mark.parametrize("order", ["choice", "token"])
def test_plan_of_chunks_with_several_tiles(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "PLAN_TILE", 4096)
    with cuda_launch.use(2):
        check_plan(some_experts(900, 7, 33), 33, capacity=50, order=order)


def test_plan_of_more_chunks_than_warps() -> None:
    with cuda_launch.use(3):
        check_plan(some_experts(4300, 8, 128), 128, capacity=300)  # 34 chunks: two for some warps of plan_scan_kernel


@pytest.mark.parametrize("build", ["asan", "tsan"])
def test_plan_under_sanitizers(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with simt.use(build, seed=2):
        check_plan(some_experts(500, 3, 40), 40, capacity=30, priority=torch.randn(500))
        check_plan(some_experts(3, 2, 1030, torch.int64), 1030, order="token")
        check_plan(some_experts(0, 2, 3), 3)
        monkeypatch.setattr(cuda, "PLAN_TILE", 4096)
        check_plan(some_experts(700, 2, 5), 5, capacity=100)


# (tokens, choices, capacity, dim): 8 elements to 16 bytes, 256 threads a row, 32 choices between two meetings of warps.
ROWS = [(7, 3, 4, 72), (5, 2, 5, 13), (2, 35, 40, 300), (3, 2, 2, 2072), (2, 1, 1, 40)]


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_in_any_order_of_warps(seed: int) -> None:
    with cuda_launch.use(seed):
        for num_tokens, k, capacity, dim in ROWS:
            plan = check_plan(some_experts(num_tokens, k, 6), 6, capacity=capacity)
            for dtype in DTYPES:
                check_rows(plan, dim, dtype)


@pytest.mark.parametrize("build", ["asan", "tsan"])
def test_rows_under_sanitizers(build: str) -> None:
    with simt.use(build, seed=4):
        for index, (num_tokens, k, capacity, dim) in enumerate(ROWS[: 5 if build == "asan" else 3]):
            plan = mk.make_plan(some_experts(num_tokens, k, 6), 6, capacity=capacity, backend="reference")
            check_rows(plan, dim, DTYPES[index % 3])


@pytest.mark.parametrize("gap", [1, 2, 8])
def test_rows_of_views(gap: int) -> None:
    plan = mk.make_plan(some_experts(6, 2, 3), 3, capacity=3, backend="reference")
    with simt.use("asan", seed=1):
        check_rows(plan, 24, torch.bfloat16, gap)


@pytest.mark.parametrize(("build", "seed"), [*(("ptx", seed) for seed in SEEDS), ("asan", 3), ("tsan", 3)])
def test_gate_in_any_order(build: str, seed: int) -> None:
    with cuda_launch.use(seed) if build == "ptx" else simt.use(build, seed=seed):
        for (num_experts, k), order in itertools.product(
            [(5, 3), (70, 34), (1030, 2)], ("topk_softmax", "softmax_topk")
        ):
            logits = torch.randn(9, num_experts).bfloat16()  # equal ones among them; two blocks, the last of one warp
            logits[0, ::2], logits[1, -1] = torch.inf, torch.nan
            leaves = [logits.clone().requires_grad_() for _ in range(2)]
            expected = mk.topk_gate(leaves[0], k, order=order, backend="reference")
            got = mk.topk_gate(leaves[1], k, order=order, backend="cuda")
            assert torch.equal(got[1], expected[1])
            grad = torch.randn(9, k).bfloat16()
            gradients = [torch.autograd.grad(y, x, grad)[0] for (y, _), x in zip((expected, got), leaves, strict=True)]
            for same, other in ((expected[0], got[0]), gradients):
                torch.testing.assert_close(other[2:], same[2:], rtol=2**-7, atol=2**-10)


def test_launchers_refuse() -> None:
    module = cuda_launch.module()
    plan = [4, 0, 0, 0, 1, *[0] * 7]  # index_size, experts, visit, counts, chunks, arrays
    # tokens, k, num_experts, capacity, rows
    for sizes in ((-1, 1, 1, 1, 0), (2**20, 2**12, 1, 1, 0), (1, 1, 0, 1, 1), (1, 1, 1, -1, 1), (1, 1, 1, 1, 2)):
        with pytest.raises(RuntimeError, match="make_plan_fwd: CUDA error 1"):
            module.make_plan_fwd(*plan, *sizes, 1, 0)
    with pytest.raises(RuntimeError, match="dispatch_fwd: CUDA error 1"):
        module.dispatch_fwd(8, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0)
    with pytest.raises(RuntimeError, match="topk_gate_fwd: CUDA error 1"):
        module.topk_gate_fwd(0, 0, 4, 0, 0, 0, 0, 1, 4, 5, 0, 0)
    for dtype, dim in ((3, 1), (0, 2**31)):
        with pytest.raises(RuntimeError, match="combine_fwd: CUDA error 1"):
            module.combine_fwd(dtype, 0, 1, 0, 0, 0, 1, 1, 1, dim, 0)
        with pytest.raises(RuntimeError, match="combine_bwd: CUDA error 1"):
            module.combine_bwd(dtype, *[0] * 11, 1, 1, 1, 1, dim, 0)
