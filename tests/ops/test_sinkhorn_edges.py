"""Sinkhorn with prescribed sums of zero, and at temperatures from 1e-30 to 1e30."""

from __future__ import annotations

import pytest
import torch

import moe_kernels as mk
from tests.helpers.sinkhorn import oracle


@pytest.mark.parametrize("n", [3, 8, 20, 70])
@pytest.mark.parametrize("zero", ["rows", "columns", "both"])
@pytest.mark.parametrize("tau", [1.0, 1e-3])
def test_sums_of_zero_give_zeros_and_finite_gradients(n, zero, tau):
    """At tau = 1e-3 the scores of a column that becomes zero exceed others by more than exp(709) can tell."""
    for _ in range(10):
        scores, grad = torch.randn(2, n, n), torch.randn(2, n, n)
        rows, columns = torch.rand(n) + 0.5, torch.rand(n) + 0.5
        rows[1] = 0 if zero != "columns" else rows[1]
        columns[0] = 0 if zero != "rows" else columns[0]
        rows, columns = rows / rows.sum(), columns / columns.sum()
        found = []
        for backend in ("reference", "cpu"):
            leaves = [each.clone().requires_grad_() for each in (scores, rows, columns)]
            p = mk.sinkhorn(leaves[0], 5, tau=tau, rows=leaves[1], columns=leaves[2], backend=backend)
            found.append([p, *torch.autograd.grad(p, leaves, grad)])
        (p, dscores, drows, dcolumns), (got, dgot, drows_got, dcolumns_got) = found
        torch.testing.assert_close(got, p)
        torch.testing.assert_close(dgot, dscores, rtol=1e-4, atol=1e-5)
        assert (got[:, rows == 0] == 0).all()
        assert (got[:, :, columns == 0] == 0).all()
        for sums, one, other in (rows, drows_got, drows), (columns, dcolumns_got, dcolumns):
            torch.testing.assert_close(one[sums > 0], other[sums > 0], rtol=1e-3, atol=1e-4)
            assert (one[sums == 0] == 0).all()


@pytest.mark.parametrize("tau", [2.0**-100, 2.0**-60, 2.0**-20, 2.0**40, 2.0**70, 2.0**100])
def test_scores_and_tau_of_another_scale(target, tau):
    """P depends on scores / tau alone, also where a kernel must take logarithms because tau is too small or large."""
    for n in (3, 12, 40) if not target.executed else (3, 12):
        scores, grad = torch.randn(2, n, n, device=target.device), torch.randn(2, n, n, device=target.device)
        scores[0, 0] = 0
        results = []
        for each in (1.0, tau):
            leaf = (scores * each).requires_grad_()
            p = mk.sinkhorn(leaf, 5, tau=each, backend=target.backend)
            results.append((p, torch.autograd.grad(p, leaf, grad)[0].double() * each))
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("tau", [2.0**-66, 2.0**-99])
def test_scores_of_zero_among_tiny_ones(target, tau):
    """Zeros have the accuracy of other scores where both are small: a kernel may not replace them by a small number."""
    draw = torch.Generator().manual_seed(0)
    scores, grad = (torch.randn(2, 16, 16, generator=draw) for _ in range(2))
    scores = scores.clamp(max=0) * tau
    leaf, exact = scores.to(target.device).requires_grad_(), scores.double().requires_grad_()
    p, expected = mk.sinkhorn(leaf, 5, tau=tau, backend=target.backend), oracle(exact, 5, tau)
    got = torch.autograd.grad(p, leaf, grad.to(target.device))[0].cpu().double() * tau
    wanted = torch.autograd.grad(expected, exact, grad.double())[0] * tau
    size = (expected.detach() * grad).abs().sum((1, 2), keepdim=True)
    assert ((got - wanted).abs() <= 2.0**-23 * wanted.abs() + 2.0**-44 * size).all()
