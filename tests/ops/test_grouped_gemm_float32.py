"""float32 products on Triton: by three TF32 products, about as exact as IEEE float32."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import moe_kernels as mk
from moe_kernels.backends.triton import _grouped_configs
from tests.helpers.targets import TARGETS, running
from tests.ptx import session


@pytest.fixture
def target():
    with running(next(each for each in TARGETS if each.backend == "triton")) as found:
        yield found


def results(backend, x, weight, offsets, grad):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = mk.grouped_gemm(x, weight, offsets, backend=backend)
    return out.detach(), *torch.autograd.grad(out, (x, weight), grad)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20, "mixed"])
def test_errors_are_at_most_twice_those_of_ieee_float32(target, scale):
    """Root mean squares of errors over the sums of absolute products, against float64. The other factor is scaled so
    that products are about 1 (those of "mixed" 1e-6 to 1e6)."""
    sizes = (96, 48), (2, 48, 40), (96, 40)
    x, weight, grad = (torch.randn(size) for size in sizes)
    if scale == "mixed":
        x, weight = (each * 10 ** (6 * torch.rand(each.shape) - 3) for each in (x, weight))
    else:
        x, weight = x * scale, weight / scale
    offsets = torch.tensor([0, 40, 96], dtype=torch.int32)
    given = [each.to(target.device) for each in (x, weight, offsets, grad)]
    got, ieee = (results(name, *given) for name in (target.backend, "reference"))
    truth = results("reference", x.double(), weight.double(), offsets, grad.double())
    size = results("reference", x.double().abs(), weight.double().abs(), offsets, grad.double().abs())
    for name, a, b, exact, most in zip(("out", "dx", "dweight"), got, ieee, truth, size, strict=True):
        errors = [((each.cpu().double() - exact) / most).square().mean().sqrt() for each in (a, b)]
        assert errors[0] <= 2 * errors[1], f"{name}: {errors[0]:.3g}, IEEE {errors[1]:.3g}"


def test_infinities_and_nans_are_those_of_ieee_float32(target):
    x, weight = 1.0000001 * torch.ones(8, 32), 1.2345678 * torch.ones(1, 32, 16)
    x[:4, 0] = torch.tensor([math.inf, -math.inf, math.nan, 3.4028e38])
    weight[0, 3, 1:3] = torch.tensor([math.inf, math.nan])
    weight[0, 5, 3] = 3.4e38
    x[4, 3], x[5, 3] = 0.0, -1.0
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    given = [each.to(target.device) for each in (x, weight, offsets)]
    got, expected = (mk.grouped_gemm(*given, backend=each) for each in (target.backend, "reference"))
    torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize(("terms", "allowed", "products"), [(48, False, 3), (48, True, 1), (8, False, 0)])
def test_products_by_what_torch_allows(target, request, terms, allowed, products):
    """Three TF32 products of full precision, one where torch allows TF32, none for sums of few terms."""
    if not target.executed or target.interpreted:
        pytest.skip("instructions are counted where PTX is executed")
    if allowed:
        request.getfixturevalue("tf32")
    x, weight = torch.randn(64, terms), torch.randn(1, terms, 64)
    with session.recorded() as launches:
        mk.grouped_gemm(x, weight, torch.tensor([0, 64], dtype=torch.int32), backend="triton")
    (each,) = launches
    flops = [
        int(runs) for text, runs in zip(each.kernel.texts, each.counters["runs"], strict=False) if "mma.sync" in text
    ]
    depth = -(-terms // _grouped_configs.GENERAL["fwd"].k) * _grouped_configs.GENERAL["fwd"].k
    assert sum(flops) * 16 * 8 * 8 == products * 64 * 64 * depth
