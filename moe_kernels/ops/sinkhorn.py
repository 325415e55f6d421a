"""Sinkhorn's iteration: from a matrix of scores to a (nearly) doubly stochastic one, at any temperature.

    L = scores / tau,  `iterations` times:  L_ij -= log sum_j exp(L_ij),  L_ij -= log sum_i exp(L_ij);   P = exp(L)
                                                                                       (paper 001, eqs. 7 and 8)
In potentials, f^t_i = tau log sum_j exp((S_ij - g^(t-1)_j) / tau), g^t_j = tau log sum_i exp((S_ij - f^t_i) / tau):

    P = exp((S_ij - f_i - g_j) / tau),  w = P * dP,  df = -w 1,  dg = -w' 1,  dS = w, and for t from last to first
    B = exp((S - f^t - g^t) / tau):      dS += B diag(dg),  df -= B dg
    A = exp((S - f^t - g^(t-1)) / tau):  dS += diag(df) A,  dg = -A' df,  df = 0;   at last dS /= tau

scores (S) and P are (batch, n, n), 1 is a vector of ones, w' is w transposed. Saved for backward: the scores, or, if
the gradient is implicit, P. A kernel recomputes the potentials, O(n) numbers an iteration, and never keeps an iterate.
It divides by tau at the end: where P is exactly 1, as at small tau, terms w and -w then cancel exactly. Terms w / tau
would be rounded in one sum, but not in another that is fused into a multiply-add.

scores / tau needs more bits than float32 has: at tau = 1e-7 it is 1e7 and more. A kernel scales exp(S / tau) by vectors
where the range of the matrix allows it. Elsewhere it takes differences before exp, in more than float32. GPU kernels
for n <= 64 that scale by vectors stop early from n = 9 on (backends/triton/_sinkhorn_scaled.py, csrc/cuda/sinkhorn.cu).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

import python_ref.sinkhorn as reference
from moe_kernels import backends, library
from moe_kernels.ops._checks import (
    FLOATING,
    check_choice,
    check_int,
    check_like,
    check_positive,
    check_square,
    check_tensor,
)

GRADIENTS = ("unrolled", "implicit")


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
    backend: str | None = None,
) -> Tensor:
    """exp(scores / tau) with its rows, then its columns, normalised, `iterations` times.

    Columns are normalised last, so they sum to one. Rows do only after convergence, which is rare at small tau: at
    tau = 1e-7 and n = 8, rows still sum to up to 4 after 150 iterations. See anneal_from, and harden.

    Args:
        scores: (..., n, n), float32, bfloat16 or float16 (float64 on "reference" and "cpu"); any n, any strides.
            -inf forbids a pair; a row or column of nothing else comes out as zeros. A matrix that holds NaN or +inf
            comes out as NaN, and no other matrix does.
        iterations: R >= 0; each is rows, then columns. 0 gives exp(scores / tau).
        tau: temperature, finite and above 0. Down to 1e-7 the result is within 1e-6 of float64's on the same scores.
        gradient: "unrolled", of exactly what was computed; or "implicit", of the fixed point, with O(n^2) memory and no
            dependence on iterations, an error unless every row sum is within 1e-5 of what it should be. The check
            waits for a GPU.
        anneal_from: a temperature >= tau from which the iterations cool geometrically to tau, potentials (in units of
            scores) kept. From 1 to 1e-7 in 50 iterations reaches a permutation where a fixed 1e-7 never does.
        rows, columns: (..., n), broadcast over matrices, any floating dtype: sums of the rows and columns instead
            of one. They must be above 0 and of equal totals, which is not checked; otherwise rows never converge.
        noise: like scores, and added to them: Gumbel noise draws permutations (Gumbel-Sinkhorn).
        tolerance: a matrix whose row and column sums are all within it takes no further iteration. Not with
            anneal_from.
        backend: "reference", "cpu", "triton" or "cuda" (both up to n = 1024); None chooses (see moe_kernels.explain).
            With rows, columns or a tolerance kernels use potentials only, on the CPU in a tenth of the reference's
            time.

    Returns:
        (..., n, n) in the dtype of scores, accurate to the rounding of that dtype.

    Gradient: to scores and noise (and, unrolled, rows and columns), once differentiable on kernels. It carries the
    factor 1 / tau: at tau = 1e-7 entries are 0 or 1 and it is mostly exactly zero. Autocast: runs in the dtype it is
    given. FLOPs (torch's counter): 4 n^2 an iteration and matrix forward, 12 n^2 backward: those of the multiply-adds
    of the vector-scaled form.

    Raises:
        TypeError: scores is no tensor of those dtypes, noise has another dtype, iterations no int, tau no number, or a
            torch.func transform.
        ValueError: scores not (..., n, n), iterations < 0, tau or tolerance not in (0, inf), anneal_from < tau, rows or
            columns that do not broadcast to (..., n), noise of another shape or device, tolerance with anneal_from, an
            unknown gradient, or gradient="implicit" for scores whose iterates have not converged, or with rows or
            columns that require a gradient.
        BackendError: the named backend cannot run this.

    Source: paper 001, eqs. 7 and 8; noise: Mena, Belanger, Linderman, Snoek 2018.

    Example:
        >>> mk.sinkhorn(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), iterations=50)
        tensor([[0.7311, 0.2689],
                [0.2689, 0.7311]])
    """
    check_tensor("sinkhorn", "scores", scores, FLOATING, batched=True)
    check_square("sinkhorn", "scores", scores)
    iterations = check_int("sinkhorn", "iterations", iterations, 0, 2**31 - 1, "iterations")
    tau = check_positive("sinkhorn", "tau", tau)
    anneal_from = _check_annealing(anneal_from, tau, tolerance)
    check_choice("sinkhorn", "gradient", gradient, GRADIENTS)
    for name, sums in (("rows", rows), ("columns", columns)):
        _check_sums(name, sums, scores, gradient)
    if noise is not None:
        check_tensor("sinkhorn", "noise", noise, FLOATING, batched=True)
        check_like("sinkhorn", "noise", noise, "scores", scores)
        scores = scores + noise
    options: dict[str, Any] = {"rows": rows, "columns": columns, "tolerance": tolerance}
    chosen = backends.choose("sinkhorn", backend, scores)
    if chosen == "reference" or iterations == 0:
        return reference.sinkhorn(scores, iterations, tau=tau, gradient=gradient, anneal_from=anneal_from, **options)
    flat = scores if scores.dim() == 3 else scores.reshape(prod(scores.shape[:-2]), *scores.shape[-2:])
    given: tuple[Tensor | None, Tensor | None] = None, None
    if any(value is not None for value in options.values()):
        given = _vectors(rows, scores), _vectors(columns, scores)
    taus = _temperatures(tau if anneal_from is None else anneal_from, tau)
    limit = -1.0 if tolerance is None else float(tolerance)
    p = library.ops.sinkhorn_fwd(flat, taus, iterations, *given, limit, gradient == "implicit", chosen)
    return p if scores.dim() == 3 else p.view(scores.shape)  # a view would add a node to the graph


def _temperatures(first: float, last: float) -> Tensor:
    """(2,), on the CPU. torch.compile makes a new graph for every value of a float, but not of a tensor."""
    if not is_compiling():
        return torch.tensor([first, last], dtype=torch.float64, device="cpu")
    one = torch.ones((), dtype=torch.float64, device="cpu")
    return torch.stack([one * first, one * last])


def _vectors(sums: Tensor | None, scores: Tensor) -> Tensor:
    """The sums of rows or columns for kernels: (B, n) float64, ones if `sums` is None."""
    each = scores.new_ones((1,), dtype=torch.float64) if sums is None else sums.double()
    return each.expand(scores.shape[:-1]).reshape(prod(scores.shape[:-2]), scores.shape[-1])


def _check_annealing(anneal_from: object, tau: float, tolerance: object) -> float | None:
    if tolerance is not None:
        check_positive("sinkhorn", "tolerance", tolerance)
    if anneal_from is None:
        return None
    if tolerance is not None:
        raise ValueError("sinkhorn: tolerance would stop a matrix at a temperature on the way; got anneal_from as well")
    hot = check_positive("sinkhorn", "anneal_from", anneal_from)
    if hot < tau:
        raise ValueError(f"sinkhorn: anneal_from must be at least tau = {tau:g}, a temperature; got {hot}")
    return hot


def _check_sums(name: str, sums: Tensor | None, scores: Tensor, gradient: str) -> None:
    """`sums` broadcasts to one number for each row of scores, and needs no gradient that does not exist."""
    if sums is None:
        return
    check_tensor("sinkhorn", name, sums, FLOATING, batched=True)
    shape = scores.shape[:-1]
    broadcasts = sums.dim() <= len(shape) and all(
        got in (1, expected) for got, expected in zip(sums.shape[::-1], shape[::-1], strict=False)
    )
    if not broadcasts or sums.device != scores.device:
        raise ValueError(
            f"sinkhorn: {name} must broadcast to {tuple(shape)} on {scores.device}; got {tuple(sums.shape)} on "
            f"{sums.device}"
        )
    if gradient == "implicit" and sums.requires_grad:
        raise ValueError(f"sinkhorn: gradient='implicit' has none for {name}; got one that requires it")
