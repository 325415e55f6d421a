"""Sinkhorn's iteration: from a matrix of scores S to a nearly doubly stochastic matrix P.

    L = S / tau,  `iterations` times:  L_ij -= log sum_j exp(L_ij),  L_ij -= log sum_i exp(L_ij);   P = exp(L)
                                                                                       (COMET trees, eqs. 7 and 8)
With potentials f of rows and g of columns, g^0 = 0, iteration t is

    f^t_i = tau log sum_j exp((S_ij - g^(t-1)_j) / tau),   g^t_j = tau log sum_i exp((S_ij - f^t_i) / tau)

and P = exp((S - f - g) / tau) with the last f and g. Backward: w = P * dP, df = -w 1, dg = -w' 1, dS = w (1 is a vector
of ones, w' is w transposed). Then for t from last to first

    B = exp((S - f^t - g^t) / tau):      dS += B diag(dg),  df -= B dg
    A = exp((S - f^t - g^(t-1)) / tau):  dS += diag(df) A,  dg = -A' df,  df = 0

and at the end dS /= tau. Dividing only at the end lets terms w and -w cancel exactly where P is 1. Saved for backward:
the scores, or P if the gradient is implicit. In backward kernels compute the potentials again and store O(n) numbers
for each matrix and iteration.

If the range of S / tau in each row is small, kernels may scale exp((S - row maximum) / tau) by vectors, but not with
prescribed sums, a tolerance or a falling temperature. Otherwise they keep f and g in float64, since near S / tau = 1e7
float32 numbers are 1 apart. Kernels that scale compute gradients in float64, and on a GPU the iterations that change
little in float32: with errors of at most some 2^-44 of sum |P * dP| in tau dS (triton/_sinkhorn_scaled.py).
"""

from __future__ import annotations

from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

import python_ref.sinkhorn as reference
from moe_kernels import backends
from moe_kernels.ops import _checks
from moe_kernels.ops._checks import (
    FLOATING,
    check_choice,
    check_int,
    check_like,
    check_positive,
    check_square,
    check_tensor,
)
from moe_kernels.ops._define import define, no_second_derivative, operators
from moe_kernels.sizes import contiguous, contiguous_rows

GRADIENTS = ("unrolled", "implicit")
MOST_ITERATIONS = 2**20  # kernels keep vectors of every iteration for backward


def _taus(first: float, last: float) -> Tensor:
    """`first` and `last` as a CPU tensor (2,): torch.compile would make a new graph for every new value of a float."""
    if not is_compiling():
        return torch.tensor([first, last], dtype=torch.float64, device="cpu")
    one = torch.ones((), dtype=torch.float64, device="cpu")
    return torch.stack([one * first, one * last])


def _vectors(sums: Tensor | None, scores: Tensor) -> Tensor:
    """Prescribed sums of the rows or columns of all B matrices as (B, n) float64; ones if `sums` is None."""
    each = scores.new_ones((1,), dtype=torch.float64) if sums is None else sums.double()
    return each.expand(scores.shape[:-1]).reshape(prod(scores.shape[:-2]), scores.shape[-1])


def _check_annealing(anneal_from: object, tau: float, tolerance: object) -> float | None:
    if tolerance is not None:
        check_positive("sinkhorn", "tolerance", tolerance)
    if anneal_from is None:
        return None
    if tolerance is not None:
        raise ValueError("sinkhorn: tolerance would stop a matrix before it reaches tau; got anneal_from as well")
    hot = check_positive("sinkhorn", "anneal_from", anneal_from)
    if hot < tau:
        raise ValueError(f"sinkhorn: anneal_from must be at least tau = {tau:g}, a temperature; got {hot}")
    return hot


def _check_sums(name: str, sums: Tensor | None, scores: Tensor, gradient: str) -> None:
    """Raises unless `sums` is None or broadcasts to scores.shape[:-1] and, if implicit, requires no gradient."""
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
        raise ValueError(f"sinkhorn: gradient='implicit' computes no gradient for {name}; got {name} that requires one")


def _check_fwd(op, scores, taus, iterations, row_sums, column_sums, tolerance, *rest) -> None:
    batch, n, _ = _checks.floating(op, "scores", scores, 3)
    _checks.expect(op, "scores", scores, (batch, n, n), scores.dtype, scores)
    _check_taus(op, taus)
    _checks.integer(op, "iterations", iterations, 1, MOST_ITERATIONS)
    for name, each in (("row_sums", row_sums), ("column_sums", column_sums)):
        _checks.expect(op, name, each, (batch, n), torch.float64, scores)
    if (row_sums is None) != (column_sums is None):
        raise ValueError(f"{op}: row_sums and column_sums must both be given, or neither")
    if not (isfinite(tolerance) and (tolerance < 0 or row_sums is not None)):
        raise ValueError(f"{op}: tolerance must be negative (none), or finite beside row_sums; got {tolerance}")


