"""Edge cases of grouped products."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import moe_kernels as mk
from moe_kernels.ops.grouped_gemm import kernels
from tests.helpers.expert_mlp import leaves_of
from tests.helpers.grouped_gemm import check, finest, judge, loop, offsets_of, results
from tests.helpers.inputs import behind_one, each_alone, far_apart, framed, gapped, padded, shifted
from tests.helpers.plans import plans

OP = "grouped_gemm"
SLOPE_AT_0 = {"relu": 0.0, "gelu": 0.5, "silu": 0.5, "tanh": 1.0}


def assert_equal_but_for_rounding(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Allows a relative error of 1e-5, since a GPU's reciprocal and exponential are approximate."""
    expected = expected.to(got.device, torch.float32).expand(got.shape)
    torch.testing.assert_close(got.float(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("activation", SLOPE_AT_0)
def test_slopes_at_zero(target, activation):
    """With pre-activations of 0 and output gradients of 1, each element of the gradient to x is the sum of a row of the
    weight times the activation's slope at 0."""
    dtype, device = finest(target), target.device
    offsets = torch.tensor([0, 2, 3, 3, 3, 3], dtype=torch.int32, device=device)
    # With these sizes and a bias Triton has compiled the kernels for other tests.
    din, dout, bias = (33, 70, torch.zeros(5, 70, dtype=dtype)) if target.compiles else (16, 24, None)
    leaves = {"x": torch.zeros(3, din, device=device, dtype=dtype)}
    leaves["weight"] = torch.ones(5, din, dout, device=device, dtype=dtype)

    def call(x, weight, backend=target.backend):
        return mk.grouped_gemm(x, weight, offsets, bias=bias, activation=activation, backend=backend)

    for zero in (0.0, -0.0):
        leaves["x"].fill_(zero)
        got = results(call, leaves, torch.ones(3, dout))
        assert not got["out"].any()
        assert_equal_but_for_rounding(got["x"], torch.full((1, 1), dout * SLOPE_AT_0[activation]))
    # At NaN the slope is the reference's.
    leaves["x"][0, 3] = math.nan
    got, expected = (
        results(partial(call, backend=backend), leaves, torch.ones(3, dout))["x"]
        for backend in (target.backend, "reference")
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("activation", SLOPE_AT_0)
def test_slopes_at_zero_of_a_hidden_layer(target, activation):
    if target.compiles and activation in ("gelu", "silu"):
        pytest.skip("slopes of gelu and silu are continuous at 0; other tests run these kernels")
    dtype = finest(target)
    plan = plans(target.device)["dropped"]
    kept = (plan.slot_row >= 0).sum(1, keepdim=True)
    # With these sizes and biases Triton has compiled the kernels for other tests.
    dim, hidden, dout = (19, 23, 18) if target.compiles else (16, 16, 8)
    b_in, b_out = (torch.zeros(5, width, dtype=dtype) if target.compiles else None for width in (hidden, dout))
    leaves = {
        "x": torch.zeros(plan.num_tokens, dim, device=target.device, dtype=dtype),
        "w_in": torch.ones(5, dim, hidden, device=target.device, dtype=dtype),
        "w_out": torch.ones(5, hidden, dout, device=target.device, dtype=dtype),
    }
    ones = torch.ones(plan.slot_row.shape, device=target.device, dtype=dtype)

    def mlp(x, w_in, w_out):
        given = {"weights": ones, "b_in": b_in, "b_out": b_out, "activation": activation}
        return mk.expert_mlp(x, plan, w_in, w_out, **given, backend=target.backend)

    got = results(mlp, leaves, torch.ones(plan.num_tokens, dout))
    assert_equal_but_for_rounding(got["x"], dout * hidden * SLOPE_AT_0[activation] * kept)
    # With relu the slope at NaN is finite, and so is the gradient to x.
    broken = int(kept.argmax())
    leaves["x"][broken] = math.nan
    got = results(mlp, leaves, torch.ones(plan.num_tokens, dout))
    for name in ("w_in", "w_out"):
        assert torch.equal(got[name].isnan().flatten(1).all(1), plan.used[broken]), name
    assert got["x"].isnan().any(1).tolist() == [activation != "relu" and t == broken for t in range(plan.num_tokens)]
    leaves["x"].zero_()

    def norms(x, w_in, w_out):
        bias = torch.zeros(5, dout, device=target.device, dtype=dtype)
        bias[:, 0] = 1
        return mk.expert_norms(x, w_in, w_out, b_in=b_in, b_out=bias, activation=activation, backend=target.backend)

    got = results(norms, leaves, torch.ones(plan.num_tokens, 5))
    # An expert's output is b_out = (1, 0, ...): the gradient of its norm is 1 in the first column, 0 in the others.
    assert_equal_but_for_rounding(got["x"], torch.full((plan.num_tokens, 1), 5 * hidden * SLOPE_AT_0[activation]))


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("gathered", [False, True])
def test_partial_tiles_on_every_axis(target, gathered, activation):
    if target.compiles and gathered == (activation == "gelu"):
        pytest.skip("Triton compiles two cases: gelu without a gather, swiglu with it")
    dtype = finest(target)
    # Triton's tiles here are 64 by up to 64, and it compiles one kernel for 5 to 8 experts.
    sizes, shares = ((170, 149, 142, 5), (3, 2, 0, 0, 0)) if target.compiles else ((601, 299, 282, 2), (3, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(check.__globals__["ROUTINGS"], "two", shares)
        check(target, dtype, "two", sizes, activation, gathered)


@pytest.mark.parametrize("transposed", [False, True])
def test_what_lies_around_the_operands_is_not_read(target, transposed):
    """x, weight, bias and the output gradient have NaN on all sides."""
    dtype, device, offsets = finest(target), target.device, offsets_of("zipf", 40, target.device)
    sizes = ((19, 26), (37, 8), (16, 33))
    if target.compiles:
        sizes = sizes[transposed:][:1]  # to save compilations
    for din, dout in sizes:
        leaves = {
            "x": torch.randn(40, din, device=device).to(dtype),
            "weight": (torch.randn(5, din, dout, device=device) / math.sqrt(din)).to(dtype),
            "bias": torch.randn(5, dout, device=device).to(dtype),
        }
        grad = torch.randn(40, dout, device=device).to(dtype)
        truth = results(
            lambda x, weight, bias: loop(x, weight, offsets, bias, "gelu", None),
            {name: each.cpu().double() for name, each in leaves.items()},
            grad.cpu(),
        )
        reference = results(
            lambda x, weight, bias: mk.grouped_gemm(
                x, weight, offsets, bias=bias, activation="gelu", backend="reference"
            ),
            leaves,
            grad,
        )
        around = {name: framed(each) for name, each in leaves.items()}
        if transposed:
            around["weight"] = framed(leaves["weight"].mT.contiguous()).mT
        given = {name: each.requires_grad_() for name, each in around.items()}
        out = mk.grouped_gemm(
            given["x"], given["weight"], offsets, bias=given["bias"], activation="gelu", backend=target.backend
        )
        gradients = torch.autograd.grad(out, list(given.values()), framed(grad))
        got = {"out": out.detach()} | dict(zip(given, gradients, strict=True))
        judge(target, dtype, got, reference, truth)


@pytest.mark.parametrize("activation", ["gelu", None])
@pytest.mark.parametrize("place", [padded, shifted, behind_one, gapped])
def test_operands_that_start_anywhere(target, place, activation):
    """Results agree within rounding if the start or a stride of one operand rules out accesses of 16 bytes."""
    if target.backend == "triton":
        pytest.skip("Triton itself specialises kernels by alignment")
    dtype, device = finest(target), target.device
    offsets = torch.tensor([0, 4, 4, 9], dtype=torch.int32, device=device)
    given = {"x": torch.randn(9, 16), "weight": torch.randn(3, 16, 24), "bias": torch.randn(3, 24)}
    given = {name: each.to(device, dtype) for name, each in (given | {"grad": torch.randn(9, 24)}).items()}
    found = []
    for moved in (None, *given):
        here = given if moved is None else given | {moved: place(given[moved])}
        leaves = [here[name].detach().requires_grad_() for name in ("x", "weight", "bias")]
        out = mk.grouped_gemm(*leaves[:2], offsets, bias=leaves[2], activation=activation, backend=target.backend)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, here["grad"])])
    rounding = 2.0**-6 if dtype == torch.bfloat16 else 1e-5
    for other in found[1:]:
        for got, expected in zip(other, found[0], strict=True):
            torch.testing.assert_close(got, expected, rtol=rounding, atol=8 * rounding)


@pytest.mark.parametrize("moved", ["all", "gradient", "aligned gradient", "far apart", "contiguous"])
def test_operands_of_an_expert_mlp_that_are_views(target, moved):
    """Results agree within rounding with those of aligned, contiguous operands."""
    if moved == "contiguous" and target.backend == "triton":
        pytest.skip("Triton itself specialises kernels by alignment")
    dtype, plan = finest(target), plans(target.device)["dropped"]
    dout = 18 if target.compiles else 12 if moved == "aligned gradient" else 16
    leaves, grad = leaves_of(plan, dtype, target.device, "gelu", dout=dout), torch.randn(plan.num_tokens, dout)
    apart = 2**30 - (5 if target.compiles else 4)  # with Triton no multiple of 4: see leaves_of
    places = {"far apart": lambda x: far_apart(x, (apart, 1)), "contiguous": behind_one}
    places["aligned gradient"] = lambda x: torch.cat([x, torch.full_like(x[:, :4], math.nan)], 1)[:, :dout]
    of = {"gradient": (), "aligned gradient": (), "far apart": ("x",), "contiguous": ("b_in", "b_out")}
    place = places.get(moved, padded)
    moved, to_y = of.get(moved, ("x", "weights", "b_in", "b_out")), torch.clone if moved == "contiguous" else place
    found = []
    for given, to in ((leaves, torch.clone), (leaves | {name: place(leaves[name]) for name in moved}, to_y)):
        given = {name: each.detach().requires_grad_() for name, each in given.items()}
        y = mk.expert_mlp(plan=plan, backend=target.backend, **given)
        found.append([y.detach(), *torch.autograd.grad(y, list(given.values()), to(grad.to(y.device, dtype)))])
    for got, expected in zip(*found, strict=True):
        rounding = 8 * torch.finfo(dtype).eps * float(expected.float().abs().max())
        torch.testing.assert_close(got, expected, rtol=0, atol=rounding)


@pytest.mark.parametrize("apart", ["experts", "rows of an expert", "columns of an expert", "rows of x", "gradient"])
def test_operands_far_apart(target, apart):
    dtype, device = finest(target), target.device
    offsets = torch.tensor([0, 7, 7, 18], dtype=torch.int32, device=device)
    activation, columns = ("swiglu", 8) if apart == "columns of an expert" else ("relu", 16)
    din = 80 if apart == "rows of an expert" else 16
    x, grad = torch.randn(20, din, device=device).to(dtype), torch.randn(20, columns, device=device).to(dtype)
    weight = torch.randn(3, din, 16, device=device).to(dtype)
    strides = {"experts": (2**30, 16, 1), "rows of an expert": (16, 2**30, 1), "columns of an expert": (16, 1, 2**30)}
    there = {
        "x": far_apart(x) if apart == "rows of x" else x,
        "weight": far_apart(weight, strides[apart]) if apart in strides else weight,
    }
    found = []
    for given, backend in ((there, target.backend), ({"x": x, "weight": weight}, "reference")):
        leaves = {name: each.detach().requires_grad_() for name, each in given.items()}
        out = mk.grouped_gemm(leaves["x"], leaves["weight"], offsets, activation=activation, backend=backend)
        to = far_apart(grad) if apart == "gradient" and backend == target.backend else grad
        found.append((out.detach(), *torch.autograd.grad(out, list(leaves.values()), to)))
    rounding = 2.0**-6 if dtype == torch.bfloat16 else 1e-4
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=rounding, atol=8 * rounding)


def test_gradient_of_many_columns(target):
    dtype = finest(target)
    grad, pre = torch.randn(2, 3, 4200).to(target.device, dtype)
    got = kernels(target.backend).activation_bwd(grad, pre, "relu")
    assert torch.equal(got, torch.where(pre > 0, grad, 0))


def test_gathered_rows_far_apart(target):
    dtype, device = finest(target), target.device
    offsets = torch.tensor([0, 7, 18], dtype=torch.int32, device=device)
    token = torch.randint(-1, 20, (20,), dtype=torch.int32, device=device)
    token[:2] = 19
    x, weight = torch.randn(20, 16, device=device).to(dtype), torch.randn(2, 16, 16, device=device).to(dtype)
    got, expected = (
        results(
            lambda weight, place=place, backend=backend: mk.grouped_gemm(
                place(x), weight, offsets, row_token=token, backend=backend
            ),
            {"weight": weight},
            torch.ones(20, 16),
        )
        for place, backend in ((far_apart, target.backend), (torch.clone, "reference"))
    )
    for name in got:
        torch.testing.assert_close(got[name], expected[name], rtol=2.0**-6, atol=0.1)


@pytest.mark.parametrize(("experts", "most"), [(70, 40), (300, 5)])
def test_the_expert_of_a_tile_is_found_among_many(target, monkeypatch, experts, most):
    """Kernels sum the experts' tiles up, CUDA those of up to 255 experts. Of more experts they search the offsets: CUDA
    in rounds of 32 comparisons, Triton by bisection from E = MAX_BLOCK_E on."""
    if target.backend == "triton" and experts == 300:
        monkeypatch.setattr("moe_kernels.backends.triton._grouped_configs.MAX_BLOCK_E", 8)
    dtype, device = finest(target), target.device
    counts = torch.randint(0, most, (experts,)).masked_fill(torch.rand(experts) < 0.3, 0)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(device, torch.int32)
    x, weight = (torch.randn(*size, 16).to(device, dtype) for size in ((int(offsets[-1]) + 40,), (experts, 16)))
    got, expected = (mk.grouped_gemm(x, weight, offsets, backend=each) for each in (target.backend, "reference"))
    rounding = 2.0**-6 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("activation", [None, "relu", "swiglu"])
def test_each_gradient_alone_is_the_same(target, activation):
    dtype, device, offsets = finest(target), target.device, offsets_of("adversarial", 30, target.device)
    token = torch.randint(-1, 15, (30,), device=device)
    din, dout = (33, 70) if target.compiles else (16, 24)  # Triton has compiled the former for other tests
    leaves = {
        "x": torch.randn(15, din, device=device).to(dtype),
        "weight": torch.randn(5, din, dout, device=device).to(dtype),
        "bias": torch.randn(5, dout, device=device).to(dtype),
    }

    def call(x, weight, bias):
        return mk.grouped_gemm(
            x, weight, offsets, bias=bias, activation=activation, row_token=token, backend=target.backend
        )

    grad = torch.randn(dout // 2 if activation == "swiglu" else dout, 30, device=device).to(dtype).t()
    together = results(call, leaves, grad)
    alone = each_alone(call, leaves, grad)
    assert all(torch.equal(each, together[name]) for name, each in alone.items())


@pytest.mark.parametrize("activation", ["relu", "geglu"])
def test_each_gradient_of_an_expert_mlp_alone_is_the_same(target, activation):
    dtype, plan = finest(target), plans(target.device)["unused rows"]
    leaves = leaves_of(plan, dtype, target.device, activation)

    def call(**given):
        return mk.expert_mlp(plan=plan, activation=activation, backend=target.backend, **given)

    grad = torch.randn(18, plan.num_tokens, device=target.device).to(dtype).t()
    together = results(call, leaves, grad)
    alone = each_alone(call, leaves, grad)
    for name, each in alone.items():
        torch.testing.assert_close(each, together[name], rtol=0, atol=0, msg=name)


def test_index_arrays_that_are_views(target):
    dtype, device = finest(target), target.device
    offsets, token = offsets_of("zipf", 30, device), torch.randint(-1, 9, (30,), dtype=torch.int32, device=device)
    x, weight = torch.randn(9, 16, device=device).to(dtype), torch.randn(5, 16, 16, device=device).to(dtype)
    expected = mk.grouped_gemm(x, weight, offsets, row_token=token, backend=target.backend)
    for index in (torch.int32, torch.int64):
        views = []
        for each in (offsets, token):
            middle, second = each.new_full((len(each) + 2,), 2**30), each.new_full((2 * len(each),), 2**30)
            middle[1:-1], second[::2] = each, each
            views.append([middle.to(index)[1:-1], second.to(index)[::2]])
        for of_offsets, of_token in zip(*views, strict=True):
            got = mk.grouped_gemm(x, weight, of_offsets, row_token=of_token, backend=target.backend)
            assert torch.equal(got, expected)
