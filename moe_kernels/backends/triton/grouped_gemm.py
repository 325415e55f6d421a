"""The grouped GEMM in Triton, and the squared norms of its output rows.

One launch multiplies the rows of all experts; a program computes one tile of the output. If row_token is given, the
kernel gathers rows of x as it reads them. Bias and activation are applied to the float32 accumulators.
In shapes T is the number of tokens, R that of the plan's rows, E that of experts, K the width of x and N that of the
output. Descriptors are those of TMA (Hopper's copies of tiles).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.backends.triton import TYPES, launch, on_device, unsupported
from moe_kernels.backends.triton._grouped_backward import (  # noqa: F401 callers look them up in this module
    activation_bwd,
    expert_mlp_bwd_hidden,
    grouped_gemm_bwd_weight,
    grouped_gemm_sum_rows,
)
from moe_kernels.backends.triton._grouped_configs import (
    GATES,
    Tiles,
    activation_of,
    operands,
    row_tiles,
    run_with_tiles,
)
from moe_kernels.backends.triton._grouped_tiles import (
    SLICE,
    activate,
    find_tile,
    multiply_tile,
    raster,
    scaled,
    split_columns,
    tile_rows,
)
from moe_kernels.sizes import sum_tiles


@triton.jit(do_not_specialize=["stride_x", "stride_w_E", "stride_w", "E", "R", "K", "N"])
def _grouped_gemm_fwd(
    x,  # (T or R, K), or its descriptor
    w,  # (E, K, M), or (E, M, K) if TRANSPOSED, where M = 2 N if GATED, else N; or its descriptor
    bias_ptr,  # (E, N or 2 N) contiguous; not read unless BIAS
    row_token_ptr,  # (R); not read unless GATHER
    expert_offsets_ptr,  # (E + 1)
    out_ptr,  # (R, N) contiguous; (R, column tiles) float32 sums of squares if NORMS
    pre_ptr,  # (R, N or 2 N) contiguous; not written unless KEEP_PRE
    stride_x, stride_w_E, stride_w, E, R, K, N,  # strides, K and N as `scaled` takes them
    UNIT: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr, KEEP_PRE: tl.constexpr, NORMS: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, GATHER: tl.constexpr, TRANSPOSED: tl.constexpr, X_TMA: tl.constexpr,
    W_TMA: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    stride_x, stride_w_E = scaled(stride_x, 0, UNIT, WHOLE), scaled(stride_w_E, 1, UNIT, WHOLE)
    stride_w, K, N = scaled(stride_w, 2, UNIT, WHOLE), scaled(K, 3, UNIT, WHOLE), scaled(N, 4, UNIT, WHOLE)
    column_tiles = tl.cdiv(N, BLOCK_N)
    row_tile, column_tile = raster(column_tiles, tl.num_programs(0), 0)
    expert, first, end = find_tile(row_tile, expert_offsets_ptr, E, R, BLOCK_M, BLOCK_E)
    if first >= end:
        return
    valid, token = tile_rows(first, end, row_token_ptr, GATHER, BLOCK_M)
    column = column_tile * BLOCK_N
    # Rows after the last expert's are unused; find_tile gives them expert E. They get zeros: no product and no bias is
    # added to them, and activations of 0 are 0.
    depth, bias_N = tl.where(expert < E, K, 0), tl.where(expert < E, N, 0)
    pre, linear = multiply_tile(
        x, w, token, first, expert, column, column + N, depth, N, stride_x, stride_w_E, stride_w,
        GATED, TRANSPOSED, X_TMA, W_TMA, WIDEN, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    start = first.to(tl.int64)
    if NORMS:
        n = column + tl.arange(0, BLOCK_N)
        if BIAS:
            pre += tl.load(bias_ptr + expert.to(tl.int64) * N + n, mask=n < bias_N, other=0.0).to(tl.float32)[None, :]
        squares = tl.sum(tl.where((n < N)[None, :], pre * pre, 0.0), axis=1)
        offsets = start * column_tiles + column_tile + tl.arange(0, BLOCK_M) * column_tiles
        tl.store(out_ptr + offsets, squares, mask=valid)
    else:
        bias_ptr += expert.to(tl.int64) * (2 * N if GATED else N)
        _finish(
            pre, linear, bias_ptr, out_ptr, pre_ptr, start, valid, column, bias_N, N, BIAS, KEEP_PRE, ACTIVATION, GATED
        )


@triton.jit
def _finish(
    pre, linear, bias_ptr, out_ptr, pre_ptr,
    start,  # first row, in 64 bits
    valid, column,
    bias_N,  # N, or 0 for unused rows, which have no bias
    N,
    BIAS: tl.constexpr, KEEP_PRE: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Adds the bias, applies the activation and stores a tile: SLICE columns at a time, if it has more."""
    HALF: tl.constexpr = pre.shape[1] // 2
    if HALF >= SLICE:
        pre, pre_right = split_columns(pre)
        linear, linear_right = split_columns(linear)
        _finish(
            pre, linear, bias_ptr, out_ptr, pre_ptr, start, valid, column, bias_N, N, BIAS, KEEP_PRE, ACTIVATION, GATED
        )
        _finish(
            pre_right, linear_right, bias_ptr, out_ptr, pre_ptr, start, valid, column + HALF, bias_N, N,
            BIAS, KEEP_PRE, ACTIVATION, GATED,
        )  # fmt: skip
    else:
        row, n = tl.arange(0, pre.shape[0]), column + tl.arange(0, pre.shape[1])
        if BIAS:
            pre += tl.load(bias_ptr + n, mask=n < bias_N, other=0.0).to(tl.float32)[None, :]
            if GATED:
                linear += tl.load(bias_ptr + N + n, mask=n < bias_N, other=0.0).to(tl.float32)[None, :]
        inside = valid[:, None] & (n < N)[None, :]
        if KEEP_PRE:
            pre_width = 2 * N if GATED else N
            ptrs = pre_ptr + start * pre_width + (row[:, None] * pre_width + n[None, :])
            tl.store(ptrs, pre.to(pre_ptr.dtype.element_ty), mask=inside)
            if GATED:
                tl.store(ptrs + N, linear.to(pre_ptr.dtype.element_ty), mask=inside)
        out = activate(pre, ACTIVATION)
        if GATED:
            out *= linear
        tl.store(out_ptr + start * N + (row[:, None] * N + n[None, :]), out.to(out_ptr.dtype.element_ty), mask=inside)


