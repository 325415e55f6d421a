"""Combine, and both gradients in one pass."""

from __future__ import annotations

from torch import Tensor

from moe_kernels import backends
from moe_kernels.library._define import define
from moe_kernels.library.dispatch import refuse_bad_rows


def _combine_fwd(rows: Tensor, weights: Tensor | None, slot_row: Tensor, backend: str) -> Tensor:
    if backend != "cpu":  # whose kernels look while they are there
        refuse_bad_rows("combine", slot_row, rows.shape[0])
    return backends.load(backend, "combine").combine_fwd(rows, weights, slot_row)


def _combine_bwd(grad: Tensor, rows: Tensor, weights: Tensor, row_token, slot_row, expert_offsets, row_choice, backend):
    if backend != "cpu":
        refuse_bad_rows("combine", slot_row, rows.shape[0], expert_offsets=expert_offsets)
    kernels = backends.load(backend, "combine")
    return kernels.combine_bwd(grad, rows, weights, row_token, slot_row, expert_offsets, row_choice)


define(
    "combine_fwd(Tensor rows, Tensor? weights, Tensor slot_row, str backend) -> Tensor",
    _combine_fwd,
    lambda rows, weights, slot_row, backend: rows.new_empty((slot_row.shape[0], rows.shape[1])),
    lambda rows, weights, *rest, out_shape=None, **kwargs: (1 if weights is None else 2) * rows[0] * rows[1],
)
define(
    "combine_bwd(Tensor grad, Tensor rows, Tensor weights, Tensor row_token, Tensor slot_row, Tensor expert_offsets, "
    "Tensor row_choice, str backend) -> (Tensor, Tensor)",
    _combine_bwd,
    lambda grad, rows, weights, *rest: (rows.new_empty(rows.shape), weights.new_empty(weights.shape)),
    lambda grad, rows, *rest, out_shape=None, **kwargs: 3 * rows[0] * rows[1],
)
