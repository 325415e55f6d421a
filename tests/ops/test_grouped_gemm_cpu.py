"""grouped_gemm on the CPU: the choice between products by C++ and by torch, and the results of both."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import moe_kernels as mk
from moe_kernels.backends import cpu
from moe_kernels.backends.native import grouped_gemm_cpu
from moe_kernels.ops._define import operators
from moe_kernels.verify import threads
from tests.helpers.grouped_gemm import DTYPES, check, fenced
from tests.helpers.inputs import at_the_end, padded
from tests.helpers.targets import Target


@pytest.mark.parametrize("tiles", [False, True])
def test_torch_multiplies_few_rows_of_large_experts_and_tiles(tiles, monkeypatch):
    """C++ multiplies large experts if there is an expert, or there are 24 rows, for each thread. tiles: as if the
    processor had AMX, with which torch multiplies large experts in bfloat16."""
    monkeypatch.setattr(grouped_gemm_cpu, "_in_tiles", lambda dtype: tiles and dtype is torch.bfloat16)
    for dtype, size, rows, count, expected in (
        (torch.float32, (1, 2048, 2048), 48, 2, True),
        (torch.float32, (1, 2048, 2048), 47, 2, False),
        (torch.float32, (1, 2048, 2048), 40, 1, True),
        (torch.float32, (2, 2048, 2048), 40, 2, True),  # an expert for each thread
        (torch.bfloat16, (2, 2048, 2048), 40, 2, not tiles),
        (torch.bfloat16, (2, 256, 256), 64, 2, True),  # small: 2**21 multiply-adds an expert
        (torch.bfloat16, (2, 256, 256), 66, 2, not tiles),
        (torch.float32, (0, 256, 256), 9, 2, True),
    ):
        with threads(count):
            assert grouped_gemm_cpu.in_cpp(dtype, size, rows) == expected


@pytest.mark.parametrize("counts", [[900], [37, 0, 863], [193, 707], [180] * 5], ids=str)
def test_products_do_not_depend_on_threads(counts, monkeypatch):
    """The last seven rows are unused."""
    monkeypatch.setattr(grouped_gemm_cpu, "in_cpp", lambda *args: True)
    offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    x, weight, bias, grad = (
        torch.randn(size) for size in ((907, 200), (len(counts), 200, 100), (len(counts), 100), 907)
    )
    found = []
    for count in (1, 2, 3):
        given = [each.clone().requires_grad_() for each in (x, weight, bias)]
        with threads(count), fenced():
            y = mk.grouped_gemm(given[0], given[1], offsets, bias=given[2], activation="gelu", backend="cpu")
            norms = cpu.grouped_gemm_norms(x, weight, offsets, bias)
            y.backward(grad[:, None] * y.detach())
        found.append([y.detach(), norms, *(each.grad for each in given)])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    out = mk.grouped_gemm(x, weight, offsets, bias=bias, backend="reference")
    torch.testing.assert_close(found[0][1], out.square().sum(1))  # `norms` are squared norms


@pytest.mark.parametrize("isa", cpu.module.isas)
def test_tanh_is_at_most_one(isa, monkeypatch):
    """If C++ did not limit results to 1, rounding would make tanh larger than 1 for some x from 8.14 to 8.28."""
    monkeypatch.setattr(cpu, "isa", cpu.module.isas.index(isa))
    first, last = torch.tensor([8.14, 8.28]).view(torch.int32).tolist()
    x = torch.arange(first, last, dtype=torch.int32).view(torch.float32)[:, None]
    y = mk.grouped_gemm(x, torch.ones(1, 1, 1), torch.tensor([0, len(x)]), activation="tanh", backend="cpu")
    assert 1 - 1e-6 < float(y.min()) <= float(y.max()) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dout", [512, 160, 33])
@pytest.mark.parametrize("count", [*range(1, 21), 25, 96, 97, 98, 103, 140])
def test_a_row_does_not_depend_on_how_many_there_are(count, dout, dtype, monkeypatch):
    """A row of the product, or of the weight's gradient, has the same bits for any number of rows."""
    monkeypatch.setattr(grouped_gemm_cpu, "in_cpp", lambda *args: True)
    long = torch.tensor([0, 140], dtype=torch.int32)
    x, weight, grad = (torch.randn(size, dtype=dtype) for size in ((140, 140), (1, 140, dout), (140, dout)))
    bound = {"rtol": 2**-7, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-4}
    out, _ = operators.grouped_gemm_fwd(x, weight, long, None, None, "", False, "cpu")
    dweight, _ = cpu.grouped_gemm_bwd_weight(x, grad, long, None, None, False)
    assert out.allclose(x @ weight[0], **bound)
    assert dweight[0].allclose(x.T @ grad, **bound)
    of_some = torch.tensor([0, count], dtype=torch.int32)
    part, _ = operators.grouped_gemm_fwd(x[:count], weight, of_some, None, None, "", False, "cpu")
    columns, _ = cpu.grouped_gemm_bwd_weight(x[:, -count:], grad, long, None, None, False)
    assert torch.equal(part, out[:count])
    assert torch.equal(columns[0], dweight[0, -count:])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_token_sums_do_not_depend_on_threads(dtype):
    rows, token = torch.randn(900, 37, dtype=dtype), torch.randint(-1, 300, (900,), dtype=torch.int32)
    found = []
    for count in (1, 3):
        with threads(count), fenced():
            found.append(cpu.grouped_gemm_sum_rows(rows, token, 300))
    assert torch.equal(*found)