def grouped_gemm_supports(device: str, dtype: torch.dtype) -> str | None:
    return unsupported(device, dtype, tuple(TYPES))


@on_device
def grouped_gemm_fwd(
    x: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None,
    bias: Tensor | None,
    activation: str,
    keep_pre: bool,
    training: bool = False,
) -> tuple[Tensor, Tensor]:
    num_rows, columns = (x if row_token is None else row_token).shape[0], weight.shape[2]
    gated = activation in GATES
    out = x.new_empty((num_rows, columns // 2 if gated else columns))
    pre = x.new_empty((num_rows if keep_pre else 0, columns))
    if out.numel():

        def run(tiles):
            _launch_fwd(x, weight, expert_offsets, row_token, bias, activation, out, pre, tiles)

        kernel = "gated" if gated else "fwd"
        run_with_tiles(kernel, x, weight, num_rows, weight.shape[0], out.shape[1], run, training)
    return out, pre


@on_device
def grouped_gemm_norms(rows: Tensor, weight: Tensor, expert_offsets: Tensor, bias: Tensor | None) -> Tensor:
    (num_rows, _), (num_experts, _, columns) = rows.shape, weight.shape
    squares = rows.new_zeros(num_rows, dtype=torch.float32)
    if num_rows == 0 or columns == 0:
        return squares

    def run(tiles):
        nonlocal squares
        partial = rows.new_empty((num_rows, triton.cdiv(columns, tiles.n)), dtype=torch.float32)
        _launch_fwd(rows, weight, expert_offsets, None, bias, "", partial, rows, tiles, norms=True)
        squares = sum_tiles(partial, 1)

    run_with_tiles("fwd", rows, weight, num_rows, num_experts, columns, run)
    return squares


def _launch_fwd(
    x: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None,
    bias: Tensor | None,
    activation: str,
    out: Tensor,
    pre: Tensor,
    tiles: Tiles,
    norms: bool = False,
) -> None:
    columns = weight.shape[2] // 2 if activation in GATES else weight.shape[2]
    grid = (row_tiles(out.shape[0], weight.shape[0], tiles) * triton.cdiv(columns, tiles.n),)
    launch(
        _grouped_gemm_fwd, grid,
        bias_ptr=expert_offsets if bias is None else bias.contiguous(),
        row_token_ptr=expert_offsets if row_token is None else row_token,
        expert_offsets_ptr=expert_offsets, out_ptr=out, pre_ptr=pre, R=out.shape[0],
        BIAS=bias is not None, KEEP_PRE=not norms and pre.shape[0] > 0, NORMS=norms,
        **operands(x, weight, columns, row_token is not None, tiles), **activation_of(activation),
    )  # fmt: skip
