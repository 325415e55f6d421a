"""Combine: every token sums its kept rows, weighted by its gate.

    y_t       = sum over k with r = slot_row_tk >= 0 of w_tk rows_r        summed in float32, in the order of k
    drows_r   = w_tk dy_t,   0 for a row not in use                        rows (R, D), w (T, K) -> y (T, D)
    dw_tk     = <rows_r, dy_t>,   0 for a choice that was dropped

Saved for backward: rows, w and the plan; both gradients come from one pass over rows. That pass is linear in each of
dy, rows and w, so its own gradient is `combine` and the pass again: differentiable any number of times.
"""

from __future__ import annotations

from torch import Tensor

import python_ref.combine as reference
from moe_kernels import backends, library
from moe_kernels.ops._checks import FLOATING, check_first, check_plan, check_rank, check_tensor
from moe_kernels.plan import RoutingPlan


def combine(rows: Tensor, plan: RoutingPlan, weights: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """The weighted sum of every token's kept rows: (R, D) -> (T, D).

    Args:
        rows: (R, D), float32, bfloat16 or float16 (float64 on "reference" and "cpu"). Rows may have any stride; a
            tensor whose last dimension is not contiguous is copied once.
        plan: the one by which the rows were dispatched, on their device. Its values are checked on the CPU; on a GPU
            only with MOE_KERNELS_CHECK=1, since a check waits for the device.
        weights: (T, K), any of those dtypes, read as float32 (as float64 with float64 rows): the gate weights of
            `topk_gate` or of a `plan_...`. None: the plain sum.
        backend: "reference", "cpu", "triton" or "cuda"; None chooses (see moe_kernels.explain).

    Returns:
        y (T, D) in the dtype of rows, summed in float32 (float64 stays) in the order of k and without atomics, so that
        the bits are the same every time. A token without a kept choice is zero. Dropped choices add nothing, whatever
        their weight; rows not in use add nothing, whatever they hold.

    Gradient: to rows and to weights, in their dtypes; zero for rows not in use and for dropped choices. Any number of
    times differentiable. FLOPs (torch's counter): 2 R D forward and 3 R D backward; without weights R D and none.

    Raises:
        TypeError: rows or weights is no tensor of those dtypes, an array of the plan is not int32, or a torch.func
            transform.
        ValueError: rows that are not (R, D), weights that are not (T, K), either on another device than the plan;
            arrays of the plan that are not what RoutingPlan promises; on the CPU slots outside [-1, R), and in the
            backward of a kernel more than R rows in use.
        BackendError: the named backend cannot run this.

    Source: GShard's combine einsum with the one-hot left out; paper 003 (V-MoE), eq. 2.

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
        library.ops.refuse_bad_rows("combine", slot_row, plan.num_rows, None, None)
        return reference.combine(rows, plan, weights)
    if weights is not None:
        weights = weights.to(library.compute_dtype(rows.dtype))
    arrays = plan.row_token, slot_row, plan.expert_offsets, plan.row_choice
    return library.ops.combine_fwd(rows, weights, *arrays, chosen)
