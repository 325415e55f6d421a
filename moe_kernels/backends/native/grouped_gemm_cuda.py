"""The grouped GEMM, expert MLP and expert norms on CUDA tensors: csrc/cuda/grouped_gemm*.cu and expert_*.cu.

The kernels copy 16 bytes at a time. A factor whose rows do not all start and end at multiples of 16 bytes is copied
first, with zeros after every row.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_kernels.backends._rows import rows_by_token
from moe_kernels.backends.native.activation import ACTIVATIONS
from moe_kernels.sizes import GATED, aligned, sum_tiles

PIECE = 8  # elements in 16 bytes
COLUMNS = 128  # columns of a tile in kernels that write one partial sum per row and tile


def grouped_gemm_fwd(
    native, x, weight, expert_offsets, row_token, bias, activation, keep_pre, training=False
) -> tuple[Tensor, Tensor]:
    num_rows, width = (x if row_token is None else row_token).shape[0], weight.shape[2]
    out = x.new_empty((num_rows, width // 2 if activation in GATED else width))
    pre = x.new_empty((num_rows if keep_pre else 0, width))
    x, weight = _factors(x, weight, parts=2 if activation in GATED else 1)
    native.call(
        "grouped_gemm_fwd", x, x.dtype, (x, x.dtype), x.stride(0), (row_token, torch.int32),
        *_weight(weight, x.dtype), (expert_offsets, torch.int32), *_bias(bias, x.dtype),
        ACTIVATIONS[activation], (out, x.dtype), (pre if keep_pre else None, x.dtype), num_rows, *weight.shape,
    )  # fmt: skip
    return out, pre


def grouped_gemm_bwd_weight(
    native, x, grad, expert_offsets, x_token, grad_token, with_bias, row_weight=None
) -> tuple[Tensor, Tensor]:
    (_, din), (_, dout), num_experts = x.shape, grad.shape, expert_offsets.shape[0] - 1
    if din > 0:
        x, grad = _whole(x, _up(din)), _whole(grad, _up(dout))
    rows, columns = x.shape[1], grad.shape[1]
    dweight = x.new_empty((num_experts, rows, columns))
    dbias = x.new_empty((num_experts if with_bias else 0, columns))
    native.call(
        "grouped_gemm_bwd_weight", x, x.dtype, (x, x.dtype), x.stride(0), (x_token, torch.int32),
        (grad, x.dtype), grad.stride(0), (grad_token, torch.int32), (expert_offsets, torch.int32),
        (row_weight, torch.float32), (dweight, x.dtype), (dbias if with_bias else None, x.dtype),
        (x if x_token is None else x_token).shape[0], num_experts, rows, columns,
    )  # fmt: skip
    return dweight[:, :din, :dout].contiguous(), dbias[:, :dout].contiguous()


def expert_mlp_bwd_hidden(
    native, grad, w_out, expert_offsets, row_token, row_weight, pre, activation, b_out=None
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, hidden = pre.shape[0], w_out.shape[1]
    grad, weight = _factors(grad, w_out.transpose(1, 2))
    if b_out is not None and b_out.shape[1] != weight.shape[1]:
        b_out = _padded(b_out, weight.shape[1])
    dpre, weighted = pre.new_empty(pre.shape), pre.new_empty((num_rows, hidden))
    partial = _partial(row_weight, num_rows, hidden)
    native.call(
        "expert_mlp_bwd_hidden", grad, grad.dtype, (grad, grad.dtype), grad.stride(0),
        (row_token, torch.int32), *_weight(weight, grad.dtype), (expert_offsets, torch.int32),
        (row_weight, torch.float32), *_bias(b_out, grad.dtype), (pre, grad.dtype),
        ACTIVATIONS[activation], (dpre, grad.dtype), (weighted, grad.dtype), (partial, torch.float32),
        num_rows, *weight.shape,
    )  # fmt: skip
    return dpre, weighted, sum_tiles(partial, 0)


def grouped_gemm_sum_rows(native: ModuleType, rows: Tensor, row_token: Tensor, num_tokens: int) -> Tensor:
    out = rows.new_empty((num_tokens, rows.shape[1]))
    if rows.numel() == 0 or num_tokens == 0:
        return out.zero_()
    token_offsets, by_token = rows_by_token(row_token, num_tokens)
    native.call(
        "grouped_gemm_sum_rows", rows, rows.dtype, (rows, rows.dtype), rows.stride(0),
        (by_token, torch.int32), (token_offsets, torch.int32), (out, rows.dtype), *out.shape,
    )  # fmt: skip
    return out


def grouped_gemm_norms(
    native: ModuleType, rows: Tensor, weight: Tensor, expert_offsets: Tensor, bias: Tensor | None
) -> Tensor:
    partial = _partial(rows, rows.shape[0], weight.shape[2])
    rows, weight = _factors(rows, weight)
    native.call(
        "grouped_gemm_norms", rows, rows.dtype, (rows, rows.dtype), rows.stride(0),
        *_weight(weight, rows.dtype), (expert_offsets, torch.int32), *_bias(bias, rows.dtype),
        (partial, torch.float32), rows.shape[0], *weight.shape,
    )  # fmt: skip
    return sum_tiles(partial, 0)


def _factors(x: Tensor, weight: Tensor, parts: int = 1) -> tuple[Tensor, Tensor]:
    """x (..., Din) and weight (E, Din, Dout), where necessary as copies with zeros for further indices of Din.

    The copy of a weight is contiguous along Din: then its Dout columns, in `parts` that kernels read apart, may end
    anywhere.
    """
    din = _up(max(x.shape[1], 1))
    if weight.stride(2) != 1:
        weight = _whole(weight.mT, din).mT
    elif weight.shape[1] != din or not _is_whole(weight, parts):
        weight = _padded(weight.mT, din).mT
    return _whole(x, din), weight


def _up(n: int) -> int:
    return -(-n // PIECE) * PIECE


def _whole(x: Tensor, width: int) -> Tensor:
    """x if it has `width` columns and its rows are whole, else a copy with zeros for further columns."""
    return x if x.shape[-1] == width and _is_whole(x) else _padded(x, width)


def _padded(x: Tensor, width: int) -> Tensor:
    copy = x.new_zeros((*x.shape[:-1], width))
    copy[..., : x.shape[-1]] = x
    return copy


def _is_whole(x: Tensor, parts: int = 1) -> bool:
    """Whether all rows, or `parts` of equal length of every row, start and end at multiples of 16 bytes."""
    starts = *x.stride()[:-1], x.shape[-1] // parts
    return aligned(x, 16) and all(each % PIECE == 0 for each in starts)


def _weight(weight: Tensor, dtype: torch.dtype) -> tuple[Any, int, int, bool]:
    """Arguments of native.call for a weight (E, Din, Dout): tensor, dtype, the strides along E and along the
    dimension that is not contiguous (Din or Dout), and whether that is Dout."""
    transposed = weight.stride(2) != 1
    rows = weight.transpose(1, 2) if transposed else weight
    return (rows, dtype), weight.stride(0), rows.stride(1), transposed


def _bias(bias: Tensor | None, dtype: torch.dtype) -> tuple[Any, int]:
    return (bias, dtype), 0 if bias is None else bias.stride(0)


def _partial(like: Tensor, num_rows: int, columns: int) -> Tensor:
    """Memory for partial sums of rows, one for each tile of columns: (tiles, R) float32, with at least one tile."""
    return like.new_empty((max(-(-columns // COLUMNS), 1), num_rows), dtype=torch.float32)
