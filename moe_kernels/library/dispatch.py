"""Dispatch as an operator. Its gradient is combine without weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_kernels import backends
from moe_kernels.library._define import contiguous_rows, define, define_check, is_checked, no_flops, ops, refuse_outside


def refuse_bad_rows(op, slot_row, num_rows, row_token=None, expert_offsets=None) -> None:
    """Raises ValueError if a value of row_token or slot_row, or the last of expert_offsets, is out of range.

    Does nothing unless is_checked(slot_row).
    """
    if not is_checked(slot_row):
        return
    num_tokens = slot_row.shape[0]
    if row_token is not None:
        refuse_outside(f"{op}: plan.row_token", row_token, -1, num_tokens, "no token")
    refuse_outside(f"{op}: plan.slot_row", slot_row, -1, num_rows, "no row")
    used = 0 if expert_offsets is None else int(expert_offsets[-1])
    if not 0 <= used <= num_rows:
        raise ValueError(f"{op}: plan.expert_offsets must end between 0 and R = {num_rows}; got {used}")


define_check(
    "refuse_bad_rows(str op, Tensor slot_row, SymInt num_rows, Tensor? row_token, Tensor? expert_offsets)",
    refuse_bad_rows,
)


def _fwd(x: Tensor, row_token: Tensor, slot_row: Tensor, expert_offsets: Tensor, backend: str) -> Tensor:
    arrays = [each.contiguous() for each in (row_token, slot_row, expert_offsets)]
    if backend != "cpu":  # the C++ kernel checks while it reads
        refuse_bad_rows("dispatch", slot_row, row_token.shape[0], row_token, expert_offsets)
    return backends.load(backend, "dispatch").dispatch_fwd(contiguous_rows(x), *arrays)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *arrays, ctx.backend = inputs
    ctx.save_for_backward(*arrays)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return ops.combine_fwd(grad, None, *ctx.saved_tensors, None, ctx.backend), *[None] * 4


define(
    "dispatch_fwd(Tensor x, Tensor row_token, Tensor slot_row, Tensor expert_offsets, str backend) -> Tensor",
    _fwd,
    lambda x, row_token, *rest: x.new_empty((row_token.shape[0], x.shape[1])),
    no_flops,
    save=_save,
    backward=_backward,
)
