"""Dispatch; its gradient is a combine."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import backends
from moe_kernels.library._define import define, no_flops


def refuse_bad_rows(
    op: str, slot_row: Tensor, num_rows: int, row_token: Tensor | None = None, expert_offsets: Tensor | None = None
) -> None:
    """ValueError for what a plan's arrays hold out of range, on the CPU; for a GPU one would wait."""
    if not slot_row.is_cpu:
        return
    num_tokens = slot_row.shape[0]
    if row_token is not None:
        _refuse_outside(op, "row_token", row_token, num_tokens, "no token")
    _refuse_outside(op, "slot_row", slot_row, num_rows, "no row")
    used = 0 if expert_offsets is None else int(expert_offsets[-1])
    if not 0 <= used <= num_rows:
        raise ValueError(f"{op}: plan.expert_offsets must end between 0 and R = {num_rows}; got {used}")


def _refuse_outside(op: str, name: str, index: Tensor, size: int, none: str) -> None:
    low, high = (int(bound) for bound in torch.aminmax(index)) if index.numel() else (-1, -1)
    if low < -1 or high >= size:
        raise ValueError(f"{op}: plan.{name} must be from -1 ({none}) to {size - 1}; got {low} to {high}")


def _dispatch(x: Tensor, row_token: Tensor, slot_row: Tensor, expert_offsets: Tensor, backend: str) -> Tensor:
    if backend != "cpu":  # whose kernel looks while it is there
        refuse_bad_rows("dispatch", slot_row, row_token.shape[0], row_token, expert_offsets)
    return backends.load(backend, "dispatch").dispatch_fwd(x, row_token, slot_row, expert_offsets)


define(
    "dispatch_fwd(Tensor x, Tensor row_token, Tensor slot_row, Tensor expert_offsets, str backend) -> Tensor",
    _dispatch,
    lambda x, row_token, *rest: x.new_empty((row_token.shape[0], x.shape[1])),
    no_flops,
)
