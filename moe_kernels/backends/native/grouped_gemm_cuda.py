"""The grouped GEMM, expert MLP and expert norms on CUDA tensors: csrc/cuda/grouped_gemm*.cu and expert_*.cu."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_kernels.backends._rows import rows_by_token
from moe_kernels.backends.native.activation import ACTIVATIONS
from moe_kernels.sizes import GATED

COLUMNS = 128  # columns of a tile in kernels that write one partial sum per row and tile


def grouped_gemm_fwd(
    native, x, weight, expert_offsets, row_token, bias, activation, keep_pre, training=False
) -> tuple[Tensor, Tensor]:
    num_rows, width = (x if row_token is None else row_token).shape[0], weight.shape[2]
    out = x.new_empty((num_rows, width // 2 if activation in GATED else width))
    pre = x.new_empty((num_rows if keep_pre else 0, width))
    native.call(
        "grouped_gemm_fwd", x, x.dtype, (x, x.dtype, 2), x.stride(0), (row_token, torch.int32, 1),
        *_weight(weight, x.dtype), (expert_offsets, torch.int32, 1), *_bias(bias, x.dtype),
        ACTIVATIONS[activation], (out, x.dtype, 2), (pre if keep_pre else None, x.dtype, 2), num_rows, *weight.shape,
    )  # fmt: skip
    return out, pre


def grouped_gemm_bwd_weight(
    native, x, grad, expert_offsets, x_token, grad_token, with_bias, row_weight=None
) -> tuple[Tensor, Tensor]:
    num_experts, din, dout = expert_offsets.shape[0] - 1, x.shape[1], grad.shape[1]
    dweight = x.new_empty((num_experts, din, dout))
    dbias = x.new_empty((num_experts if with_bias else 0, dout))
    native.call(
        "grouped_gemm_bwd_weight", x, x.dtype, (x, x.dtype, 2), x.stride(0), (x_token, torch.int32, 1),
        (grad, x.dtype, 2), grad.stride(0), (grad_token, torch.int32, 1), (expert_offsets, torch.int32, 1),
        (row_weight, torch.float32, 1), (dweight, x.dtype, 3), (dbias if with_bias else None, x.dtype, 2),
        (x if x_token is None else x_token).shape[0], num_experts, din, dout,
    )  # fmt: skip
    return dweight, dbias


def expert_mlp_bwd_hidden(
    native, grad, w_out, expert_offsets, row_token, row_weight, pre, activation, b_out=None
) -> tuple[Tensor, Tensor, Tensor]:
    weight, num_rows = w_out.transpose(1, 2), pre.shape[0]
    num_experts, dim, hidden = weight.shape
    dpre, weighted = pre.new_empty(pre.shape), pre.new_empty((num_rows, hidden))
    partial = _partial(row_weight, num_rows, hidden)
    native.call(
        "expert_mlp_bwd_hidden", grad, grad.dtype, (grad, grad.dtype, 2), grad.stride(0),
        (row_token, torch.int32, 1), *_weight(weight, grad.dtype), (expert_offsets, torch.int32, 1),
        (row_weight, torch.float32, 1), *_bias(b_out, grad.dtype), (pre, grad.dtype, 2),
        ACTIVATIONS[activation], (dpre, grad.dtype, 2), (weighted, grad.dtype, 2), (partial, torch.float32, 2),
        num_rows, num_experts, dim, hidden,
    )  # fmt: skip
    return dpre, weighted, partial.sum(0)


def grouped_gemm_sum_rows(native: ModuleType, rows: Tensor, row_token: Tensor, num_tokens: int) -> Tensor:
    out = rows.new_empty((num_tokens, rows.shape[1]))
    if rows.numel() == 0 or num_tokens == 0:
        return out.zero_()
    token_offsets, by_token = rows_by_token(row_token, num_tokens)
    native.call(
        "grouped_gemm_sum_rows", rows, rows.dtype, (rows, rows.dtype, 2), rows.stride(0),
        (by_token, torch.int32, 1), (token_offsets, torch.int32, 1), (out, rows.dtype, 2), *out.shape,
    )  # fmt: skip
    return out


def grouped_gemm_norms(
    native: ModuleType, rows: Tensor, weight: Tensor, expert_offsets: Tensor, bias: Tensor | None
) -> Tensor:
    partial = _partial(rows, rows.shape[0], weight.shape[2])
    native.call(
        "grouped_gemm_norms", rows, rows.dtype, (rows, rows.dtype, 2), rows.stride(0),
        *_weight(weight, rows.dtype), (expert_offsets, torch.int32, 1), *_bias(bias, rows.dtype),
        (partial, torch.float32, 2), rows.shape[0], *weight.shape,
    )  # fmt: skip
    return partial.sum(0)


def _weight(weight: Tensor, dtype: torch.dtype) -> tuple[Any, int, int, bool]:
    """Arguments of native.call for a weight (E, Din, Dout): tensor, dtype and rank, the strides along E and along the
    dimension that is not contiguous (Din or Dout), and whether that is Dout."""
    transposed = weight.stride(2) != 1
    rows = weight.transpose(1, 2) if transposed else weight
    return (rows, dtype, 3), weight.stride(0), rows.stride(1), transposed


def _bias(bias: Tensor | None, dtype: torch.dtype) -> tuple[Any, int]:
    return (bias, dtype, 2), 0 if bias is None else bias.stride(0)


def _partial(like: Tensor, num_rows: int, columns: int) -> Tensor:
    """Memory for partial sums of rows, one for each tile of columns: (tiles, R) float32, with at least one tile."""
    return like.new_empty((max(-(-columns // COLUMNS), 1), num_rows), dtype=torch.float32)
