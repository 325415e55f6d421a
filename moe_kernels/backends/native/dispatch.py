"""Dispatch on the C++ backends: csrc/cpu/dispatch.cpp and csrc/cuda/dispatch.cu."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moe_kernels.sizes import refuse_bad_rows


def dispatch_fwd(native: ModuleType, x: Tensor, row_token: Tensor, slot_row: Tensor, expert_offsets: Tensor) -> Tensor:
    rows = x.new_empty((row_token.shape[0], x.shape[1]))
    out_of_range = native.call(
        "dispatch_fwd", rows, x.element_size(), (x, x.dtype), x.stride(0), (row_token, torch.int32),
        (slot_row, torch.int32), (expert_offsets, torch.int32), (rows, x.dtype), *slot_row.shape,
        expert_offsets.shape[0] - 1, *rows.shape,
    )  # fmt: skip
    if out_of_range:
        refuse_bad_rows("dispatch", slot_row, row_token.shape[0], row_token, expert_offsets)
    return rows
