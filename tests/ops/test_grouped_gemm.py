"""grouped_gemm: values and gradients against a float64 loop over experts."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import moe_kernels as mk
from moe_kernels import backends
from moe_kernels.backends.native import grouped_gemm_cpu
from tests.helpers.grouped_gemm import (
    ACTS,
    DTYPES,
    ROUTINGS,
    check,
    fenced,
    finest,
    judged,
    loop,
    offsets_of,
    results,
    skip_unsupported,
)

OP = "grouped_gemm"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [37, 64])
def test_rows_are_summed_by_token(target, dtype, width):
    """grouped_gemm_sum_rows, a sum over the rows of each token, gives the same bits twice. Token 17 has no row."""
    skip_unsupported(target, dtype)
    rows, token = torch.randn(300, width).to(dtype), torch.randint(-1, 100, (300,), dtype=torch.int32)
    token[token == 17] = 18
    token[::7] = 4
    expected = torch.zeros(101, width, dtype=torch.float64).index_add(0, token.long() % 101, rows.double())[:100]
    given = rows.to(target.device), token.to(target.device)
    first, again = (backends.load(target.backend, OP).grouped_gemm_sum_rows(*given, 100) for _ in range(2))
    assert torch.equal(first, again)
    eps = torch.finfo(dtype).eps * (1 if target.interpreted and dtype == torch.bfloat16 else 0.5)
    allowed = 50 * torch.finfo(torch.float32).eps * expected.abs().max() + eps * expected.abs()
    assert ((first.cpu().double() - expected).abs() <= allowed).all()
    assert not first[17].any()
    assert not backends.load(target.backend, OP).grouped_gemm_sum_rows(given[0][:0], given[1][:0], 3).any()


# float16 has only two cases, to save time.
CASES = [(kind, dtype) for kind in ROUTINGS for dtype in (DTYPES if kind in ("zipf", "adversarial") else DTYPES[:2])]


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_values_and_gradients_are_those_of_the_loop(target, kind, dtype):
    skip_unsupported(target, dtype)
    if target.compiles and (kind, dtype) in (("empty", torch.float32), ("single", torch.bfloat16)):
        pytest.skip("to save compilations, Triton runs this routing in the other dtype only")
    activation = dict(zip(ROUTINGS, (None, "gelu", "swiglu", "relu", "tanh"), strict=True))[kind]
    sizes = (37, 19, 26, 5) if target.interpreted else (150, 33, 70, 5)
    for gathered in (False, True):
        check(target, dtype, kind, sizes, activation, gathered, with_bias=kind != "adversarial")


# Skipped for Triton without a GPU, which runs these activations in float32 only, to save compilations.
IN_FLOAT32 = [(torch.bfloat16, act) for act in ("relu", "gelu", "silu", "tanh", "geglu")]


@pytest.mark.parametrize("activation", [act for act in ACTS if act])
def test_activations(target, activation):
    for dtype in (torch.float32, torch.bfloat16):
        if target.compiles and (dtype, activation) in IN_FLOAT32:
            continue
        if backends.unsupported(target.backend, OP, target.device, dtype) is None:
            sizes = (29, 33, 70, 5) if target.compiles else (29, 16, 40, 5)
            check(target, dtype, "zipf", sizes, activation, gathered=False)


@pytest.mark.parametrize("sizes", [(0, 4, 6, 5), (9, 0, 6, 5), (9, 4, 0, 5), (9, 1, 1, 5), (5, 300, 2, 5)], ids=str)
def test_empty_and_thin(target, sizes):
    if target.compiles and sizes[0] != 9:  # to sizes of which Triton has compiled most kernels for other tests
        sizes = tuple({4: 33, 6: 70, 300: 301}.get(size, size) for size in sizes)
    for dtype in (torch.float32, torch.bfloat16) if target.backend == "cpu" else (finest(target),):
        for gathered in (True,) if target.compiles and sizes[0] == 9 else (False, True):
            check(target, dtype, "uniform", sizes, None, gathered)


def test_weights_of_any_strides(target):
    dtype, device = finest(target), target.device
    offsets, x = offsets_of("uniform", 40, device), torch.randn(40, 24, device=device).to(dtype)
    base = torch.randn(5, 32, 32, device=device).to(dtype)
    for weight in (
        base[:, :24, :16],
        base.transpose(1, 2)[:, :24, :16],
        base[:, 1:25, 3:19],
        base[:, :24, ::2],
        base[:1, :24, :16].expand(5, -1, -1),
        base[::2, :24].repeat(2, 1, 1)[:5],
    ):
        for rows in (x, torch.randn(24, 40, device=device).to(dtype).t(), x[:1].expand(40, -1)):
            judged(
                target,
                dtype,
                lambda x, weight, backend: mk.grouped_gemm(x, weight, offsets, backend=backend),
                lambda x, weight: loop(x, weight, offsets, None, None, None),
                {"x": rows, "weight": weight},
                torch.ones(1, 1).expand(40, weight.shape[2]),
            )


def test_nan_stays_in_its_row_and_in_its_expert(target):
    dtype, device = finest(target), target.device
    offsets = torch.tensor([0, 4, 4, 8, 10, 12], dtype=torch.int32, device=device)
    din, dout = (33, 70) if target.compiles else (16, 24)  # Triton has compiled the former for other tests
    x, weight = torch.randn(12, din, device=device).to(dtype), torch.randn(5, din, dout, device=device).to(dtype)
    bias = torch.randn(5, dout, device=device).to(dtype)
    x[5], weight[1], bias[1] = math.nan, math.nan, math.inf  # expert 1 has no rows
    got = results(
        lambda **given: mk.grouped_gemm(
            given["x"], given["weight"], offsets, bias=given["bias"], activation="relu", backend=target.backend
        ),
        {"x": x, "weight": weight, "bias": bias},
        torch.ones(12, dout),
    )
    assert got["out"].isnan().all(1).tolist() == [row == 5 for row in range(12)]
    assert got["weight"].isnan().flatten(1).any(1).tolist() == [False, False, True, False, False]
    assert not got["weight"][1].any()
    assert not got["bias"][1].any()


@pytest.mark.parametrize("kind", ROUTINGS)
def test_nothing_is_written_beside_the_outputs(target, kind):
    with fenced():
        check(target, finest(target), kind, (37, 19, 26, 5), "geglu", gathered=True)


def test_tanh_saturates_at_one(target):
    options = {"dtype": finest(target), "device": target.device}
    rows, weight = torch.tensor([10.0, 50.0, math.inf, -10.0, -math.inf, math.nan], **options), torch.ones(1, **options)
    offsets = torch.tensor([0, 6], dtype=torch.int32, device=target.device)
    y = mk.grouped_gemm(rows[:, None], weight[:, None, None], offsets, activation="tanh", backend=target.backend)
    assert y[:5, 0].tolist() == [1, 1, 1, -1, -1]
    assert y[5].isnan()


def test_tanh_keeps_the_digits_of_small_numbers(target):
    """Computed from exp(2 x), which is near 1, tanh(1e-4) would have about three digits."""
    dtype = finest(target)
    x = torch.logspace(-6, 0, 61).to(dtype)
    rows, offsets = x.to(target.device)[:, None], torch.tensor([0, len(x)], dtype=torch.int32, device=target.device)
    y = mk.grouped_gemm(rows, rows.new_ones(1, 1, 1), offsets, activation="tanh", backend=target.backend)
    truth = torch.tanh(x.double())
    assert ((y[:, 0].cpu().double() - truth).abs() <= (torch.finfo(dtype).eps + 1e-6) * truth).all()


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_activations_in_their_tails(target, activation):
    """For x from -12 to -6 gelu(x) is not 0, although 1 + erf(x / sqrt(2)) is 0 in float32."""
    dtype, options = finest(target), {"backend": target.backend, "activation": activation}
    ends = torch.tensor([200, math.inf, -math.inf, math.nan])
    x = torch.cat([torch.linspace(-12, 12, 997), ends]).to(dtype)
    exact = x.double().requires_grad_()
    truth = exact * torch.erfc(-exact / math.sqrt(2)) / 2 if activation == "gelu" else F.silu(exact)
    (slope,) = torch.autograd.grad(truth.sum(), exact)
    rows, offsets = x.to(target.device)[:, None].requires_grad_(), torch.tensor([0, len(x)], dtype=torch.int32)
    y = mk.grouped_gemm(rows, rows.new_ones(1, 1, 1), offsets.to(target.device), **options)
    (grad,) = torch.autograd.grad(y.sum(), rows)
    eps = torch.finfo(dtype).eps * (2 if target.interpreted and dtype == torch.bfloat16 else 1)
    lost = 1e-6 if target.backend in ("cpu", "reference") else 0.0
    for got, expected in ((y, truth), (grad, slope)):
        torch.testing.assert_close(got[-4:, 0].cpu().double(), expected[-4:].detach(), equal_nan=True)
    error = (y[:, 0].cpu().double() - truth).abs()[:-4]
    assert (error <= (eps + 1e-5) * truth[:-4].abs() + lost).all()
    error = (grad[:, 0].cpu().double() - slope).abs()[:-4]
    near_0 = 1e-6 * (exact[:-4].abs() < 2)  # the slope is 0 at a point of this range
    assert (error <= (eps + 1e-5) * slope[:-4].abs() + lost + near_0).all()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("activation", ["gelu", "silu", "tanh", "swiglu", "geglu", None])
def test_derivatives_in_float64(backend, activation):
    offsets = offsets_of("adversarial", 10)
    x, weight, bias = (
        torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((10, 3), (5, 3, 4), (5, 4))
    )
    for token in (None, torch.randint(-1, 10, (12,))):

        def call(x, weight, bias, token=token):
            return mk.grouped_gemm(
                x, weight, offsets, bias=bias, activation=activation, row_token=token, backend=backend
            )

        assert torch.autograd.gradcheck(call, (x, weight, bias))


def test_a_second_derivative_is_refused():
    x, weight = torch.randn(4, 3, requires_grad=True), torch.randn(1, 3, 5, requires_grad=True)
    y = mk.grouped_gemm(x, weight, torch.tensor([0, 4]), activation="gelu", backend="cpu")
    for loss in (y.square().sum(), y.sum()):  # the second loss gives y a constant gradient
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match="grouped_gemm: kernels are once_differentiable"):
            dx.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="grouped_gemm: kernels are once_differentiable"):
            torch.autograd.grad(dx.sum() + x.sum(), x)


def test_a_bias_of_any_strides(target):
    dtype = torch.bfloat16 if target.backend == "cuda" else torch.float32
    # With the former sizes, and a pre-activation for backward, Triton has compiled the kernels for other tests.
    din, dout = (33, 70) if target.compiles else (4, 6)
    x, weight, bias = (torch.randn(size, dtype=dtype) for size in ((9, din), (3, din, dout), (3, dout)))
    x.requires_grad_(target.compiles)
    offsets, device = torch.tensor([0, 4, 4, 8], dtype=torch.int32), target.device
    given = x.to(device), weight.to(device), offsets.to(device)
    padded = torch.full((3, dout + 4), torch.nan, dtype=dtype)
    padded[:, 2:-2] = bias
    for strided in (padded.to(device)[:, 2:-2], bias.t().contiguous().to(device).t()):
        expected = mk.grouped_gemm(*given, bias=bias.to(device), activation="gelu", backend=target.backend)
        got = mk.grouped_gemm(*given, bias=strided, activation="gelu", backend=target.backend)
        assert torch.equal(got, expected)
    wide, w_out = bias[:, :din].to(device), given[1].mT.contiguous() if target.compiles else given[1].mT
    b_in = bias if target.compiles else None
    strided, packed = (
        mk.expert_norms(given[0], given[1], w_out, b_in=b_in, b_out=b_out, backend=target.backend)
        for b_out in (wide, wide.contiguous())
    )
    assert torch.equal(strided, packed)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_an_index_that_int32_cannot_hold_is_refused(backend):
    x, weight, offsets = torch.randn(4, 3), torch.randn(1, 3, 5), torch.tensor([0, 4])
    with pytest.raises(ValueError, match="grouped_gemm: expert_offsets"):
        mk.grouped_gemm(x, weight, torch.tensor([0, 2**32 + 4]), backend=backend)
    for token in (2**32 + 1, -(2**32) + 1):
        with pytest.raises(ValueError, match="grouped_gemm: row_token"):
            mk.grouped_gemm(x, weight, offsets, row_token=torch.tensor([0, 1, 2, token]), backend=backend)


def test_only_what_is_asked_for_is_computed():
    x, weight, bias = torch.randn(4, 3), torch.randn(1, 3, 5), torch.randn(1, 5, requires_grad=True)
    y = mk.grouped_gemm(x, weight, torch.tensor([0, 4]), bias=bias, backend="cpu")
    torch.testing.assert_close(torch.autograd.grad(y.sum(), bias)[0], torch.full((1, 5), 4.0))
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    for keep, rows in ((False, 0), (True, 4)):
        out, pre = torch.ops.moe_kernels.grouped_gemm_fwd(x, weight, offsets, None, bias, "relu", keep, "cpu")
        assert pre.shape == (rows, 5)
        assert out.shape == (4, 5)


def test_flops_are_counted():
    x, weight = torch.randn(9, 6, requires_grad=True), torch.randn(5, 6, 8, requires_grad=True)
    token = torch.randint(0, 9, (20,))
    with FlopCounterMode(display=False) as counter:
        mk.grouped_gemm(x, weight, offsets_of("zipf", 20), row_token=token, backend="cpu").sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 20 * 6 * 8


@pytest.mark.parametrize("small", [True, False], ids=["by C++", "by torch"])
def test_bad_input_is_named(small, monkeypatch):
    monkeypatch.setattr(grouped_gemm_cpu, "in_cpp", lambda *args: small)
    x, weight, offsets = torch.randn(9, 4), torch.randn(2, 4, 3), torch.tensor([0, 5, 9])
    for args, more, error, words in (
        ((x.long(), weight, offsets), {}, TypeError, "rows must have dtype"),
        ((x[0], weight, offsets), {}, ValueError, r"rows must be \(R, Din\)"),
        ((x, weight[0], offsets), {}, ValueError, r"weight must be \(E, Din, Dout\)"),
        ((x, weight[:, :3], offsets), {}, ValueError, r"weight must be \(E, Din, Dout\) = \(2, 4, 3\)"),
        ((x, weight.double(), offsets), {}, TypeError, "weight must have dtype float32; got float64"),
        ((x, weight, offsets[1:]), {}, ValueError, r"expert_offsets must be \(E \+ 1,\) = \(3,\) on cpu"),
        ((x, weight, offsets.float()), {}, TypeError, "expert_offsets must have dtype int32, int64"),
        ((x, weight, torch.tensor([1, 5, 9])), {}, ValueError, "expert_offsets must rise from 0 to at most R = 9"),
        ((x, weight, torch.tensor([0, 5, 4])), {}, ValueError, "expert_offsets must rise"),
        ((x, weight, torch.tensor([0, 5, 10])), {}, ValueError, "expert_offsets must rise"),
        ((x, weight, offsets), {"bias": torch.randn(2, 4)}, ValueError, r"bias must be \(E, Dout\) = \(2, 3\)"),
        ((x, weight, offsets), {"activation": "celu"}, ValueError, "activation must be None or one of 'relu'"),
        ((x, weight, offsets), {"activation": "swiglu"}, ValueError, "swiglu needs an even number of columns"),
        ((x, weight, offsets), {"row_token": torch.tensor([0, 9] * 5)}, ValueError, "row_token must be from -1"),
        ((x, weight, offsets), {"row_token": torch.tensor([-2, 8] * 5)}, ValueError, "row_token must be from -1"),
        ((x, weight, offsets), {"row_token": torch.tensor([[0]])}, ValueError, r"row_token must be \(R,\)"),
    ):
        for backend in ("cpu", "reference"):
            with pytest.raises(error, match=f"^grouped_gemm: {words}"):
                mk.grouped_gemm(*args, **more, backend=backend)


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_gradient_of_a_weight_has_its_strides(target, with_bias):
    """The gradient to a transposed view of a parameter is transposed too, so autograd need not copy it."""
    offsets = torch.tensor([0, 3, 3, 9, 9, 9], dtype=torch.int32, device=target.device)
    token = torch.tensor([4, 0, 1, 1, 2, 3, 0, 4, 2, -1], dtype=torch.int32, device=target.device)
    # With the former Triton has compiled most kernels for other tests.
    din, dout, activation = (17, 23, "gelu") if target.compiles else (8, 12, "silu")
    dtype, off = (torch.bfloat16, 0.05) if target.backend == "cuda" else (torch.float32, 1e-4)
    stored = torch.randn(5, dout, din, device=target.device, dtype=dtype, requires_grad=True)  # (E, Dout, Din)
    bias = torch.randn(5, dout, device=target.device, dtype=dtype, requires_grad=True) if with_bias else None
    x = torch.randn(5, din, device=target.device, dtype=dtype, requires_grad=True)
    leaves = [x, stored] + ([bias] if with_bias else [])

    def gradients(weight, backend):
        given = {"bias": bias, "activation": activation, "row_token": token, "backend": backend}
        return torch.autograd.grad(mk.grouped_gemm(x, weight, offsets, **given).square().sum(), leaves)

    found = gradients(stored.transpose(1, 2), target.backend)
    for mine, its in zip(found, gradients(stored.transpose(1, 2).contiguous(), "reference"), strict=True):
        torch.testing.assert_close(mine, its, rtol=off, atol=off * its.abs().max().item())
    assert found[1].is_contiguous()
    assert (found[1][1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("din", "dout"), [(64, 24), (33, 17), (1, 9), (130, 3), (48, 8)])
def test_experts_of_few_rows_with_a_transposed_weight(target, dtype, din, dout):
    if backends.unsupported(target.backend, "grouped_gemm", target.device, dtype) is not None:
        pytest.skip(f"{target.id} does not take {dtype}")
    offsets = torch.tensor([0, 1, 1, 5, 10, 12], dtype=torch.int32, device=target.device)
    weight = torch.randn(5, dout, din).to(target.device, dtype).transpose(1, 2)
    rows = torch.randn(13, din).to(target.device, dtype)
    out = mk.grouped_gemm(rows, weight, offsets, backend=target.backend)
    exact = mk.grouped_gemm(rows.double().cpu(), weight.double().cpu(), offsets.cpu(), backend="reference")
    same = mk.grouped_gemm(rows.cpu(), weight.cpu(), offsets.cpu(), backend="reference").double()
    allowed = 2 * (same - exact).abs().max() + 4 * torch.finfo(dtype).eps * din
    assert (out.double().cpu() - exact).abs().max() <= allowed
