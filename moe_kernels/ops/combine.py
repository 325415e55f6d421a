"""Combine: every token sums its kept rows, weighted by its gate. rows (R, D), weights w (T, K) -> y (T, D)

    y_t     = sum over k with r = slot_row_tk >= 0 of w_tk rows_r
    drows_r = w_tk dy_t             0 for a row that is not in use
    dw_tk   = <rows_r, dy_t>        0 for a dropped choice

Saved for backward: rows, w and arrays of the plan; without weights only the arrays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import python_ref.combine as reference
from moe_kernels import backends
from moe_kernels.ops import _checks
from moe_kernels.ops._checks import FLOATING, check_first, check_plan, check_rank, check_tensor
from moe_kernels.ops._define import define, operators
from moe_kernels.plan import RoutingPlan
from moe_kernels.sizes import compute_dtype, contiguous, contiguous_rows, refuse_bad_rows


def _check_fwd(op, rows, weights, row_token, slot_row, expert_offsets, row_choice, backend) -> None:
    num_rows, _ = _checks.floating(op, "rows", rows, 2)
    _checks.check_arrays(op, rows, slot_row, num_rows, row_token, expert_offsets)
    _checks.expect(op, "weights", weights, slot_row.shape, compute_dtype(rows.dtype), rows)
    _checks.expect(op, "row_choice", row_choice, (num_rows,), torch.int32, rows)


def _check_bwd(op, grad, rows, weights, row_token, slot_row, expert_offsets, row_choice, backend) -> None:
    _check_fwd(op, rows, weights, row_token, slot_row, expert_offsets, row_choice, backend)
    _checks.expect(op, "grad", grad, (slot_row.shape[0], rows.shape[1]), rows.dtype, rows)


def combine_fwd(x: Tensor, weights: Tensor | None, slot_row: Tensor, backend: str) -> Tensor:
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


def combine_bwd(grad, x, weights, row_token, slot_row, expert_offsets, row_choice, backend) -> tuple[Tensor, Tensor]:
    """Implements combine_bwd, which reads neither row_token nor row_choice: `_second` passes them on."""
    slot_row, expert_offsets = contiguous(slot_row, expert_offsets)
    if backend != "cpu":
        refuse_bad_rows("combine", slot_row, x.shape[0], expert_offsets=expert_offsets)
    given = contiguous_rows(grad), contiguous_rows(x), weights.contiguous(), slot_row, expert_offsets
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
    lambda x, weights, row_token, slot_row, expert_offsets, row_choice, backend: combine_fwd(
        x, weights, slot_row, backend
    ),
    lambda x, weights, row_token, slot_row, *rest: x.new_empty((slot_row.shape[0], x.shape[1])),
    lambda x, weights, *rest, out_shape=None, **kwargs: (1 if weights is None else 2) * x[0] * x[1],
    check=_check_fwd,
    save=_save,
    backward=_backward,
)
define(
    "combine_bwd(Tensor grad, Tensor rows, Tensor weights, Tensor row_token, Tensor slot_row, Tensor expert_offsets, "
    "Tensor row_choice, str backend) -> (Tensor, Tensor)",
    combine_bwd,
    lambda grad, x, weights, *rest: (x.new_empty(x.shape), weights.new_empty(weights.shape)),
    lambda grad, x, *rest, out_shape=None, **kwargs: 3 * x[0] * x[1],
    check=_check_bwd,
    save=_save_all,
    backward=_second,
)


def combine(rows: Tensor, plan: RoutingPlan, weights: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """The weighted sum of every token's kept rows: (R, D) -> (T, D).

    Args:
        rows: (R, D), float32, bfloat16 or float16 (float64 on "reference" and "cpu"). Rows may have any stride; a
            tensor whose last dimension is not contiguous is copied.
        plan: the plan by which the rows were dispatched, on their device. Values that combine reads are checked on the
            CPU; on a GPU only with MOE_KERNELS_CHECK=1, since a check waits for the device.
        weights: (T, K) gate weights, float32, bfloat16, float16 or float64, read as float32 (as float64 with float64
            rows). None: all 1.
        backend: "reference", "cpu", "triton" or "cuda"; None: automatic choice (see moe_kernels.explain).

    Returns:
        y (T, D) in the dtype of rows, summed in float32 (float64 stays). Kernels sum in the order of k, without
        atomics, so the same input gives the same bits. A token without a kept choice is zero. Dropped choices add
        nothing, even if their weight is NaN.

    Gradient: to rows and to weights, in their dtypes; zero for rows not in use and for dropped choices. Differentiable
    any number of times. FLOPs of kernels (torch's counter): 2 R D forward, 3 R D backward; without weights R D and 0.

    Raises:
        TypeError: a tensor has another dtype or layout, or torch.func or forward-mode AD is used.
        ValueError: shapes or devices that do not fit, arrays of the plan that are not as RoutingPlan describes, or
            values of the plan out of range, where they are checked (see plan).
        BackendError: the named backend cannot run this.

    Source: GShard's combine einsum, without its one-hot tensor; V-MoE, eq. 2.

    Example:
        >>> plan = mk.make_plan(torch.tensor([[1, 0], [0, -1]]), num_experts=2)
        >>> rows = mk.dispatch(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), plan)
        >>> mk.combine(rows, plan, torch.tensor([[0.75, 0.25], [0.5, 0.0]]))
        tensor([[1.0000, 2.0000],
                [1.5000, 2.0000]])
    """
    check_plan("combine", plan)
    device, slot_row = plan.row_token.device, plan.slot_row
    check_tensor("combine", "rows", rows, FLOATING)
    check_rank("combine", "rows", rows, "(R, D)")
    check_first("combine", "rows", rows, plan.num_rows, "rows of the plan", device)
    if weights is not None:
        check_tensor("combine", "weights", weights, FLOATING)
        check_rank("combine", "weights", weights, "(T, K)")
        check_first("combine", "weights", weights, plan.num_tokens, "tokens of the plan", device)
        if weights.shape != slot_row.shape:
            expected, got = tuple(slot_row.shape), tuple(weights.shape)
            raise ValueError(f"combine: weights must be (T, K) like plan.slot_row, {expected}; got {got}")
    chosen = backends.choose_shapes("combine", backend, rows)
    if chosen == "reference":
        operators.refuse_bad_rows("combine", slot_row, plan.num_rows, None, None)
        return reference.combine(rows, plan, weights)
    if weights is not None:
        weights = weights.to(compute_dtype(rows.dtype))
    arrays = plan.row_token, slot_row, plan.expert_offsets, plan.row_choice
    return operators.combine_fwd(rows, weights, *arrays, chosen)
