"""Sinkhorn's iteration, its unrolled gradient, and its implicit gradient, as three operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import python_ref.sinkhorn as reference
from moe_kernels import backends
from moe_kernels.ops._define import define, no_second_derivative, operators
from moe_kernels.sizes import contiguous, contiguous_rows


def _fwd(scores, taus, iterations, row_sums, column_sums, tolerance, implicit, backend) -> Tensor:
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


def _bwd(grad, scores, taus, iterations, row_sums, column_sums, tolerance, backend) -> tuple[Tensor, ...]:
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
    _fwd,
    lambda scores, *rest: scores.new_empty(scores.shape),
    lambda scores, taus, iterations, *rest, out_shape=None, **kwargs: 4 * iterations * _numel(scores),
    save=_save,
    backward=_backward,
    batched=(0, 3, 4),
)
define(
    f"sinkhorn_bwd(Tensor grad, {_SETTINGS}, str backend) -> (Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
    lambda grad, scores, taus, iterations, *rest, out_shape=None, **kwargs: 12 * iterations * _numel(scores),
    backward=no_second_derivative("sinkhorn"),
    batched=(0, 1, 4, 5),
)
define(
    "sinkhorn_implicit_bwd(Tensor grad, Tensor p, Tensor taus) -> Tensor",
    _implicit_bwd,
    lambda grad, p, taus: p.new_empty(p.shape),
    lambda grad, p, *rest, out_shape=None, **kwargs: 2 * p[0] * p[1] ** 3,  # without the linear solve
    backward=no_second_derivative("sinkhorn"),
    batched=(0, 1),
)
