"""The grouped GEMM on tensor cores: csrc/cuda/grouped_gemm.cu and its gradients, expert_mlp.cu and expert_norms.cu."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moe_kernels.backends import _native
from moe_kernels.backends._rows import rows_by_token
from moe_kernels.backends.native.activation import ACTIVATIONS
from moe_kernels.library import GATED

COLUMNS = 128  # of a tile, which writes one partial sum a row


def fwd(
    native, x, weight, expert_offsets, row_token, bias, activation, keep_pre, training=False
) -> tuple[Tensor, Tensor]:
    num_rows, width = (x if row_token is None else row_token).shape[0], weight.shape[2]
    out = x.new_empty((num_rows, width // 2 if activation in GATED else width))
    pre = x.new_empty((num_rows if keep_pre else 0, width))
    native.launch(
        "grouped_gemm_fwd",
        x,
        _native.DTYPES[x.dtype],
        native.pointer("grouped_gemm", x, x.dtype, 2),
        x.stride(0),
        native.pointer("grouped_gemm", row_token, torch.int32, 1),
        *_weight(native, weight, x.dtype),
        native.pointer("grouped_gemm", expert_offsets, torch.int32, 1),
        *_bias(native, bias, x.dtype),
        ACTIVATIONS[activation],
        native.pointer("grouped_gemm", out, x.dtype, 2),
        native.pointer("grouped_gemm", pre if keep_pre else None, x.dtype, 2),
        num_rows,
        *weight.shape,
    )
    return out, pre


def bwd_weight(
    native, x, grad, expert_offsets, x_token, grad_token, with_bias, row_weight=None
) -> tuple[Tensor, Tensor]:
    num_experts, din, dout = expert_offsets.shape[0] - 1, x.shape[1], grad.shape[1]
    dweight = x.new_empty((num_experts, din, dout))
    dbias = x.new_empty((num_experts if with_bias else 0, dout))
    native.launch(
        "grouped_gemm_bwd_weight",
        x,
        _native.DTYPES[x.dtype],
        native.pointer("grouped_gemm", x, x.dtype, 2),
        x.stride(0),
        native.pointer("grouped_gemm", x_token, torch.int32, 1),
        native.pointer("grouped_gemm", grad, x.dtype, 2),
        grad.stride(0),
        native.pointer("grouped_gemm", grad_token, torch.int32, 1),
        native.pointer("grouped_gemm", expert_offsets, torch.int32, 1),
        native.pointer("grouped_gemm", row_weight, torch.float32, 1),
        native.pointer("grouped_gemm", dweight, x.dtype, 3),
        native.pointer("grouped_gemm", dbias if with_bias else None, x.dtype, 2),
        (x if x_token is None else x_token).shape[0],
        num_experts,
        din,
        dout,
    )
    return dweight, dbias


def hidden_bwd(
    native, grad, w_out, expert_offsets, row_token, row_weight, pre, activation, b_out=None
) -> tuple[Tensor, Tensor, Tensor]:
    weight, num_rows = w_out.transpose(1, 2), pre.shape[0]
    num_experts, dim, hidden = weight.shape
    dpre, weighted = pre.new_empty(pre.shape), pre.new_empty((num_rows, hidden))
    partial = _partial(row_weight, num_rows, hidden)
    native.launch(
        "expert_mlp_bwd_hidden",
        grad,
        _native.DTYPES[grad.dtype],
        native.pointer("expert_mlp", grad, grad.dtype, 2),
        grad.stride(0),
        native.pointer("expert_mlp", row_token, torch.int32, 1),
        *_weight(native, weight, grad.dtype),
        native.pointer("expert_mlp", expert_offsets, torch.int32, 1),
        native.pointer("expert_mlp", row_weight, torch.float32, 1),
        *_bias(native, b_out, grad.dtype),
        native.pointer("expert_mlp", pre, grad.dtype, 2),
        ACTIVATIONS[activation],
        native.pointer("expert_mlp", dpre, grad.dtype, 2),
        native.pointer("expert_mlp", weighted, grad.dtype, 2),
        native.pointer("expert_mlp", partial, torch.float32, 2),
        num_rows,
        num_experts,
        dim,
        hidden,
    )
    return dpre, weighted, partial.sum(0)


def sum_rows(native: ModuleType, rows: Tensor, row_token: Tensor, num_tokens: int) -> Tensor:
    """(R, D) -> (T, D), every token's sum of its rows."""
    out = rows.new_empty((num_tokens, rows.shape[1]))
    if rows.numel() == 0 or num_tokens == 0:
        return out.zero_()
    token_offsets, by_token = rows_by_token(row_token, num_tokens)
    native.launch(
        "grouped_gemm_sum_rows",
        rows,
        _native.DTYPES[rows.dtype],
        native.pointer("grouped_gemm", rows, rows.dtype, 2),
        rows.stride(0),
        native.pointer("grouped_gemm", by_token, torch.int32, 1),
        native.pointer("grouped_gemm", token_offsets, torch.int32, 1),
        native.pointer("grouped_gemm", out, rows.dtype, 2),
        *out.shape,
    )
    return out


def norms(native: ModuleType, rows: Tensor, weight: Tensor, expert_offsets: Tensor, bias: Tensor | None) -> Tensor:
    partial = _partial(rows, rows.shape[0], weight.shape[2])
    native.launch(
        "grouped_gemm_norms",
        rows,
        _native.DTYPES[rows.dtype],
        native.pointer("expert_norms", rows, rows.dtype, 2),
        rows.stride(0),
        *_weight(native, weight, rows.dtype),
        native.pointer("expert_norms", expert_offsets, torch.int32, 1),
        *_bias(native, bias, rows.dtype),
        native.pointer("expert_norms", partial, torch.float32, 2),
        rows.shape[0],
        *weight.shape,
    )
    return partial.sum(0)


def _weight(native: ModuleType, weight: Tensor, dtype: torch.dtype) -> tuple[int, int, int, bool]:
    """Address, strides and layout of a weight (E, Din, Dout) whose last or middle dimension is contiguous."""
    transposed = weight.stride(2) != 1
    rows = weight.transpose(1, 2) if transposed else weight
    return native.pointer("grouped_gemm", rows, dtype, 3), weight.stride(0), rows.stride(1), transposed


def _bias(native: ModuleType, bias: Tensor | None, dtype: torch.dtype) -> tuple[int, int]:
    return native.pointer("grouped_gemm", bias, dtype, 2), 0 if bias is None else bias.stride(0)


def _partial(like: Tensor, num_rows: int, columns: int) -> Tensor:
    """Memory for the partial sums of every tile of columns: (tiles, R) float32, with at least one tile."""
    return like.new_empty((max(-(-columns // COLUMNS), 1), num_rows), dtype=torch.float32)
