"""Combine as one operator, and its gradients to rows and weights as another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import backends
from moe_kernels.ops._define import define, operators
from moe_kernels.sizes import contiguous_rows, refuse_bad_rows


def combine(x: Tensor, weights: Tensor | None, slot_row: Tensor, backend: str) -> Tensor:
    """Implements combine_fwd, which reads no other array of the plan than slot_row. x: the rows (R, D)."""
    weights = None if weights is None else weights.contiguous()
    if backend != "cpu":  # the C++ kernel checks while it reads
        refuse_bad_rows("combine", slot_row, x.shape[0])
    return backends.load(backend, "combine").combine_fwd(contiguous_rows(x), weights, slot_row.contiguous())


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.backend = inputs
    if tensors[1] is None:
        tensors[0] = None
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weights, *plan = ctx.saved_tensors
    if weights is None:
        return operators.dispatch_fwd(grad, *plan[:3], ctx.backend), *[None] * 6
    return *operators.combine_bwd(grad, x, weights, *plan, ctx.backend), *[None] * 5


def _bwd(grad: Tensor, x: Tensor, weights: Tensor, *plan_and_backend: Any) -> tuple[Tensor, Tensor]:
    *plan, backend = plan_and_backend
    row_token, slot_row, expert_offsets, row_choice = (each.contiguous() for each in plan)
    if backend != "cpu":
        refuse_bad_rows("combine", slot_row, x.shape[0], expert_offsets=expert_offsets)
    given = *map(contiguous_rows, (grad, x)), weights.contiguous(), row_token, slot_row, expert_offsets, row_choice
    return backends.load(backend, "combine").combine_bwd(*given)


def _save_all(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _second(ctx: Any, to_drows: Tensor | None, to_dweights: Tensor | None) -> tuple[Tensor | None, ...]:
    """Backward of combine_bwd: drows is linear in grad and in weights, dweights is linear in grad and in x."""
    grad, x, weights, *plan = ctx.saved_tensors
    to_drows = torch.zeros_like(x) if to_drows is None else to_drows
    to_dweights = torch.zeros_like(weights) if to_dweights is None else to_dweights
    to_grad = operators.combine_fwd(to_drows, weights, *plan, ctx.backend)
    to_grad = to_grad + operators.combine_fwd(x, to_dweights, *plan, ctx.backend)
    return to_grad, *operators.combine_bwd(grad, to_drows, to_dweights, *plan, ctx.backend), *[None] * 5


define(
    "combine_fwd(Tensor rows, Tensor? weights, Tensor row_token, Tensor slot_row, Tensor expert_offsets, "
    "Tensor? row_choice, str backend) -> Tensor",
    lambda x, weights, row_token, slot_row, expert_offsets, row_choice, backend: combine(x, weights, slot_row, backend),
    lambda x, weights, row_token, slot_row, *rest: x.new_empty((slot_row.shape[0], x.shape[1])),
    lambda x, weights, *rest, out_shape=None, **kwargs: (1 if weights is None else 2) * x[0] * x[1],
    save=_save,
    backward=_backward,
)
define(
    "combine_bwd(Tensor grad, Tensor rows, Tensor weights, Tensor row_token, Tensor slot_row, Tensor expert_offsets, "
    "Tensor row_choice, str backend) -> (Tensor, Tensor)",
    _bwd,
    lambda grad, x, weights, *rest: (x.new_empty(x.shape), weights.new_empty(weights.shape)),
    lambda grad, x, *rest, out_shape=None, **kwargs: 3 * x[0] * x[1],
    save=_save_all,
    backward=_second,
)