@pytest.mark.parametrize("rows", [8, 800])  # 8: by C++; 800: by torch.addmm if the processor has AMX
def test_what_follows_a_product_follows_its_float32(rows):
    x, w_in, w_out = torch.zeros(rows, 512), torch.ones(2, 512, 256), torch.ones(2, 256, 16)
    x[:, :257] = 1  # the product is 257, not representable in bfloat16; 1 with the bias
    bias = torch.full((2, 256), -256.0)
    x, w_in, w_out, bias = (each.bfloat16() for each in (x, w_in, w_out, bias))
    offsets = torch.tensor([0, rows // 2, rows], dtype=torch.int32)
    for activation in (None, "relu"):
        given = x.clone().requires_grad_()
        out = mk.grouped_gemm(given, w_in, offsets, bias=bias, activation=activation)
        out.sum().backward()
        assert (out == 1).all()
        assert (given.grad == 256).all()
        assert (mk.expert_norms(x, w_in, w_out, b_in=bias, activation=activation) == 1024).all()


def test_the_gradient_to_the_bias_does_not_lose_with_every_row():
    x, weight, bias = torch.zeros(20000, 4), torch.zeros(1, 4, 8), torch.zeros(1, 8, requires_grad=True)
    out = mk.grouped_gemm(x, weight, torch.tensor([0, 20000], dtype=torch.int32), bias=bias, backend="cpu")
    out.backward(torch.full_like(out, 0.1))
    # A running sum would have a relative error of 1.7e-4.
    torch.testing.assert_close(bias.grad, torch.full((1, 8), 2000.0), rtol=5e-6, atol=0)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shift", [0, 1], ids=["at 4 bytes", "at 2 bytes"])
@pytest.mark.parametrize(("din", "stride"), [(64, 64), (64, 67), (33, 34), (1, 2), (259, 300)])
def test_pairs_of_bfloat16_end_with_their_row_and_expert(din, stride, shift, transposed, monkeypatch):
    """bfloat16 terms are multiplied in pairs. If their number is odd, the element after the last must not be added."""
    monkeypatch.setattr(grouped_gemm_cpu, "in_cpp", lambda *args: True)
    counts, dout = [7, 0, 1, 2, 22], 70
    offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    room = torch.full((32 * stride + shift,), torch.nan, dtype=torch.bfloat16)
    x = room[shift:].as_strided((32, din), (stride, 1)).copy_(torch.randn(32, din))
    weight, grad = torch.randn(5, din, dout).bfloat16(), torch.randn(32, dout).bfloat16()
    if transposed:  # gaps between columns as well
        weight = padded(weight.mT.contiguous()).mT
    x[7], grad[7], weight[0, 0, 5] = torch.inf, torch.nan, torch.inf  # row 7 is the only one of its expert
    # This call leaves NaN in the scratch memory into which the next call may copy rows.
    nans, each = torch.full((32, din + 1), torch.nan).bfloat16(), torch.arange(32, dtype=torch.int32)
    operators.grouped_gemm_fwd(nans, weight.new_ones(5, din + 1, dout), offsets, each, None, "", False, "cpu")
    out, _ = operators.grouped_gemm_fwd(x, weight, offsets, None, None, "", False, "cpu")
    dweight, _ = cpu.grouped_gemm_bwd_weight(x, grad, offsets, None, None, False)
    for e, (first, last) in enumerate(pairwise(offsets.tolist())):
        rows, computed = x[first:last].double(), (out[first:last], dweight[e])
        for found, exact in zip(computed, (rows @ weight[e].double(), rows.T @ grad[first:last].double()), strict=True):
            assert found.double().allclose(exact, rtol=2**-8, atol=1e-3, equal_nan=True)


def test_subnormal_bfloat16_is_rounded_as_anything_else():
    """AVX-512's instruction that converts float32 to bfloat16 reads subnormal numbers as zero."""
    grad = torch.cat(
        [torch.tensor([1e-39, -1e-40, 9.2e-41, 0.0, torch.inf, torch.nan, 1.0]), torch.randn(57)]
    ).bfloat16()
    signs = (grad, grad.abs(), -grad.abs())  # the classes of positive and of negative subnormals
    for each in (
        *signs,
        *(one.roll(16) for one in signs),
    ):  # the first numbers are in the first or in the second vector of 16
        found = cpu.activation_bwd(each[None], torch.ones(1, 64, dtype=torch.bfloat16), "relu")
        assert torch.equal(found[0].view(torch.int16), each.view(torch.int16))


@pytest.mark.parametrize("isa", cpu.module.isas)
def test_nothing_behind_the_operands_is_read(isa, monkeypatch):
    """A read of the page behind an operand ends the process."""
    monkeypatch.setattr(cpu, "isa", cpu.module.isas.index(isa))
    monkeypatch.setattr(grouped_gemm_cpu, "in_cpp", lambda *args: True)
    offsets = torch.tensor([0, 3, 3, 153, 203], dtype=torch.int32)
    for din, dout in ((40, 32), (37, 45), (16, 64), (40, 544)):
        sizes = (203, din), (4, din, dout), (4, dout), (203, dout)
        x, weight, bias, grad = (at_the_end(torch.randn(size)) for size in sizes)
        for each in (weight, at_the_end(weight.mT.contiguous()).mT):
            leaves = [given.requires_grad_() for given in (x.detach(), each.detach(), bias.detach())]
            out = mk.grouped_gemm(leaves[0], leaves[1], offsets, bias=leaves[2], activation="relu", backend="cpu")
            gradients = torch.autograd.grad(out, leaves, grad)
            assert all(found.isfinite().all() for found in (out, *gradients))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["zipf", "adversarial", "single"])
@pytest.mark.parametrize("tiles", [False, True])
def test_large_experts_on_the_cpu(kind, dtype, tiles, monkeypatch):
    """torch multiplies. tiles: as if the processor had AMX."""
    monkeypatch.setattr(grouped_gemm_cpu, "in_cpp", lambda *args: False)
    monkeypatch.setattr(grouped_gemm_cpu, "_in_tiles", lambda dtype: tiles and dtype is torch.bfloat16)
    target = Target("cpu", "cpu", "cpu")
    for din, dout in ((16, 48), (33, 70)):
        for activation, gathered in ((None, False), ("swiglu", True)):
            for with_bias in (False, True):
                check(target, dtype, kind, (150, din, dout, 5), activation, gathered, with_bias)
    x, weight, offsets = torch.randn(6, 16), torch.randn(2, 16, 32), torch.tensor([0, 2, 5])
    rows = x.to(dtype)[:1].expand(6, 16)
    got = mk.grouped_gemm(rows, weight.to(dtype), offsets, backend="cpu")
    torch.testing.assert_close(got, mk.grouped_gemm(rows, weight.to(dtype), offsets, backend="reference"))
    leaves, token = (x.to(dtype), weight.to(dtype)), torch.tensor([1, -1, 2, 3, -1, 5])
    leaves[0][0] = torch.inf  # no row reads token 0
    found = []
    for backend in ("cpu", "reference"):
        given = [each.clone().requires_grad_() for each in leaves]
        out = mk.grouped_gemm(*given, offsets, row_token=token, backend=backend)
        found.append((out, *torch.autograd.grad(out, given, torch.ones_like(out))))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)
