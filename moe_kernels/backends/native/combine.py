"""Combine on the C++ backends: csrc/cpu/combine.cpp and csrc/cuda/combine.cu."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moe_kernels.sizes import compute_dtype, refuse_bad_rows


def combine_fwd(native: ModuleType, rows: Tensor, weights: Tensor | None, slot_row: Tensor) -> Tensor:
    y = rows.new_empty((slot_row.shape[0], rows.shape[1]))
    out_of_range = native.call(
        "combine_fwd", rows, rows.dtype, (rows, rows.dtype), rows.stride(0),
        (weights, compute_dtype(rows.dtype)), (slot_row, torch.int32), (y, rows.dtype),
        *slot_row.shape, *rows.shape,
    )  # fmt: skip
    if out_of_range:
        refuse_bad_rows("combine", slot_row, rows.shape[0])
    return y


def combine_bwd(native, grad, rows, weights, slot_row, expert_offsets) -> tuple[Tensor, Tensor]:
    drows, dweights = rows.new_empty(rows.shape), weights.new_empty(weights.shape)
    out_of_range = native.call(
        "combine_bwd", rows, rows.dtype, (grad, rows.dtype), grad.stride(0), (rows, rows.dtype),
        rows.stride(0), (weights, compute_dtype(rows.dtype)), (slot_row, torch.int32),
        (expert_offsets, torch.int32), (drows, rows.dtype), (dweights, weights.dtype),
        *slot_row.shape, expert_offsets.shape[0] - 1, *rows.shape,
    )  # fmt: skip
    if out_of_range:
        refuse_bad_rows("combine", slot_row, rows.shape[0], expert_offsets=expert_offsets)
    return drows, dweights