def _check_taus(op: str, taus: Tensor) -> None:
    if taus.shape != (2,) or taus.dtype != torch.float64 or not taus.is_cpu:
        raise ValueError(f"{op}: taus must be (2,) float64 on the CPU; got {tuple(taus.shape)} {taus.dtype}")
    for tau in taus.tolist():
        _checks.positive(op, "taus", tau)


def _check_bwd(op, grad, scores, *rest) -> None:
    _check_fwd(op, scores, *rest)
    _checks.expect(op, "grad", grad, scores.shape, scores.dtype, scores)


def _check_implicit(op: str, grad: Tensor, p: Tensor, taus: Tensor) -> None:
    batch, n, _ = _checks.floating(op, "p", p, 3)
    for name, each in (("p", p), ("grad", grad)):
        _checks.expect(op, name, each, (batch, n, n), p.dtype, p)
    _check_taus(op, taus)


def sinkhorn_fwd(scores, taus, iterations, row_sums, column_sums, tolerance, implicit, backend) -> Tensor:
    if scores.numel() == 0:
        return scores.new_empty(scores.shape)
    kernels, temperatures = backends.load(backend, "sinkhorn"), _temperatures(taus, iterations)
    p = kernels.sinkhorn_fwd(contiguous_rows(scores), temperatures, *contiguous(row_sums, column_sums), tolerance)
    if implicit:
        reference.check_converged(p, *(() if row_sums is None else (row_sums,)))
    return p


def _temperatures(taus: Tensor, iterations: int) -> list[float]:
    """The temperature of every iteration, from the first and last temperature: taus (2,), on the CPU."""
    first, last = taus.tolist()
    return reference.temperatures(iterations, last, first)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    scores, taus, ctx.iterations, row_sums, column_sums, ctx.tolerance, ctx.implicit, ctx.backend = inputs
    ctx.save_for_backward(output if ctx.implicit else scores, taus, row_sums, column_sums)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved, taus, row_sums, column_sums = ctx.saved_tensors
    if ctx.implicit:
        return operators.sinkhorn_implicit_bwd(grad, saved, taus), *[None] * 7
    given = grad, saved, taus, ctx.iterations, row_sums, column_sums, ctx.tolerance, ctx.backend
    dscores, drows, dcolumns = operators.sinkhorn_bwd(*given)
    without_sums = row_sums is None
    return dscores, None, None, None if without_sums else drows, None if without_sums else dcolumns, *[None] * 3


def sinkhorn_bwd(grad, scores, taus, iterations, row_sums, column_sums, tolerance, backend) -> tuple[Tensor, ...]:
    if scores.numel() == 0:
        return tuple(map(torch.zeros_like, _bwd_fake(grad, scores, taus, iterations, row_sums, column_sums)))
    kernels, temperatures = backends.load(backend, "sinkhorn"), _temperatures(taus, iterations)
    given = contiguous_rows(grad), contiguous_rows(scores), temperatures, *contiguous(row_sums, column_sums), tolerance
    return tuple(grad.new_empty(0) if each is None else each for each in kernels.sinkhorn_bwd(*given))


def _bwd_fake(grad, scores, taus, iterations, row_sums, column_sums, *rest) -> tuple[Tensor, ...]:
    sums = (scores.new_empty(0) if each is None else each.new_empty(each.shape) for each in (row_sums, column_sums))
    return scores.new_empty(scores.shape), *sums


def _implicit_bwd(grad: Tensor, p: Tensor, taus: Tensor) -> Tensor:
    return reference.implicit_gradient(p, grad, taus.tolist()[-1]).to(p.dtype)


def _numel(shape) -> int:
    return shape[0] * shape[1] * shape[2]


_SETTINGS = "Tensor scores, Tensor taus, SymInt iterations, Tensor? row_sums, Tensor? column_sums, float tolerance"

