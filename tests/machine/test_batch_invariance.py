"""GPU kernels in the mode batch_invariant: their PTX, executed on the CPU, gives slices the bits of the whole.

Wholes and slices are on both sides of each switch of tiles by the number of rows: Triton's at 96 rows per expert
(_grouped_configs.py), CUDA's at 64 (moe/cuda/grouped_gemm.cuh), for each class of widths.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

import moe_kernels as mk
from moe_kernels import backends
from moe_kernels import nn as mnn
from moe_kernels.sizes import is_fixed
from tests.helpers.invariance import rows_that_differ
from tests.helpers.planted_ptx import GPU, on, pytestmark  # noqa: F401
from tests.ptx import session, triton_launch

E, WHOLE = 2, 210  # 105 rows per expert; those of the slices are 1 to 40 rows
PARTS = (slice(0, 1), slice(4, 6), slice(100, 140))
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLACES = [("triton", 80), ("triton", 90), ("cuda", 80)]
# Columns of the weights, by the class of tiles that they select on sm_80 and sm_90: few columns, the largest tile, and
# those for rows that are no multiples of 16 bytes.
WIDTHS = {"few columns": (48, 80), "largest": (48, 272), "general": (33, 70)}


@contextlib.contextmanager
def place(backend, capability):
    with on(backend), triton_launch.capability(capability) if backend == "triton" else contextlib.nullcontext():
        yield


def random(*shape, dtype=FP32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def experts():
    return (torch.arange(WHOLE, dtype=torch.int32) % E)[:, None]


def grouped(backend, dtype, width, activation=None, halves=False):
    weight = random(E, *width, dtype=dtype)
    if halves:
        weight[:, width[0] // 2 :] = weight[:, : width[0] // 2]
    weight.requires_grad_()

    def call(x, chosen):
        plan = mk.make_plan(chosen, E, backend=backend)
        rows = mk.dispatch(x, plan, backend=backend)
        out = mk.grouped_gemm(rows, weight, plan.expert_offsets, activation=activation, backend=backend)
        return [mk.combine(out, plan, backend=backend)]

    return call, (random(WHOLE, width[0], dtype=dtype), experts())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("backend", "capability"), PLACES)
def test_products(backend, capability, width):
    activation = "gelu" if backend == "cuda" else None  # Triton compiles more kernels with it; test_rows has it
    with place(backend, capability), session.recorded() as launches:
        call, given = grouped(backend, BF16, WIDTHS[width], activation)
        assert not rows_that_differ(call, *given, parts=PARTS)
        with torch.no_grad(), mk.batch_invariant():  # a rollout: no gradient, so outside the mode other tiles
            whole = call(*given)[0]
            assert torch.equal(call(*(each[:5] for each in given))[0], whole[:5])
    assert launches


@pytest.mark.parametrize(("backend", "capability"), PLACES)
def test_other_dtypes(backend, capability):
    with place(backend, capability):
        if capability == 80:
            call, given = grouped(backend, FP16, WIDTHS["few columns"], "swiglu")
            assert not rows_that_differ(call, *given, parts=PARTS)
        else:
            call, given = grouped(backend, FP32, WIDTHS["few columns"])
            assert not rows_that_differ(call, *given, parts=PARTS)


SWITCHES = [(80, False, 64), (80, True, 64), (90, False, 64), (90, True, 128)]


@pytest.mark.parametrize(("capability", "mode", "rows"), SWITCHES)
def test_the_switch_of_triton_is_crossed(capability, mode, rows):
    """Without a gradient, 65 rows per expert have tiles for few, except with wgmma in the mode; 105 have others."""
    with place("triton", capability), torch.no_grad():
        call, given = grouped("triton", BF16, WIDTHS["few columns"])
        with session.recorded() as launches, mk.batch_invariant(mode):
            whole = call(*given)[0]
            part = call(*(each[:130] for each in given))[0]
        grids = [each.grid[0] for each in launches if each.kernel.title == "_grouped_gemm_fwd"]
        assert grids == [WHOLE // 128 + E + 1, 130 // rows + E + 1]
        assert torch.equal(part, whole[:130])


def test_the_switch_of_cuda_is_crossed():
    with place("cuda", 80), torch.no_grad():
        call, given = grouped("cuda", BF16, WIDTHS["few columns"])
        with session.recorded() as launches, mk.batch_invariant():
            for part in (slice(None), slice(40)):
                call(*(each[part] for each in given))
        assert len({each.kernel.key for each in launches if "grouped_gemm_kernel" in each.kernel.title}) == 2


def rows_of(backend):
    """By name: a call and its inputs."""
    split, leaf = random(2, 4, 48).requires_grad_(), random(2, 5, 48).requires_grad_()
    w_in, w_out = random(E, 48, 32, dtype=BF16).requires_grad_(), random(E, 32, 48, dtype=BF16).requires_grad_()
    x, short = random(64, 48), random(64, 48, dtype=BF16)
    one = split[:1].to(BF16), leaf[:1].to(BF16)
    activation = "gelu" if backend == "cuda" else "relu"  # for Triton the cheaper one to compile

    def mlp(x, logits):
        weights, chosen = mk.topk_gate(logits, 2, backend=backend)
        plan = mk.make_plan(chosen, E, backend=backend)
        y = mk.expert_mlp(x, plan, w_in, w_out, weights=weights, activation=activation, backend=backend)
        return [y, weights]

    return {
        "topk_gate": (lambda logits: mk.topk_gate(logits, 3, order="softmax_topk", backend=backend)[:1], (x,)),
        "kwta": (lambda x: [mk.kwta(x, 7, backend=backend)], (x,)),
        "tree_gate": (lambda x: mk.tree_gate(x, split, leaf, gamma=4.0, backend=backend), (x,)),
        "tree_gate, one tree": (lambda x: mk.tree_gate(x, *one, gamma=4.0, backend=backend), (short,)),
        "expert_mlp": (mlp, (short, random(64, E))),
        "expert_norms": (lambda x: [mk.expert_norms(x, w_in, w_out, backend=backend)], (short,)),
    }


@pytest.mark.parametrize("name", rows_of("triton"))
@pytest.mark.parametrize(("backend", "capability"), PLACES)
def test_rows(backend, capability, name):
    with place(backend, capability):
        call, given = rows_of(backend)[name]
        # Slices of gradients start at multiples of 16 bytes, as the whole does: Triton compiles other kernels if not.
        assert not rows_that_differ(call, *given, parts=(slice(0, 1), slice(4, 6), slice(20, 53)))


@pytest.mark.parametrize("frozen", ["split", "leaf"])
def test_a_frozen_weight_of_a_tree_gate_changes_no_other_gradient(frozen):
    given = {"x": random(64, 48), "split": random(2, 4, 48), "leaf": random(2, 5, 48)}
    with place("triton", 80), mk.batch_invariant():
        found = []
        for trained in (given.keys(), given.keys() - {frozen}):
            leaves = {name: each.clone().requires_grad_(name in trained) for name, each in given.items()}
            mk.tree_gate(*leaves.values(), gamma=4.0, backend="triton")[0].square().sum().backward()
            found.append([leaves[name].grad for name in given if name != frozen])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("backend", "capability"), PLACES[1:])  # test_rows has its operations on sm_80
def test_a_layer(backend, capability):
    """nn.MoE whole: the router is float32, which "cuda" does not multiply, so that Triton does."""
    torch.manual_seed(0)
    layer = mnn.MoE(mnn.TopKGate(48, E, 1, order="softmax_topk"), mnn.ExpertMLP(E, 48, 32)).bfloat16()

    def call(x):
        out = layer(x)
        return [out.y, out.gates[0].weights]

    with place(backend, capability), mk.use_backend(backend):
        assert not rows_that_differ(call, random(64, 48, dtype=BF16), parts=(slice(0, 2), slice(20, 53)))


# Planted in the products of few rows.
DEFECTS = {
    "a split of K": lambda run, x, w: run(x[:, ::2], w[:, ::2]) + run(x[:, 1::2], w[:, 1::2]),
    "another order of sums": lambda run, x, w: run(x.flip(1), w.flip(1)),
}


@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.parametrize(("backend", "capability"), PLACES)
def test_defects_are_seen(backend, capability, defect, monkeypatch):
    with place(backend, capability):
        kernels = backends.load(backend, "grouped_gemm")
        forward = kernels.grouped_gemm_fwd

        def planted(x, weight, offsets, row_token, *rest):
            assert is_fixed()
            if len(x) > 64:
                return forward(x, weight, offsets, row_token, *rest)
            run = lambda a, w: forward(a.contiguous(), w.contiguous(), offsets, row_token, *rest)[0]  # noqa: E731
            return DEFECTS[defect](run, x, weight), x.new_empty(0)

        call, (x, chosen) = grouped(backend, BF16, (64, 80), halves=True)
        # The halves of a row nearly cancel, so that rounding errors of partial sums are as large as the result.
        given = torch.cat([x[:, :32] * 2**14, x[:, 32:] - x[:, :32] * 2**14], 1), chosen
        assert not rows_that_differ(call, *given, parts=PARTS[:2])
        monkeypatch.setattr(kernels, "grouped_gemm_fwd", planted)
        assert rows_that_differ(call, *given, parts=PARTS[:2])
