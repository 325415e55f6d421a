"""Sinkhorn with prescribed sums of zero."""

from __future__ import annotations

import pytest
import torch

import moe_kernels as mk


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