define(
    f"sinkhorn_fwd({_SETTINGS}, bool implicit, str backend) -> Tensor",
    sinkhorn_fwd,
    lambda scores, *rest: scores.new_empty(scores.shape),
    lambda scores, taus, iterations, *rest, out_shape=None, **kwargs: 4 * iterations * _numel(scores),
    check=_check_fwd,
    save=_save,
    backward=_backward,
    batched=(0, 3, 4),
)
define(
    f"sinkhorn_bwd(Tensor grad, {_SETTINGS}, str backend) -> (Tensor, Tensor, Tensor)",
    sinkhorn_bwd,
    _bwd_fake,
    lambda grad, scores, taus, iterations, *rest, out_shape=None, **kwargs: 12 * iterations * _numel(scores),
    check=_check_bwd,
    backward=no_second_derivative("sinkhorn"),
    batched=(0, 1, 4, 5),
)
define(
    "sinkhorn_implicit_bwd(Tensor grad, Tensor p, Tensor taus) -> Tensor",
    _implicit_bwd,
    lambda grad, p, taus: p.new_empty(p.shape),
    lambda grad, p, *rest, out_shape=None, **kwargs: 2 * p[0] * p[1] ** 3,  # without the linear solve
    check=_check_implicit,
    backward=no_second_derivative("sinkhorn"),
    batched=(0, 1),
)


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

    Columns are normalised last, so they sum to one. Rows sum to one only after convergence, which is slow at small tau:
    for standard normal scores, n = 8 and tau = 1e-7, rows with sums of 2 to 4 are left after 150 iterations (see
    anneal_from).

    Args:
        scores: (..., n, n), float32, bfloat16 or float16 (float64 on "reference" and "cpu"); any n, any strides.
            -inf forbids a pair; a row or column of -inf alone becomes zeros. A matrix that holds NaN or +inf becomes
            NaN everywhere (if iterations > 0), without effect on other matrices.
        iterations: from 0 to 2^20. Each normalises the rows, then the columns.
        tau: temperature, finite and above 0. Results for float32 scores at tau down to 1e-7 are within 1e-6 of those
            computed in float64.
        gradient: "unrolled": the gradient of the computed iterations. "implicit": the gradient of the fixed point, at a
            cost that does not depend on `iterations`; every row sum must be within 1e-5 of 1 (or of `rows`). On a GPU
            this check waits for the device.
        anneal_from: a temperature of at least tau. The temperature falls geometrically from anneal_from in the first
            iteration to tau in the last. When it changes, f and g in P = exp((scores - f - g) / tau) are kept. For
            standard normal scores and n = 8, 60 iterations from 1 to 1e-7 mostly reach a permutation, 150 iterations at
            a fixed 1e-7 mostly do not.
        rows, columns: (..., n), broadcast over matrices, float32, bfloat16, float16 or float64: prescribed sums of rows
            and columns instead of 1. They must be at least 0 and have equal totals (not checked); otherwise rows may
            have other sums than prescribed. A sum of 0 makes a row or column of zeros; its own gradient is then 0 on
            "cpu" and NaN on "reference", and on "triton" and "cuda" gradients to scores may be NaN too.
        noise: like scores, added to them; Gumbel noise gives Gumbel-Sinkhorn.
        tolerance: a matrix takes no further iteration once each of its row and column sums is within `tolerance` of 1
            (or of rows and columns), those of -inf alone left out. It cannot be combined with anneal_from.
        backend: "reference", "cpu", "triton" or "cuda" (the last two up to n = 1024); None: automatic choice (see
            moe_kernels.explain).

    Returns:
        (..., n, n) in the dtype of scores.

    Gradient: to scores and noise, with the factor 1 / tau; if unrolled, also to rows and columns. Kernels are once
    differentiable. torch.vmap is supported. Autocast: runs in the dtype of its inputs. FLOPs of kernels for each
    matrix (torch's counter): 4 n^2 per iteration forward, 12 n^2 per iteration backward. An implicit backward has
    2 n^3 in all, without the linear solve.

    Raises:
        TypeError: a tensor or number has another type, dtype or layout, or forward-mode AD or a torch.func transform
            other than vmap is used.
        ValueError: scores not (..., n, n), iterations < 0, tau or tolerance not in (0, inf), anneal_from < tau, rows or
            columns that do not broadcast to (..., n), noise of another shape or device, tolerance with anneal_from, an
            unknown gradient, or gradient="implicit" with a row sum that has not converged, or with rows or columns that
            require a gradient.
        BackendError: the named backend cannot run this.

    Source: COMET trees, eqs. 7 and 8; noise: Mena, Belanger, Linderman, Snoek 2018.

    Example:
        >>> mk.sinkhorn(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), iterations=50)
        tensor([[0.7311, 0.2689],
                [0.2689, 0.7311]])
    """
    check_tensor("sinkhorn", "scores", scores, FLOATING, batched=True)
    check_square("sinkhorn", "scores", scores)
    iterations = check_int("sinkhorn", "iterations", iterations, 0, MOST_ITERATIONS, "iterations")
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
    taus = _taus(tau if anneal_from is None else anneal_from, tau)
    limit = -1.0 if tolerance is None else float(tolerance)
    p = operators.sinkhorn_fwd(flat, taus, iterations, *given, limit, gradient == "implicit", chosen)
    return p if scores.dim() == 3 else p.view(scores.shape)
