"""Instructions that the CUDA kernels execute, counted in nvcc's PTX for sm_80.

Predicted is issue time on an A100 over the time in which its memory moves the bytes: not measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from ptx import counters, cuda_launch, session
from torch.utils._python_dispatch import TorchDispatchMode

import moe_kernels as mk
from moe_kernels import backends

MISSING = cuda_launch.unavailable()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"PTX of nvcc: {MISSING}")

# A100: 108 SMs with 4 schedulers at 1.41 GHz; 1.94 TB/s. Static SASS / PTX is 1.3 for integer code (facts of kwta).
ISSUE, MEMORY, FACTOR = 108 * 4 * 1.41e9, 1.94e12, 1.3


@contextlib.contextmanager
def counted() -> Iterator[list[dict]]:
    """What every launch inside executes."""
    found: list[dict] = []
    listener = lambda result: found.append(counters.count(result))  # noqa: E731
    session.session.listeners.append(listener)
    try:
        with cuda_launch.use():
            yield found
    finally:
        session.session.listeners.remove(listener)


def warps(found: list[dict]) -> int:
    return sum(each["warp_instructions"] for each in found)


def predicted(found: list[dict], moved: int) -> float:
    """Issue time over the time that `moved` bytes take."""
    return FACTOR * warps(found) / ISSUE / (moved / MEMORY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [4096, 4095])  # rows of 4095 start inside 16-byte vectors
def test_kwta_is_bound_by_memory(n, dtype):
    x = torch.randn(16, n).to(dtype).requires_grad_()
    moved = x.numel() * (2 * x.element_size() + 1 / 8)
    with counted() as found:
        y = mk.kwta(x, 409, backend="cuda")
        forward = predicted(found, moved)
        found.clear()
        y.backward(torch.randn_like(y))
        backward = predicted(found, moved)
    assert forward <= 0.97
    assert backward <= 0.4


@pytest.mark.parametrize(
    ("dtype", "num_experts", "most"),
    [(torch.float32, 128, 305), (torch.bfloat16, 128, 290), (torch.float32, 256, 460), (torch.bfloat16, 256, 420)],
    ids=str,
)
def test_topk_gate_sorts_a_lane_once(dtype, num_experts, most):
    """Instructions of a token's warp at K = 8. With 256 experts 940 and 524 where each choice searched a lane's."""
    logits = torch.randn(64, num_experts).to(dtype)
    with counted() as found:
        mk.topk_gate(logits, 8, backend="cuda")
    assert warps(found) <= most * 64, warps(found) / 64


def test_a_plan_is_three_launches_and_two_million_instructions():
    experts = torch.randint(0, 128, (32768, 8), dtype=torch.int32)
    with counted() as found:
        mk.make_plan(experts, 128, backend="cuda")
    assert len(found) <= 3
    assert FACTOR * warps(found) <= 3e6, warps(found)


def test_summing_rows_by_token_is_linear():
    """Where tokens were the experts of a plan, every chunk of rows walked all tokens."""
    took = []
    sum_rows = backends.load("cuda", "grouped_gemm").grouped_gemm_sum_rows
    for tokens in (1024, 8192):
        rows, row_token = torch.randn(2 * tokens, 8), torch.randint(0, tokens, (2 * tokens,), dtype=torch.int32)
        with counted() as found:
            total = sum_rows(rows, row_token, tokens)
        expected = torch.zeros(tokens, 8, dtype=torch.float64).index_add_(0, row_token.long(), rows.double())
        torch.testing.assert_close(total, expected.float(), rtol=1e-5, atol=1e-5)
        took.append(warps(found))
    assert took[1] <= 8.5 * took[0], took


def test_the_tree_gate_computes_each_node_once():
    """256 experts, 4 trees, 16 bits: 4402 instructions a token's warp where lanes walked a heap in shared memory."""
    x = torch.randn(16, 8).bfloat16()
    split, leaf = (torch.randn(4, nodes, 8).bfloat16() for nodes in (255, 256))
    with counted() as found:
        gates, leaf_probs = mk.tree_gate(x, split, leaf, gamma=2.0, backend="cuda")
    assert (gates.dtype, leaf_probs.dtype) == (torch.bfloat16, torch.bfloat16)
    moved = 16 * 2 * (4 * (255 + 256) + 5 * 256)  # of the kernel behind the products
    assert predicted(found, moved) <= 1.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("trees", "experts"), [(1, 64), (4, 64), (1, 48), (1, 8), (2, 256), (1, 512), (1, 1024)])
def test_the_tree_gate_is_bound_by_memory(trees, experts, dtype):
    x = torch.randn(128, 8).to(dtype)
    split, leaf = (torch.randn(trees, nodes, 8).to(dtype) for nodes in (experts - 1, experts))
    with counted() as found:
        mk.tree_gate(x, split, leaf, gamma=2.0, backend="cuda")
    moved = 128 * dtype.itemsize * (trees * (3 * experts - 1) + experts)  # of the kernel behind the products
    assert predicted(found, moved) <= 1.0


class TorchLaunches(TorchDispatchMode):
    """Counts torch's own operations that start a kernel: none that makes a view or allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        views = any(result.alias_info and not result.alias_info.is_write for result in func._schema.returns)
        if (
            func.namespace == "aten"
            and not views
            and not name.startswith(("empty", "new_empty", "detach", "_unsafe_view"))
        ):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("biased", [False, True])
def test_expert_mlp_takes_eight_launches_of_ours_and_eight_of_torch(biased):
    """Forward and backward; the gradient that starts the backward pass is not counted."""
    experts = torch.randint(0, 4, (16, 2), dtype=torch.int32)
    x, w_in, w_out = (torch.randn(shape).bfloat16() for shape in ((16, 16), (4, 16, 32), (4, 32, 16)))
    weights = torch.rand(16, 2)
    biases = {name: torch.randn(4, width).bfloat16() for name, width in (("b_in", 32), ("b_out", 16)) if biased}
    inputs = [each.requires_grad_() for each in (x, weights, w_in, w_out, *biases.values())]
    with counted() as found:
        plan = mk.make_plan(experts, 4, backend="cuda")
        found.clear()
        with TorchLaunches() as torches:
            y = mk.expert_mlp(x, plan, w_in, w_out, weights=weights, backend="cuda", **biases)
            torch.autograd.grad(y, inputs, torch.ones_like(y))
    torches.names.remove("ones_like")
    assert len(found) <= 8, [each["kernel"] for each in found]
    assert len(torches.names) <= 8, torches.names


def norms_launches(num_experts: int) -> tuple[int, int]:
    """Launches of ours and of torch, forward and backward."""
    shapes = {"x": (16, 16), "w_in": (num_experts, 16, 32), "w_out": (num_experts, 32, 16)}
    shapes |= {"b_in": (num_experts, 32), "b_out": (num_experts, 16)}
    leaves = {name: torch.randn(shape).bfloat16().requires_grad_() for name, shape in shapes.items()}
    with counted() as found, TorchLaunches() as torches:
        s = mk.expert_norms(backend="cuda", **leaves)
        torch.autograd.grad(s, list(leaves.values()), torch.ones_like(s))
    return len(found), len(torches.names)


def test_launches_of_expert_norms_do_not_grow_with_the_experts():
    few, many = norms_launches(4), norms_launches(16)
    assert few == many
    assert many[0] == 9
