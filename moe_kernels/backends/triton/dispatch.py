"""Dispatch in Triton: a program reads a tile of x once, as bit patterns, and stores it to all rows of its tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.backends.triton import TYPES, clear_rows, common_unit, launch, on_device, patterns, tile, unsupported


@triton.jit(do_not_specialize=["units_x_T", "T", "E", "R", "units"], do_not_specialize_on_alignment=["K"])
def _dispatch_fwd(
    x_ptr,  # (T, D) bit patterns
    slot_row_ptr,  # (T, K): the row of each choice, or -1
    expert_offsets_ptr,  # (E + 1)
    rows_ptr,  # (R, D) contiguous
    units_x_T,  # row stride / UNIT
    T,
    K,
    E,
    R,
    units,  # D / UNIT
    UNIT: tl.constexpr,  # number of elements in 16 bytes, or 1
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    D = units * UNIT
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (token < T)[:, None] & (d < D)
    values = tl.load(x_ptr + token[:, None] * (units_x_T * UNIT) + d, mask=inside, other=0)
    for k in range(K):
        row = tl.load(slot_row_ptr + token * K + k, mask=token < T, other=-1)
        # -1 is no row. The comparison also keeps a stale plan inside rows_ptr.
        valid = row.to(tl.uint32) < R
        tl.store(rows_ptr + row.to(tl.int64)[:, None] * D + d, values, mask=inside & valid[:, None])
    clear_rows(rows_ptr, expert_offsets_ptr, E, R, D, BLOCK_T, BLOCK_D)


def dispatch_supports(device: str, dtype: torch.dtype) -> str | None:
    return unsupported(device, dtype, tuple(TYPES))


@on_device
def dispatch_fwd(x: Tensor, row_token: Tensor, slot_row: Tensor, expert_offsets: Tensor) -> Tensor:
    dim = x.shape[1]
    rows = x.new_empty((row_token.shape[0], dim))
    if rows.numel():
        shape = tile(dim)
        grid = (max(triton.cdiv(x.shape[0], shape["BLOCK_T"]), 1), triton.cdiv(dim, shape["BLOCK_D"]))
        count = common_unit((x,), dim)
        launch(
            _dispatch_fwd, grid,
            patterns(x), slot_row, expert_offsets, patterns(rows),
            x.stride(0) // count, *slot_row.shape, expert_offsets.shape[0] - 1, rows.shape[0], dim // count,
            UNIT=count, **shape,
        )  # fmt: skip
    return rows
