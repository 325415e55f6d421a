"""CUDA kernels, executed from PTX on the CPU (tests/ptx): odd sizes and places, and sizes that launchers refuse."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest
import torch

import moe_kernels as mk
from moe_kernels import verify
from moe_kernels.backends import cuda
from tests.helpers import grouped_gemm, kwta_edges, sinkhorn_sums
from tests.helpers.targets import Target
from tests.ptx import build, cuda_launch

MISSING = build.unavailable() or cuda_launch.unavailable()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"PTX: {MISSING}")

CUDA = Target("cuda", "cuda", "cpu")
BF16 = torch.bfloat16


def kwta() -> None:
    places = kwta_edges.PLACES["one behind another"], kwta_edges.PLACES["each tensor otherwise"]
    sizes = [*itertools.product((31, 300, 1100), (torch.float32, BF16, torch.float16)), (16401, torch.float32)]
    for (n, dtype), place in itertools.product(sizes, places):
        parts = (kwta_edges.rows_of(n), kwta_edges.rows_of(n), torch.randn(kwta_edges.ROWS, n))
        x, values, grad = (
            kwta_edges.placed(part.to(dtype)[:5], *where) for part, where in zip(parts, place, strict=True)
        )
        kwta_edges.check(CUDA, x, n // 4, "index" if n != 300 else "all", values, grad)


def products() -> None:
    grouped_gemm.check(CUDA, BF16, "one of two", (150, 200, 136, 2), "geglu", gathered=True)
    for gathered in (True, False):
        grouped_gemm.check(CUDA, BF16, "adversarial", (60, 37, 27, 5), "tanh", gathered)


def verified(op: str) -> None:
    row = verify.check(op, "cuda", torch.float32, "cpu", small=True)
    assert row.verdict == "ok", row.note


def rows() -> None:
    plan = mk.make_plan(torch.tensor([[0, 1], [1, -1], [-1, -1]]), 2, capacity=2, backend="reference")
    for dim in (40, 513):
        leaves = {"x": torch.randn(3, dim).to(BF16), "weights": torch.randn(3, 2).to(BF16)}

        def there_and_back(backend):
            return lambda x, weights: mk.combine(mk.dispatch(x, plan, backend=backend), plan, weights, backend=backend)

        got, expected = (
            grouped_gemm.results(there_and_back(backend), leaves, torch.ones(3, dim))
            for backend in ("cuda", "reference")
        )
        for name, each in expected.items():
            torch.testing.assert_close(got[name], each, rtol=2.0**-7, atol=2.0**-7 * float(each.abs().max()))


def sinkhorn() -> None:
    for n in (3, 7, 13, 31, 61, 64):
        scores = torch.randn(3, n, n) * torch.tensor([1.0, 300.0, 1.0])[:, None, None]
        scores[2, 0, : n // 2] = -torch.inf
        sums = {"rows": torch.rand(3, n) + 0.5, "columns": torch.rand(3, n) + 0.5}
        for leaves, settings in (({}, {}), (sums, {"tolerance": 0.1})):
            found = sinkhorn_sums.both(CUDA, {"scores": scores, **leaves}, torch.randn(3, n, n), 2, **settings)
            sinkhorn_sums.assert_same(found, n, atol=1e-5)


# (tokens, dim, trees, experts)
TREES = [(5, 8, 2, 3), (3, 13, 1, 8), (2, 16, 3, 37), (1, 24, 10, 5), (9, 8, 2, 24), (3, 8, 1, 72)]


def trees() -> None:
    """Inputs are multiples of 1/8: split and leaf logits are exact in any order of summation."""
    for index, (tokens, dim, trees, experts) in enumerate(TREES):
        dtype, gap = (torch.float32, BF16, torch.float16)[index % 3], (0, 1, 4, 8)[index % 4]
        shapes = {
            "x": (tokens, gap + dim),
            "split_weight": (trees, experts - 1, dim),
            "leaf_weight": (trees, experts, dim),
        }
        shapes |= {"split_bias": (trees, experts - 1), "leaf_bias": (trees, experts)}
        given = {name: (torch.randint(-4, 5, shape) / 8).to(dtype) for name, shape in shapes.items()}
        given["x"] = given["x"][:, gap:]
        found = []
        for backend in ("cuda", "reference"):
            leaves = {name: each.detach().requires_grad_() for name, each in given.items()}
            outputs = mk.tree_gate(**leaves, gamma=1.0, backend=backend)
            grads = [torch.linspace(-1, 1, each.numel()).view(each.shape).to(each.dtype) for each in outputs]
            weights, chosen, statistics = mk.tree_route(**given, gamma=0.25, statistics=True, backend=backend)
            exact = chosen, statistics.unsaturated
            found.append((*outputs, *torch.autograd.grad(outputs, list(leaves.values()), grads), weights, *exact))
        for got, expected in zip(*found, strict=True):
            off = 8 * torch.finfo(dtype).eps if got.is_floating_point() else 0.0
            torch.testing.assert_close(
                got, expected, rtol=off, atol=off * float(expected.detach().double().abs().max())
            )


CALLS: dict[str, Callable[[], None]] = {
    "kwta": kwta,
    "make_plan": lambda: verified("make_plan"),
    "dispatch and combine": rows,
    "grouped_gemm": products,
    "sinkhorn": sinkhorn,
    "tree_gate and tree_route": trees,
}


@pytest.mark.parametrize("call", CALLS)
def test_odd_sizes_and_places(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grouped_gemm.ROUTINGS, "one of two", (1, 0))
    with cuda_launch.use():
        CALLS[call]()


def test_verify_leaves_out_sizes_above_the_limits() -> None:
    total = len(list(verify.cases("sinkhorn", small=True)))
    with cuda_launch.use():
        row = verify.check("sinkhorn", "cuda", torch.float32, "cpu", small=True)
    assert (row.verdict, row.cases) == ("ok", total * 2 // 3)  # n = 3 and 12, not 70


@pytest.mark.parametrize("num_experts", [1, 31, 32, 33, 1030])
def test_experts_are_found(num_experts: int) -> None:
    rows, weight = torch.randn(40, 8).to(BF16), torch.randn(num_experts, 8, 8).to(BF16)
    for kind in range(4):
        chosen = torch.tensor([(-1 - r % 3, r % 3, num_experts // 2, r * 7)[kind] % num_experts for r in range(40)])
        offsets = torch.cat([torch.zeros(1).long(), chosen.bincount(minlength=num_experts).cumsum(0)])
        with cuda_launch.use(kind):
            got = mk.grouped_gemm(rows, weight, offsets, backend="cuda")
        torch.testing.assert_close(got, mk.grouped_gemm(rows, weight, offsets, backend="reference"))


def test_gradients_of_many_small_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grouped_gemm.ROUTINGS, "small", tuple(torch.randint(4, (220,)).tolist()))
    with cuda_launch.use():
        grouped_gemm.check(CUDA, BF16, "small", (330, 24, 136, 220), None, gathered=True)


@pytest.mark.parametrize(("tokens", "k", "experts", "tile"), [(900, 7, 33, 4096), (4300, 8, 128, 1024)])
def test_plans_of_many_tiles_or_chunks(tokens: int, k: int, experts: int, tile: int, monkeypatch) -> None:
    monkeypatch.setattr(cuda, "PLAN_TILE", tile)
    chosen = torch.where(torch.rand(tokens, k) < 0.5, 0, torch.randint(-1, experts, (tokens, k)))
    for order, limit in (("choice", None), ("token", None), ("choice", torch.arange(-9, experts - 9).int())):
        options = {"capacity": 50, "order": order, "limit": limit}
        expected = mk.make_plan(chosen, experts, **options, backend="reference")
        with cuda_launch.use(2):
            got = mk.make_plan(chosen, experts, **options, backend="cuda")
        for name, array in expected.state_dict().items():
            assert torch.equal(torch.as_tensor(getattr(got, name)), torch.as_tensor(array)), name


# (launcher, its pointers and strides, calls that it refuses). A call has the argument before the pointers, then the
# arguments after the strides, except the stream.
REFUSED = [
    ("kwta_fwd", [0, 5, 0, 0, 0, 0, 0], [
        (0, 1, 5, 6, 0, 0.0), (3, 1, 5, 2, 0, 0.0), (0, 1, 5, 2, 3, 0.0), (0, 1, 5, -1, 0, 0.0),
    ]),
    ("make_plan_fwd", [0, 0, 0, 0, 1, *[0] * 7], [
        (4, -1, 1, 1, 1, 0, 1), (4, 2**20, 2**12, 1, 1, 0, 1), (4, 1, 1, 0, 1, 1, 1), (4, 1, 1, 1, -1, 1, 1),
        (4, 1, 1, 1, 1, 2, 1), (4, 3, 2, 4, 1, 3, 1), (4, 3, 2, 2, 4, 5, 1),  # fewer rows than min(T * K, E * capacity)
    ]),
    *(("make_plan_fwd", [0, 0, 0, 0, chunks, *[0] * 7], [(4, 1, 1, 1, 1, 1, 1)]) for chunks in (0, 1025)),
    # iterations, p, scratch, stride of scratch, batch, n
    *(("sinkhorn_fwd", [0, 1, 1, 1.0, 1.0, 2, 0, 0, stride], [(dtype, 1, n, 0, 0, -1.0)])
      for dtype, n, stride in ((0, 8, 0), (0, 8, 12), (1, 64, -8), (1, 65, 8), (2, 1024, 2**22))),
    *(("sinkhorn_bwd", [0, 1, 1, 0, 1, 1, 1.0, 1.0, iterations, 0, 0, stride], [(0, 1, n, 0, 0, -1.0, 0, 0)])
      for iterations, n, stride in ((2, 8, 8 * 32), (2, 8, 8 * 33 + 4), (2, 65, 8 * 261),
                                    (2**62, 64, 2**20))),
    ("dispatch_fwd", [0] * 6, [(8, 1, 1, 1, 1, 1)]),
    # tokens, experts, k, rule, bias, groups, kept groups, renormalise, scale, forced and its size
    ("topk_gate_fwd", [0, 4, 0, 0, 0, 0], [
        (0, 1, 4, 5, 0, 0, 0, 0, 0, 1.0, 0, 0), (0, 1, 4, 3, 0, 0, 2, 1, 0, 1.0, 0, 0),
        (0, 1, 4, 1, 0, 0, 3, 1, 0, 1.0, 0, 0), (0, 1, 257, 1, 2, 0, 0, 0, 0, 1.0, 0, 0),
    ]),
    ("topk_gate_bwd", [0, 0, 0, 0, 4, 0, 0, 0], [(0, 1, 4, 5, -1, 0, 1.0)]),
    ("combine_fwd", [0, 1, 0, 0, 0], [(3, 1, 1, 1, 1), (0, 1, 1, 1, 2**31)]),
    ("combine_bwd", [0] * 9, [(3, 1, 1, 1, 1, 1), (0, 1, 1, 1, 1, 2**31)]),
    ("grouped_gemm_fwd", [0] * 10, [
        (0, 0, 0, 0, 1, 1, 8, 8), (3, 0, 0, 0, 1, 1, 8, 8), (1, 7, 0, 0, 1, 1, 8, 8), (1, -1, 0, 0, 1, 1, 8, 8),
        (1, 5, 0, 0, 1, 1, 8, 7), (1, 0, 0, 0, -1, 1, 8, 8), (1, 0, 0, 0, 2**31, 1, 8, 8), (1, 0, 0, 0, 1, 0, 8, 8),
        (1, 0, 0, 0, 1, 1, -1, 8), (1, 0, 0, 0, 1, 1, 8, 2**31), (1, 0, 0, 0, 2**31 - 1, 1, 8, 2**30),
        (1, 0, 0, 0, 1, 1, 12, 8), (1, 0, 0, 0, 1, 1, 8, 12), (1, 5, 0, 0, 1, 1, 8, 24),  # rows not of 16-byte pieces
    ]),
    *((op, [0, 12, 0, 0, *more], [(1, *after)]) for op, more, after in (  # nor is the step from row to row of x
        ("grouped_gemm_fwd", [0] * 6, (0, 0, 0, 1, 1, 8, 8)), ("grouped_gemm_bwd_weight", [0] * 6, (1, 1, 8, 8)),
    )),
    ("grouped_gemm_bwd_weight", [0] * 10, [(0, 1, 1, 8, 8), (1, 1, 1, 12, 8), (1, 1, 1, 8, 12)]),
    ("expert_mlp_bwd_hidden", [0] * 12, [(1, 7, 0, 0, 0, 1, 1, 8, 8), (1, 0, 0, 0, 0, 1, 1, 12, 8)]),
    ("grouped_gemm_norms", [0] * 10, [(1, 1, 0, 8, 8), (1, 1, 1, 12, 8)]),
    ("grouped_gemm_sum_rows", [0, 8, 0, 0, 0], [
        (3, 1, 8), (0, -1, 8), (0, 2**31, 8), (0, 1, -1), (0, 1, 2**30 + 1),
    ]),
    ("activation_bwd", [0, 0, 0], [(1, 9, 0, 1, 8)]),
    *((name, pointers, [
        (0, -1, 1, 2, 1.0, 0.0, 0.0), (0, 1, 0, 2, 1.0, 0.0, 0.0), (0, 1, 1, 1, 1.0, 0.0, 0.0),
        (0, 1, 1, 4097, 1.0, 0.0, 0.0), (3, 1, 1, 2, 1.0, 0.0, 0.0),
    ]) for name, pointers in (("tree_gate_fwd", [0] * 6), ("tree_gate_bwd", [0] * 8))),
    ("tree_route_fwd", [0, 1, *[0] * 10], [
        (0, -1, 1, 1, 2, 1.0), (0, 1, -1, 1, 2, 1.0), (0, 1, 1, 1025, 2, 1.0), (0, 1, 1, 1, 1, 1.0),
        (3, 1, 1, 1, 2, 1.0),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "pointers", "refused"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_launchers_refuse(name: str, pointers: list[int], refused: list[tuple[int, ...]]) -> None:
    for first, *sizes in refused:
        with pytest.raises(RuntimeError, match=f"{name}: CUDA error 1"):
            getattr(cuda_launch.module(), name)(first, *pointers, *sizes, 0)


def test_no_compiler_may_fuse_a_product_into_a_sum_of_shuffled_values():
    """ptxas may fuse add.f32 with a product that is one of its terms, add.rn.f32 not. Sums over lanes must have the
    same bits whichever ptxas or driver compiles them."""
    fusable = []
    for path in cuda_launch.compiled().modules.values():
        shuffled: set[str] = set()
        for line in path.read_text().splitlines():
            words = line.split(maxsplit=1)
            opcode, registers = words[0] if words else "", re.findall(r"%\w+", words[-1] if words else "")
            known = shuffled.intersection(registers[1:])
            if ".entry" in line:
                shuffled, kernel = set(), line
            elif opcode.startswith("shfl") or (opcode.startswith("mov") and known):
                shuffled.add(registers[0])
            elif re.fullmatch(r"(add|sub)(\.ftz)?\.f(32|64)", opcode) and len(known) == 1:
                fusable.append(f"{kernel}: {line.strip()}")
    assert not fusable
