"""Combine in Triton: a token's rows are summed in float32, in the order of its choices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.backends.triton import TYPES, clear_rows, common_unit, launch, on_device, tile, unsupported


@triton.jit
def _sum_rows(
    rows_ptr,
    weights_ptr,
    slot_row_ptr,
    y_ptr,
    token,
    d,
    stride_rows_R,
    T,
    K,
    R,
    D,
    WEIGHTED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Stores columns `d` of the sums of BLOCK_T tokens."""
    sums = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for k in tl.range(0, K, loop_unroll_factor=2):
        slot = tl.load(slot_row_ptr + token * K + k, mask=token < T, other=-1)
        used, row = slot.to(tl.uint32) < R, slot.to(tl.int64)  # a row past R, as in a stale plan, is no row
        inside = used[:, None] & (d < D)
        values = tl.load(rows_ptr + row[:, None] * stride_rows_R + d, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            weight = tl.load(weights_ptr + token * K + k, mask=used, other=0.0)
            sums = tl.fma(weight[:, None], values, sums)
        else:
            sums += values
    out = y_ptr + token[:, None] * D + d
    tl.store(out, sums.to(y_ptr.dtype.element_ty), mask=(token < T)[:, None] & (d < D))


# `weighted` is no constexpr, so one compiled kernel computes the weighted sums of combine and the plain sums of
# dispatch's backward.
@triton.jit(do_not_specialize=["units_rows_R", "T", "R", "units", "weighted"], do_not_specialize_on_alignment=["K"])
def _combine_fwd(
    rows_ptr,  # (R, D)
    weights_ptr,  # (T, K) contiguous; not read unless weighted
    slot_row_ptr,  # (T, K): the row of each choice, or -1
    y_ptr,  # (T, D) contiguous
    units_rows_R,  # row stride / UNIT
    T,
    K,
    R,
    units,  # D / UNIT
    weighted,
    UNIT: tl.constexpr,  # number of elements in 16 bytes, or 1
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    D, stride = units * UNIT, units_rows_R * UNIT
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    if weighted:
        _sum_rows(rows_ptr, weights_ptr, slot_row_ptr, y_ptr, token, d, stride, T, K, R, D, True, BLOCK_T, BLOCK_D)
    else:
        _sum_rows(rows_ptr, weights_ptr, slot_row_ptr, y_ptr, token, d, stride, T, K, R, D, False, BLOCK_T, BLOCK_D)


@triton.jit(
    do_not_specialize=["units_grad_T", "units_rows_R", "T", "E", "R", "units"], do_not_specialize_on_alignment=["K"]
)
def _combine_bwd(
    grad_ptr,  # (T, D)
    rows_ptr,  # (R, D)
    weights_ptr,  # (T, K) contiguous
    slot_row_ptr,  # (T, K): the row of each choice, or -1
    expert_offsets_ptr,  # (E + 1)
    drows_ptr,  # (R, D) contiguous
    dweights_ptr,  # (T, K) contiguous
    units_grad_T,  # row stride / UNIT
    units_rows_R,  # row stride / UNIT
    T,
    K,
    E,
    R,
    units,  # D / UNIT
    UNIT: tl.constexpr,  # number of elements in 16 bytes, or 1
    WHOLE: tl.constexpr,  # D <= BLOCK_D
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    D = units * UNIT
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    grad = grad_ptr + token[:, None] * (units_grad_T * UNIT)
    first = tl.arange(0, BLOCK_D)
    dy = tl.load(grad + first, mask=(token < T)[:, None] & (first < D), other=0.0).to(tl.float32)
    for k in range(K):
        slot = tl.load(slot_row_ptr + token * K + k, mask=token < T, other=-1)
        used, row = slot.to(tl.uint32) < R, slot.to(tl.int64)
        weight = tl.load(weights_ptr + token * K + k, mask=used, other=0.0)
        dot = tl.zeros((BLOCK_T,), tl.float32)
        start = 0
        while start < D:
            d = start + first
            inside = used[:, None] & (d < D)
            if not WHOLE:
                dy = tl.load(grad + d, mask=inside, other=0.0).to(tl.float32)
            values = tl.load(rows_ptr + row[:, None] * (units_rows_R * UNIT) + d, mask=inside, other=0.0).to(tl.float32)
            drow = (weight[:, None] * dy).to(drows_ptr.dtype.element_ty)
            tl.store(drows_ptr + row[:, None] * D + d, drow, mask=inside)
            dot += tl.sum(values * dy, axis=1)
            start += BLOCK_D
        # The weight of a dropped choice has gradient 0, even if dy holds NaN.
        tl.store(dweights_ptr + token * K + k, tl.where(used, dot, 0.0), mask=token < T)
    clear_rows(drows_ptr, expert_offsets_ptr, E, R, D, BLOCK_T, BLOCK_D)


def combine_supports(device: str, dtype: torch.dtype) -> str | None:
    return unsupported(device, dtype, tuple(TYPES))


@on_device
def combine_fwd(rows: Tensor, weights: Tensor | None, slot_row: Tensor) -> Tensor:
    dim = rows.shape[1]
    y = rows.new_empty((slot_row.shape[0], dim))
    if y.numel():
        shape, count = tile(dim), common_unit((rows,), dim)
        grid = (triton.cdiv(y.shape[0], shape["BLOCK_T"]), triton.cdiv(dim, shape["BLOCK_D"]))
        launch(
            _combine_fwd, grid,
            rows, slot_row.view(torch.float32) if weights is None else weights, slot_row, y,
            rows.stride(0) // count, *slot_row.shape, rows.shape[0], dim // count, int(weights is not None),
            UNIT=count, **shape,
        )  # fmt: skip
    return y


@on_device
def combine_bwd(
    grad: Tensor, rows: Tensor, weights: Tensor, slot_row: Tensor, expert_offsets: Tensor
) -> tuple[Tensor, Tensor]:
    drows, dweights = rows.new_empty(rows.shape), weights.new_empty(weights.shape)
    if slot_row.numel():
        dim = rows.shape[1]
        shape, count = tile(dim), common_unit((grad, rows), dim)
        launch(
            _combine_bwd, (triton.cdiv(slot_row.shape[0], shape["BLOCK_T"]),),
            grad, rows, weights, slot_row, expert_offsets, drows, dweights,
            grad.stride(0) // count, rows.stride(0) // count, *slot_row.shape, expert_offsets.shape[0] - 1,
            rows.shape[0], dim // count, UNIT=count, WHOLE=dim <= shape["BLOCK_D"], **shape,
        )  # fmt: skip
    return drows, dweights
