"""Sinkhorn's kernels under the sanitizers, and their PTX in every order of warps. Their values on all backends are
tested in test_sinkhorn.py."""

from __future__ import annotations

import math

import pytest
import simt
import torch
from ptx import cuda_launch

import moe_kernels as mk

MISSING = simt.unavailable() or cuda_launch.unavailable()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"simt: {MISSING}")

# A thread, a quad, half a warp, a warp, several warps, and read from memory: each with a matrix that it does not fill.
SIZES = (3, 7, 13, 31, 61, 65)


def check(n: int, iterations: int, dtype: torch.dtype = torch.float32, gap: int = 0) -> None:
    """Scaled, logarithmic, forbidding and broken matrices in one batch, forward and backward."""
    scores = torch.randn(5, n, n + gap) * torch.tensor([1.0, 300.0, 1.0, 1.0, 1e6])[:, None, None]
    scores[2, 0, : n // 2] = -math.inf
    scores[3, n - 1, n - 1] = math.nan
    scores, grad = scores[..., :n].to(dtype), torch.randn(5, n, n + gap)[..., :n].to(dtype)
    leaf, double = scores.detach().requires_grad_(), scores.double().requires_grad_()
    p = mk.sinkhorn(leaf, iterations, backend="cuda")
    q = mk.sinkhorn(double, iterations, backend="reference")
    (got,) = torch.autograd.grad(p, leaf, grad)
    (expected,) = torch.autograd.grad(q, double, grad.double())
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(p.double(), q, rtol=unit, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(got.double(), expected, rtol=2 * unit + 1e-5, atol=1e-6, equal_nan=True)


def check_sums(n: int, iterations: int, tolerance: float | None) -> None:
    """Sums of their own: matrices that stop at once, later and never, that forbid and that are broken."""
    scores = torch.randn(5, n, n) * torch.tensor([0.01, 0.3, 300.0, 1.0, 1.0])[:, None, None]
    rows, columns = torch.ones(5, n), torch.ones(n)
    scores[0] -= math.log(n)
    rows[2], columns[0] = torch.rand(n) + 0.5, 1.02
    scores[3, 0, : n // 2] = -math.inf
    scores[4, n - 1, n - 1] = math.nan
    grad = torch.randn(5, n, n)
    results = []
    for backend, dtype in (("cuda", torch.float32), ("reference", torch.float64)):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (scores, rows, columns)]
        sums = {"rows": leaves[1], "columns": leaves[2], "tolerance": tolerance}
        p = mk.sinkhorn(leaves[0], iterations, **sums, backend=backend)
        results.append((p.detach(), *torch.autograd.grad(p, leaves, grad.to(dtype))))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_warps(seed: int) -> None:
    with cuda_launch.use(seed):
        for n in SIZES:
            check(n, 2)
        check_sums(SIZES[seed % len(SIZES)], 3, 0.1)


@pytest.mark.parametrize("n", SIZES)
def test_sums_and_tolerance(n: int) -> None:
    with cuda_launch.use(n):
        check_sums(n, 3, 0.1)
        check_sums(n, 2, None)


@pytest.mark.parametrize("build", ["asan", "tsan"])
def test_sanitizers(build: str) -> None:
    with simt.use(build, seed=2):
        for n, dtype in zip(SIZES, (torch.float32, torch.float16, torch.bfloat16) * 2, strict=True):
            check(n, 2, dtype, gap=n % 3)
            check_sums(n, 2, 0.1)
        if build == "tsan":
            return  # threads share the same whatever is read
        check(4, 2)  # in vectors
        check(64, 1)
        check(65, 1, torch.float16)  # in memory of its own
