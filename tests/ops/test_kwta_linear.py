"""Tests of kwta_linear, the linear layer that computes winners alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import moe_kernels as mk
from moe_kernels.backends import cpu
from moe_kernels.cases.kwta_linear import masks
from moe_kernels.ops.kwta import pack_bits, unpack_bits
from moe_kernels.verify import threads
from tests.helpers.kwta import DTYPES, INF, NAN
from tests.helpers.targets import on_every_target

target = on_every_target("kwta_linear")


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(target, *tensors, **named):
    """kwta_linear on the target's device, back on the CPU."""
    moved = [None if each is None else each.to(target.device) for each in tensors]
    return mk.kwta_linear(*moved, **named, backend=target.backend).cpu()


def expected(x, weight, bits, bias=None):
    """Sums in float64, output by output."""
    y = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64)
    for t, n in unpack_bits(bits, weight.shape[0]).nonzero().tolist():
        y[t, n] = (x[t].double() * weight[n].double()).sum() + (0 if bias is None else bias[n].double())
    return y


SHAPES = [(3, 70, 45, 7), (1, 530, 140, 3), (2, 16, 64, 64), (2, 8, 32, 0), (4, 33, 129, 20)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_winners(target, dtype, shape):
    tokens, dim, width, k = shape
    x, weight, bias = random(tokens, dim, dtype=dtype), random(width, dim, dtype=dtype), random(width, dtype=dtype)
    bits = masks(tokens, width, k, torch.Generator().manual_seed(1))
    for given in (None, bias):
        # Any k has the same result; it is the least grid of the Triton kernel that is tested with 0.
        for hint in (k, 0):
            y = run(target, x, weight, bits, given, k=hint)
            correct = expected(x, weight, bits, given)
            assert y.dtype == dtype
            assert torch.equal(y != 0, unpack_bits(bits, width) & (correct != 0))
            # One rounding to dtype, and sums in float32 of terms whose magnitudes add up to less than 4 dim.
            error = torch.finfo(dtype).eps / 2 * correct.abs() + 4 * dim * 2**-23
            assert ((y.double() - correct).abs() <= error).all()


def test_more_tokens_than_a_block_takes():
    x, weight = random(1100, 24, dtype=torch.float64), random(300, 24, dtype=torch.float64)
    bits = masks(1100, 300, 30)
    for count in (1, 2):
        with threads(count):
            y = mk.kwta_linear(x, weight, bits, backend="cpu")
        torch.testing.assert_close(y, mk.kwta_apply(x @ weight.t(), bits), rtol=0, atol=1e-13)


def test_what_others_hold_reaches_no_output(target):
    """NaN and infinity of other tokens, of rows of the weight and of biases that a token does not keep."""
    x, weight, bias = random(3, 40), random(50, 40), random(50)
    mask = torch.zeros(3, 50, dtype=torch.bool)
    mask[0, 3:9], mask[1, 20:31], mask[2, 49] = True, True, True
    clean = run(target, x, weight, pack_bits(mask), bias)
    x[1], weight[0], weight[40], bias[1] = NAN, INF, NAN, NAN
    y = run(target, x, weight, pack_bits(mask), bias)
    assert torch.equal(y[[0, 2]], clean[[0, 2]])
    assert torch.equal(y[1].isnan(), mask[1])
    assert torch.equal(y.signbit() & ~mask, torch.zeros_like(mask))


def test_bits_past_the_last_output_are_ignored(target):
    x, weight = random(2, 9), random(5, 9)
    full = torch.full((2, 1), -1, dtype=torch.int32)
    y = run(target, x, weight, full)
    torch.testing.assert_close(y, x @ weight.t())


@pytest.mark.parametrize("shape", [(0, 4, 7), (3, 0, 7), (3, 4, 0), (0, 0, 0)], ids=str)
def test_empty(target, shape):
    tokens, dim, width = shape
    bits = pack_bits(torch.ones(tokens, width, dtype=torch.bool))
    bias = torch.arange(float(width))
    y = run(target, random(tokens, dim), random(width, dim), bits, bias)
    assert torch.equal(y, bias.expand(tokens, width) if dim == 0 else torch.zeros(tokens, width))


def test_layouts(target):
    x, weight, bias = random(4, 36), random(33, 36), random(33)
    bits = masks(4, 33, 9)
    y = run(target, x, weight, bits, bias)
    wide = [F.pad(each, (1, 2), value=NAN)[..., 1:-2] for each in (x, weight, bias)]
    turned = [x.t().contiguous().t(), weight.t().contiguous().t(), bias.repeat_interleave(2)[::2]]
    # The order of sums may depend on strides in torch, and in Triton on whether rows are aligned.
    error = 0 if target.backend == "cpu" else 1e-5
    close = partial(torch.testing.assert_close, rtol=0, atol=error)
    for a, b, c in (wide, turned):
        close(run(target, a, b, F.pad(bits, (0, 1))[:, :-1], c), y)
    batched = run(target, x.view(2, 1, 2, 36), weight, bits.view(2, 1, 2, 2), bias)
    close(batched, y.view(2, 1, 2, 33))
    close(run(target, x[1], weight, bits[1], bias), y[1])


def test_gradients(target):
    dtype = torch.float64 if target.backend in ("cpu", "reference") else torch.float32
    x, weight, bias = (random(*shape, dtype=dtype).requires_grad_() for shape in ((3, 10), (40, 10), (40,)))
    bits = masks(3, 40, 6)

    def call(*given):
        return run(target, given[0], given[1], bits, *given[2:])

    grad = random(3, 40, dtype=dtype, seed=1)
    grad[~unpack_bits(bits, 40)] = NAN  # of outputs that are not kept
    for given in ((x, weight), (x, weight, bias)):
        found = torch.autograd.grad(call(*given), given, grad)
        wanted = torch.autograd.grad(mk.kwta_apply(F.linear(*given), bits, backend="reference"), given, grad)
        torch.testing.assert_close(found, wanted)
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(call, (x, weight, bias))
        assert torch.autograd.gradgradcheck(call, (x, weight, bias))
    (found,) = torch.autograd.grad(run(target, x.detach(), weight, bits).sum(), weight)
    torch.testing.assert_close(found, unpack_bits(bits, 40).to(dtype).t() @ x.detach())


def test_a_token_alone_has_the_bits_of_the_batch(target):
    if target.backend == "reference":
        with mk.batch_invariant(), pytest.raises(mk.BackendError, match="kwta_linear: backend 'reference' adds in"):
            mk.kwta_linear(random(2, 3), random(4, 3), masks(2, 4, 1), backend="reference")
        return
    tokens = 5 if target.executed else 530
    for dtype in DTYPES:
        x, weight = random(tokens, 550, dtype=dtype), random(150, 550, dtype=dtype)
        bits = masks(tokens, 150, 21)
        whole = run(target, x, weight, bits)
        for part in (slice(0, 1), slice(3, 5), slice(tokens - 3, tokens)):
            with mk.batch_invariant():
                assert torch.equal(run(target, x[part], weight, bits[part]), whole[part])
        if target.backend == "triton":  # rows of 16 bytes, whose stride one row alone does not show
            apart, narrow = random(tokens, 553, dtype=dtype)[:, :552], random(9, 552, dtype=dtype)
            few = masks(tokens, 9, 4)
            with mk.batch_invariant():
                found = [run(target, apart[part], narrow, few[part]) for part in (slice(None), slice(1))]
            assert torch.equal(found[0][:1], found[1])
        # The other winners of a token do not matter either.
        fewer = bits & pack_bits(torch.arange(150) % 3 == 0)
        kept = run(target, x, weight, fewer)
        assert torch.equal(kept, mk.kwta_apply(whole, fewer, backend="reference"))


def test_gradients_depend_on_the_batch():
    weight = random(4, 3).requires_grad_()
    with mk.batch_invariant(), pytest.raises(RuntimeError, match="kwta_linear: its gradients are dense products"):
        mk.kwta_linear(random(2, 3), weight, masks(2, 4, 1), backend="cpu")


@pytest.mark.parametrize("isa", cpu.module.isas)
def test_threads_do_not_change_bits(isa, monkeypatch):
    monkeypatch.setattr(cpu, "isa", cpu.module.isas.index(isa))
    x, weight, bias = random(600, 300), random(900, 300), random(900)
    for winners in (40, 500):  # winners first, and products of all
        bits, found = masks(600, 900, winners), []
        for count in (1, 2, 7, 2, 7, 2, 7):
            with threads(count):
                found.append(mk.kwta_linear(x, weight, bits, bias=bias, backend="cpu"))
        assert all(torch.equal(found[0], each) for each in found)


def test_vmap_and_flops():
    x, weight, bits = random(4, 3, 10), random(40, 10), masks(12, 40, 5).view(4, 3, 2)
    y = mk.kwta_linear(x, weight, bits, backend="cpu")
    assert torch.equal(torch.vmap(lambda x, bits: mk.kwta_linear(x, weight, bits, backend="cpu"))(x, bits), y)
    with FlopCounterMode(display=False) as counter:
        mk.kwta_linear(x, weight, bits, k=5, backend="cpu")
    assert counter.get_total_flops() == 2 * 12 * 5 * 10
    with pytest.raises(TypeError, match=r"kwta_linear: torch\.func transforms of this kind"):
        torch.func.grad(lambda w: mk.kwta_linear(x, w, bits, backend="cpu").sum())(weight)


def test_autocast_changes_nothing():
    x, weight, bits = random(3, 64).requires_grad_(), random(80, 64).requires_grad_(), masks(3, 80, 9)
    for backend in ("cpu", "reference"):
        found = []
        for on in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                y = mk.kwta_linear(x, weight, bits, backend=backend)
            with torch.autocast("cpu", torch.bfloat16, enabled=on and backend == "cpu"):
                found.append((y, *torch.autograd.grad(y.square().sum(), (x, weight))))
        torch.testing.assert_close(*found, rtol=0, atol=0)


def test_errors():
    x, weight, bits, bias = random(2, 3), random(40, 3), masks(2, 40, 5), random(40)
    for match, error, given in [
        ("x must be a Tensor", TypeError, (None, weight, bits)),
        ("weight must be a Tensor", TypeError, (x, None, bits)),
        ("x must have dtype", TypeError, (x.int(), weight, bits)),
        ("weight must have dtype float32", TypeError, (x, weight.half(), bits)),
        ("bits must have dtype int32", TypeError, (x, weight, bits.long())),
        (r"x must be \(..., D\) and weight \(N, D\)", ValueError, (x, weight[0], bits)),
        (r"weight must be \(N, D\) = \(40, 3\)", ValueError, (x, random(40, 4), bits)),
        (r"bits must be \(2, 2\)", ValueError, (x, weight, bits[:, :1])),
        (r"bias must be \(N\) = \(40,\)", ValueError, (x, weight, bits, bias[1:])),
    ]:
        with pytest.raises(error, match=f"kwta_linear: {match}"):
            mk.kwta_linear(*given)
    with pytest.raises(ValueError, match="kwta_linear: k must be from 0 to 40"):
        mk.kwta_linear(x, weight, bits, k=41)
    with pytest.raises(mk.BackendError, match="kwta_linear: backend 'cuda' cannot run here"):
        mk.kwta_linear(x, weight, bits, backend="cuda")
