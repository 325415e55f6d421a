"""Dispatch: the rows of every expert, gathered from the tokens. x (T, D) -> rows (R, D)

    rows_r = x[row_token_r]         0 where row_token_r = -1
    dx_t   = sum over k with slot_row_tk >= 0 of drows[slot_row_tk]

The gradient is `combine` without weights, and the gradient of `combine` without weights is dispatch. Only arrays of the
plan are saved for backward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import python_ref.dispatch as reference
from moe_kernels import backends
from moe_kernels.ops import _checks
from moe_kernels.ops._checks import FLOATING, check_first, check_plan, check_rank, check_tensor
from moe_kernels.ops._define import define, define_check, no_flops, operators
from moe_kernels.plan import RoutingPlan
from moe_kernels.sizes import contiguous_rows, refuse_bad_rows


def _check_rows(name: str, op: str, slot_row, num_rows, row_token, expert_offsets) -> None:
    _checks.check_arrays(op, slot_row, slot_row, num_rows, row_token, expert_offsets)


define_check(
    "refuse_bad_rows(str op, Tensor slot_row, SymInt num_rows, Tensor? row_token, Tensor? expert_offsets)",
    refuse_bad_rows,
    _check_rows,
)


def _check_fwd(op: str, x: Tensor, row_token: Tensor, slot_row: Tensor, expert_offsets: Tensor, backend: str) -> None:
    tokens, _ = _checks.floating(op, "x", x, 2)
    (num_rows,) = _checks.shape_of(op, "row_token", row_token, 1)
    _checks.check_arrays(op, x, slot_row, num_rows, row_token, expert_offsets)
    if slot_row.shape[0] != tokens:
        raise ValueError(f"{op}: x must have {slot_row.shape[0]} rows, the tokens of slot_row; got {tuple(x.shape)}")


def dispatch_fwd(x: Tensor, row_token: Tensor, slot_row: Tensor, expert_offsets: Tensor, backend: str) -> Tensor:
    arrays = [each.contiguous() for each in (row_token, slot_row, expert_offsets)]
    if backend != "cpu":  # the C++ kernel checks while it reads
        refuse_bad_rows("dispatch", slot_row, row_token.shape[0], row_token, expert_offsets)
    return backends.load(backend, "dispatch").dispatch_fwd(contiguous_rows(x), *arrays)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *arrays, ctx.backend = inputs
    ctx.save_for_backward(*arrays)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return operators.combine_fwd(grad, None, *ctx.saved_tensors, None, ctx.backend), *[None] * 4


define(
    "dispatch_fwd(Tensor x, Tensor row_token, Tensor slot_row, Tensor expert_offsets, str backend) -> Tensor",
    dispatch_fwd,
    lambda x, row_token, *rest: x.new_empty((row_token.shape[0], x.shape[1])),
    no_flops,
    check=_check_fwd,
    save=_save,
    backward=_backward,
)


def dispatch(x: Tensor, plan: RoutingPlan, *, backend: str | None = None) -> Tensor:
    """The rows of every expert, copied from the tokens: (T, D) -> (R, D).

    Args:
        x: (T, D), float32, bfloat16 or float16 (float64 on "reference" and "cpu"). Rows may have any stride; a tensor
            whose last dimension is not contiguous is copied.
        plan: a plan of T tokens, on the device of x. Its values are checked on the CPU; on a GPU only with
            MOE_KERNELS_CHECK=1, since a check waits for the device.
        backend: "reference", "cpu", "triton" or "cuda"; None: automatic choice (see moe_kernels.explain).

    Returns:
        rows (R, D), expert by expert, bit for bit the tokens; zeros from row expert_offsets[E] on.

    Gradient: to x, the sum over a token's kept rows. Kernels sum in float32 (float64 stays), in the order of the
    token's choices, without atomics, so the same input gives the same bits. Differentiable any number of times. FLOPs
    of kernels (torch's counter): 0 forward, R D backward.

    Raises:
        TypeError: a tensor has another dtype or layout, or torch.func or forward-mode AD is used.
        ValueError: x is not (T, D) or on another device than the plan; arrays of the plan that are not as RoutingPlan
            describes; or, where values are checked (see plan), row_token outside [-1, T), slot_row outside [-1, R)
            or expert_offsets[E] outside [0, R].
        BackendError: the named backend cannot run this.

    Source: GShard's dispatch einsum, without its one-hot tensor; V-MoE, section 2.

    Example:
        >>> plan = mk.make_plan(torch.tensor([[1, 0], [0, -1]]), num_experts=2)
        >>> rows = mk.dispatch(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), plan)
        >>> rows  # expert 0: token 1, then token 0's second choice; expert 1: token 0; one row is not in use
        tensor([[3., 4.],
                [1., 2.],
                [1., 2.],
                [0., 0.]])
    """
    check_plan("dispatch", plan)
    check_tensor("dispatch", "x", x, FLOATING)
    check_rank("dispatch", "x", x, "(T, D)")
    check_first("dispatch", "x", x, plan.num_tokens, "tokens of the plan", plan.row_token.device)
    arrays = plan.row_token, plan.slot_row, plan.expert_offsets
    chosen = backends.choose("dispatch", backend, x)
    if chosen == "reference":
        operators.refuse_bad_rows("dispatch", plan.slot_row, plan.num_rows, plan.row_token, plan.expert_offsets)
        return reference.dispatch(x, plan)
    return operators.dispatch_fwd(x, *arrays, chosen)
