"""Sinkhorn's iteration, by definition: normalises rows, then columns, in logarithms and float64.

COMET trees, eqs. 7 and 8. At small tau exp(scores / tau) overflows, hence logarithms.
If scores / tau is near 1e7, neighbouring float32 numbers differ by 1, hence float64.
"""

from functools import partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Largest error of a row sum for which gradient="implicit" is allowed.
RESIDUAL = 1e-5


def sinkhorn(
    scores: Tensor,
    iterations: int,
    *,
    tau: float = 1.0,
    gradient: str = "unrolled",
    anneal_from: float | None = None,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
    noise: Tensor | None = None,
    tolerance: float | None = None,
) -> Tensor:
    """scores (..., n, n) -> (..., n, n): exp(scores / tau) with rows, then columns normalised, `iterations` times.

    Columns are normalised last, so they sum to one; rows sum to one after convergence. -inf forbids a pair; a row or
    column that holds only -inf becomes zeros. A matrix with NaN or +inf becomes NaN everywhere (if iterations > 0).
    anneal_from: iteration t has the temperature temperatures(...)[t]. If the temperature changes from a to b, all
    logarithms of the matrix are multiplied by a / b.
    rows, columns (..., n): prescribed sums of rows and columns instead of 1. noise (..., n, n): added to scores.
    tolerance: a matrix takes no further iteration once each row and column sum is off by at most `tolerance`.
    gradient "unrolled": the gradient of the iterations, which backward repeats from about sqrt(iterations) checkpoints.
    "implicit": the gradient of the fixed point (implicit_gradient); ValueError if a row sum is off by over RESIDUAL.
    """
    noisy = scores if noise is None else scores + noise
    one = torch.ones(1, dtype=torch.float64, device=scores.device)
    sums = [one if x is None else x.double() for x in (rows, columns)]
    if gradient == "implicit":
        return _Implicit.apply(noisy.double(), iterations, tau, anneal_from, sums, tolerance).to(scores.dtype)
    return _unrolled(noisy, iterations, tau, anneal_from, sums, tolerance)


def _unrolled(
    scores: Tensor, iterations: int, tau: float, anneal_from: float | None, sums: list[Tensor], tolerance: float | None
) -> Tensor:
    taus = temperatures(iterations, tau, anneal_from)
    log_p = scores.double() / (taus[0] if taus else tau)
    if iterations > 0:
        broken = (log_p.isnan() | (log_p == torch.inf)).flatten(-2).any(-1)[..., None, None]
        log_p = log_p + torch.where(broken, torch.nan, 0.0)
    stride = isqrt(iterations) + 1
    ratios = [before / after for before, after in zip(taus[:1] + taus, taus, strict=False)]
    step = partial(_iterate, sums=sums, tolerance=tolerance)
    for start in range(0, iterations, stride):
        log_p = checkpoint(step, log_p, ratios[start : start + stride], use_reentrant=False, preserve_rng_state=False)
    return log_p.exp().to(scores.dtype)


def temperatures(iterations: int, tau: float, anneal_from: float | None = None) -> list[float]:
    """The temperature of every iteration: tau, or a geometric sequence from anneal_from to tau (one iteration: tau)."""
    if anneal_from is None:
        return [tau] * iterations
    steps = max(iterations - 1, 1)
    return [tau * (anneal_from / tau) ** ((iterations - 1 - t) / steps) for t in range(iterations)]


def _iterate(log_p: Tensor, ratios: list[float], sums: list[Tensor], tolerance: float | None) -> Tensor:
    rows, columns = sums
    for ratio in ratios:
        before = log_p
        log_p = log_p * ratio if ratio != 1 else log_p
        log_p = log_p - _log_sum(log_p, -1) + rows.log()[..., None]
        log_p = log_p - _log_sum(log_p, -2) + columns.log()[..., None, :]
        if tolerance is not None:
            log_p = torch.where(_within(before.detach(), sums, tolerance)[..., None, None], before, log_p)
    return log_p


def _within(log_p: Tensor, sums: list[Tensor], tolerance: float) -> Tensor:
    """bool (...): whether all row and column sums of exp(log_p) are within tolerance of `sums`.

    Rows and columns that hold only -inf are ignored.
    """
    inside = torch.ones(log_p.shape[:-2], dtype=torch.bool, device=log_p.device)
    for dim, expected in zip((-1, -2), sums, strict=True):
        empty = (log_p == -torch.inf).all(dim)
        inside = inside & (((log_p.exp().sum(dim) - expected).abs() <= tolerance) | empty).all(-1)
    return inside


def _log_sum(log_p: Tensor, dim: int) -> Tensor:
    """logsumexp, but 0 if all terms are -inf."""
    empty = (log_p == -torch.inf).all(dim, keepdim=True)
    return log_p.masked_fill(empty, 0).logsumexp(dim, keepdim=True).masked_fill(empty, 0)


def check_converged(p: Tensor, rows: Tensor | float = 1.0) -> None:
    """Raises ValueError unless every row sum of p (..., n, n) is within RESIDUAL of `rows`."""
    error = (p.double().sum(-1) - rows).abs()
    if not bool((error <= RESIDUAL).all()):
        worst = float(error.nan_to_num(nan=torch.inf).max())
        raise ValueError(
            f"sinkhorn: gradient='implicit' holds at the fixed point; expected row sums within {RESIDUAL:g} of 1 (or "
            f"of rows), got one off by {worst:.3g}; use more iterations, a higher tau, or gradient='unrolled'"
        )


def implicit_gradient(p: Tensor, grad: Tensor, tau: float) -> Tensor:
    """dL/dscores from grad = dL/dp, at the fixed point p = diag(u) exp(scores / tau) diag(v).

        w_ij = p_ij grad_ij,   r_i a_i + sum_j p_ij b_j = sum_j w_ij,   sum_i p_ij a_i + c_j b_j = sum_i w_ij

        dscores_ij = (w_ij - p_ij (a_i + b_j)) / tau

    r and c are the row and column sums of p. Eliminating a leaves n equations for b. A constant may be added to b and
    subtracted from a; 1 / n added to every element of the equations' matrix selects one solution. If p falls into
    blocks, as a permutation does, each block has such a constant; c_j (1 + 1e-13) instead of c_j on the diagonal makes
    the matrix regular. The constants cancel in a_i + b_j where p_ij is above 0.
    """
    p = p.double()
    w = p * grad.double()
    rows, columns = p.sum(-1), p.sum(-2)
    share = p / rows[..., None]
    system = torch.diag_embed(columns * (1 + 1e-13)) - p.mT @ share + 1 / p.shape[-1]
    right = w.sum(-2) - (share.mT @ w.sum(-1)[..., None])[..., 0]
    b = torch.linalg.solve(system, right)
    a = (w.sum(-1) - (p @ b[..., None])[..., 0]) / rows
    return (w - p * (a[..., None] + b[..., None, :])) / tau


class _Implicit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, iterations: int, tau: float, anneal_from, sums, tolerance) -> Tensor:
        p = _unrolled(scores, iterations, tau, anneal_from, sums, tolerance)
        check_converged(p, sums[0])
        ctx.save_for_backward(p)
        ctx.tau = tau
        return p

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (p,) = ctx.saved_tensors
        return implicit_gradient(p, grad, ctx.tau), None, None, None, None, None
