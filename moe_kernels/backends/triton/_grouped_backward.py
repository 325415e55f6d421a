"""Backward of the grouped GEMM, of an expert MLP's hidden layer and of activations; and sums of each token's rows.

The gradient to x is not here: it comes from the forward kernel on transposed weights. For the weight gradient a program
computes a tile of dW from all rows of its expert, in order. It reads them by pointers, not by bulk copies (TMA): the
last block of an expert would include rows of the next expert. In shapes K is the width of a product's input, N that of
its output.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.backends._rows import rows_by_token
from moe_kernels.backends.triton import launch, on_device, tile
from moe_kernels.backends.triton._grouped_configs import (
    MAX_SORTED,
    Tiles,
    activation_of,
    block_of,
    blocks,
    in_units,
    operands,
    precision,
    row_tiles,
    run_with_tiles,
)
from moe_kernels.backends.triton._grouped_tiles import (
    SLICE,
    activate_with_slope,
    by_size,
    find_tile,
    multiply_tile,
    product,
    raster,
    scaled,
    split_columns,
    tile_rows,
)
from moe_kernels.sizes import sum_tiles

TILE = 2048  # elements of a program of activation_bwd


@triton.jit
def _load_rows(
    ptr,  # (T or R, D)
    token_ptr,  # (R); not read unless GATHER
    row, end, d, D, stride,
    GATHER: tl.constexpr, WIDEN: tl.constexpr, TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """Rows `row` and columns `d`, as (columns, rows) if TRANSPOSED. Zeros for row >= end, d >= D and token -1."""
    token = row.to(tl.int64)
    if GATHER:
        token = tl.load(token_ptr + row, mask=row < end, other=-1).to(tl.int64)
    valid = (row < end) & (token >= 0)
    if TRANSPOSED:  # pointers are transposed: with tl.trans of `values` the loads would not become cp.async on sm_80
        offsets, inside = token[None, :] * stride + d[:, None], valid[None, :] & (d < D)[:, None]
    else:
        offsets, inside = token[:, None] * stride + d[None, :], valid[:, None] & (d < D)[None, :]
    values = tl.load(ptr + offsets, mask=inside, other=0.0)
    if WIDEN:
        values = values.to(tl.float32)
    return values


@triton.jit(do_not_specialize=["stride_x", "stride_grad", "E", "K", "N"])
def _grouped_gemm_bwd_weight(
    x_ptr,  # (T or R, K)
    grad_ptr,  # (T or R, N)
    x_token_ptr,  # (R); not read unless GATHER_X
    grad_token_ptr,  # (R); not read unless GATHER_GRAD
    expert_offsets_ptr,  # (E + 1)
    row_weight_ptr,  # (R), multiplies rows of grad in dbias only; not read unless WEIGHTED
    dweight_ptr,  # (E, K, N) contiguous
    dbias_ptr,  # (E, N) contiguous; not written unless BIAS
    stride_x, stride_grad, E, K, N,  # strides, K and N as `scaled` takes them
    UNIT: tl.constexpr, WHOLE: tl.constexpr, SORTED: tl.constexpr, GATHER_X: tl.constexpr,
    GATHER_GRAD: tl.constexpr, BIAS: tl.constexpr, WEIGHTED: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,  # columns of x
    BLOCK_N: tl.constexpr,  # columns of grad
    BLOCK_K: tl.constexpr,  # rows in a step
):  # fmt: skip
    stride_x, stride_grad = scaled(stride_x, 0, UNIT, WHOLE), scaled(stride_grad, 1, UNIT, WHOLE)
    K, N = scaled(K, 2, UNIT, WHOLE), scaled(N, 3, UNIT, WHOLE)
    # The grid has one dimension: the other two would be limited to 65535 programs.
    column_tiles = tl.cdiv(N, BLOCK_N)
    tiles = tl.maximum(tl.cdiv(K, BLOCK_M), 1) * column_tiles
    place = tl.program_id(0) // tiles
    row_tile, column_tile = raster(column_tiles, tiles, place * tiles)
    expert = by_size(place, expert_offsets_ptr, E, SORTED)
    begin = tl.load(expert_offsets_ptr + expert)
    end = tl.load(expert_offsets_ptr + expert + 1)
    k = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if BIAS:
        if row_tile == 0:
            sums = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
            for start in tl.range(begin, end, BLOCK_K, num_stages=1):
                row = start + tl.arange(0, BLOCK_K)
                grad = _load_rows(grad_ptr, grad_token_ptr, row, end, n, N, stride_grad, GATHER_GRAD, True)
                if WEIGHTED:
                    grad *= tl.load(row_weight_ptr + row, mask=row < end, other=0.0)[:, None]
                sums += grad
            dbias = tl.sum(sums, axis=0).to(dbias_ptr.dtype.element_ty)
            tl.store(dbias_ptr + expert.to(tl.int64) * N + n, dbias, mask=n < N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(begin, end, BLOCK_K):
        row = start + tl.arange(0, BLOCK_K)
        a = _load_rows(x_ptr, x_token_ptr, row, end, k, K, stride_x, GATHER_X, WIDEN, True)
        b = _load_rows(grad_ptr, grad_token_ptr, row, end, n, N, stride_grad, GATHER_GRAD, WIDEN)
        total = product(a, b, total, PRECISION)
    ptrs = dweight_ptr + (expert.to(tl.int64) * K + k[:, None]) * N + n[None, :]
    tl.store(ptrs, total.to(dweight_ptr.dtype.element_ty), mask=(k < K)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["stride_x", "stride_w_E", "stride_w", "E", "R", "K", "N"])
def _expert_mlp_bwd_hidden(
    x,  # (T or R, K) dy, the gradient of the MLP's output y, or a descriptor of dy
    w,  # (E, K, N) w_out transposed, stored as (E, N, K) if TRANSPOSED; or its descriptor
    row_token_ptr,  # (R); not read unless GATHER
    row_weight_ptr,  # (R)
    bias_ptr,  # (E, K) contiguous, b_out; not read unless BIAS
    expert_offsets_ptr,  # (E + 1)
    pre_ptr,  # (R, N or 2 N) contiguous
    dpre_ptr,  # (R, N or 2 N) contiguous, receives the gradient of pre
    weighted_ptr,  # (R, N) contiguous, receives row_weight * h
    partial_ptr,  # (R, column tiles), receives parts of row_weight's gradient <h, dh> + <b_out, dy>; dh = dy w_out^T
    stride_x, stride_w_E, stride_w, E, R, K, N,  # strides, K and N as `scaled` takes them
    UNIT: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    GATHER: tl.constexpr, TRANSPOSED: tl.constexpr, X_TMA: tl.constexpr, W_TMA: tl.constexpr, WIDEN: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    stride_x, stride_w_E = scaled(stride_x, 0, UNIT, WHOLE), scaled(stride_w_E, 1, UNIT, WHOLE)
    stride_w, K, N = scaled(stride_w, 2, UNIT, WHOLE), scaled(K, 3, UNIT, WHOLE), scaled(N, 4, UNIT, WHOLE)
    column_tiles = tl.maximum(tl.cdiv(N, BLOCK_N), 1)
    row_tile, column_tile = raster(column_tiles, tl.num_programs(0), 0)
    expert, first, end = find_tile(row_tile, expert_offsets_ptr, E, R, BLOCK_M, BLOCK_E)
    if first >= end:
        return
    valid, token = tile_rows(first, end, row_token_ptr, GATHER, BLOCK_M)
    column = column_tile * BLOCK_N
    row, depth = tl.arange(0, BLOCK_M), tl.where(expert < E, K, 0)  # unused rows get zeros
    used = first.to(tl.int64) + row < tl.where(expert < E, end, 0)
    dh, _ = multiply_tile(
        x, w, token, first, expert, column, column, depth, N, stride_x, stride_w_E, stride_w,
        False, TRANSPOSED, X_TMA, W_TMA, WIDEN, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    start = first.to(tl.int64)
    weight = tl.load(row_weight_ptr + start + row, mask=used, other=0.0)
    pre_width = 2 * N if GATED else N
    pre_ptr += start * pre_width
    dpre_ptr += start * pre_width
    weighted_ptr += start * N
    partial = _finish_hidden(dh, weight, pre_ptr, dpre_ptr, weighted_ptr, valid, used, column, N, ACTIVATION, GATED)
    if BIAS:
        tl.static_assert(GATHER)  # otherwise x may be a descriptor, but the loop below reads x by pointers
        if column_tile == 0:
            bias_ptr += expert.to(tl.int64) * K
            k = tl.arange(0, BLOCK_K)
            for begin in tl.range(0, depth, BLOCK_K, num_stages=1):
                inside = begin + k < K
                bias = tl.load(bias_ptr + begin + k, mask=inside, other=0.0).to(tl.float32)
                ptrs = x + token[:, None] * stride_x + begin + k
                dy = tl.load(ptrs, mask=(token >= 0)[:, None] & inside, other=0.0).to(tl.float32)
                partial += tl.sum(dy * bias, axis=1)
    tl.store(partial_ptr + start * column_tiles + column_tile + row * column_tiles, partial, mask=valid)


@triton.jit
def _finish_hidden(
    dh, weight, pre_ptr, dpre_ptr, weighted_ptr, valid, used, column, N,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Stores dpre and weighted h of a tile, at most SLICE columns at a time; returns <h, dh> over the tile's columns.

    dh: dy w_out^T, without the row's weight. valid: the tile has the row. used: an expert has the row.
    """
    HALF: tl.constexpr = dh.shape[1] // 2
    if HALF >= SLICE:
        left, right = split_columns(dh)
        partial = _finish_hidden(
            left, weight, pre_ptr, dpre_ptr, weighted_ptr, valid, used, column, N, ACTIVATION, GATED
        )
        partial += _finish_hidden(
            right, weight, pre_ptr, dpre_ptr, weighted_ptr, valid, used, column + HALF, N, ACTIVATION, GATED
        )
    else:
        row, n = tl.arange(0, dh.shape[0]), column + tl.arange(0, dh.shape[1])
        inside, used_inside = valid[:, None] & (n < N)[None, :], used[:, None] & (n < N)[None, :]
        offsets = row[:, None] * (2 * N if GATED else N) + n[None, :]
        pre = tl.load(pre_ptr + offsets, mask=used_inside, other=0.0).to(tl.float32)
        h, slope = activate_with_slope(pre, ACTIVATION)
        if GATED:
            linear = tl.load(pre_ptr + offsets + N, mask=used_inside, other=0.0).to(tl.float32)
            tl.store(dpre_ptr + offsets + N, (weight[:, None] * dh * h).to(dpre_ptr.dtype.element_ty), mask=inside)
            h *= linear
            slope *= linear
        tl.store(dpre_ptr + offsets, (weight[:, None] * dh * slope).to(dpre_ptr.dtype.element_ty), mask=inside)
        offsets = row[:, None] * N + n[None, :]
        tl.store(weighted_ptr + offsets, (weight[:, None] * h).to(weighted_ptr.dtype.element_ty), mask=inside)
        partial = tl.sum(tl.where(inside, h * dh, 0.0), axis=1)
    return partial


@triton.jit(do_not_specialize=["stride_grad", "stride_pre", "R", "N"])
def _activation_bwd(
    grad_ptr,  # (R, N)
    pre_ptr,  # (R, N or 2 N)
    dpre_ptr,  # (R, N or 2 N) contiguous
    stride_grad, stride_pre, R, N,  # strides and N as `scaled` takes them
    UNIT: tl.constexpr, WHOLE: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    stride_grad, stride_pre = scaled(stride_grad, 0, UNIT, WHOLE), scaled(stride_pre, 1, UNIT, WHOLE)
    N = scaled(N, 2, UNIT, WHOLE)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = (row < R) & (n < N)
    grad = tl.load(grad_ptr + row * stride_grad + n, mask=inside, other=0.0).to(tl.float32)
    pre = tl.load(pre_ptr + row * stride_pre + n, mask=inside, other=0.0).to(tl.float32)
    y, slope = activate_with_slope(pre, ACTIVATION)
    ptrs = dpre_ptr + row * (2 * N if GATED else N) + n
    if GATED:
        linear = tl.load(pre_ptr + row * stride_pre + N + n, mask=inside, other=0.0).to(tl.float32)
        tl.store(ptrs + N, (grad * y).to(dpre_ptr.dtype.element_ty), mask=inside)
        slope *= linear
    tl.store(ptrs, (grad * slope).to(dpre_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["stride_rows_R", "T", "D"])
def _token_sums(
    rows_ptr,  # (R, D)
    by_token_ptr,  # (R): rows without a token, then the rows of token 0 in ascending order, those of token 1, ...
    token_offsets_ptr,  # (T + 1) into by_token
    out_ptr,  # (T, D) contiguous
    stride_rows_R, T, D,  # stride and D as `scaled` takes them
    UNIT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    stride_rows_R, D = scaled(stride_rows_R, 0, UNIT, WHOLE), scaled(D, 1, UNIT, WHOLE)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.load(token_offsets_ptr + token, mask=token < T, other=0)
    count = tl.load(token_offsets_ptr + token + 1, mask=token < T, other=0) - first
    sums = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for i in range(tl.max(count)):
        valid = i < count
        row = tl.load(by_token_ptr + first + i, mask=valid, other=0).to(tl.int64)
        inside = valid[:, None] & (d < D)
        sums += tl.load(rows_ptr + row[:, None] * stride_rows_R + d, mask=inside, other=0.0).to(tl.float32)
    out = out_ptr + token[:, None] * D + d
    tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=(token < T)[:, None] & (d < D))


def _stages(tiles: Tiles, gathered: bool) -> Tiles:
    """Tiles with more stages if rows are gathered: Triton splits stages between loads of indices and of rows."""
    return tiles._replace(num_stages=2 * tiles.num_stages - 1) if gathered else tiles


@on_device
def grouped_gemm_bwd_weight(
    x: Tensor,
    grad: Tensor,
    expert_offsets: Tensor,
    x_token: Tensor | None,
    grad_token: Tensor | None,
    with_bias: bool,
    row_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    num_experts, dim, columns = expert_offsets.shape[0] - 1, x.shape[1], grad.shape[1]
    dweight = x.new_empty((num_experts, dim, columns))
    dbias = x.new_empty((num_experts if with_bias else 0, columns))
    if num_experts == 0 or columns == 0:
        return dweight, dbias
    num_rows = (x if x_token is None else x_token).shape[0]
    (stride_x, stride_grad, units_k, units_n), units = in_units(x, x.stride(0), grad.stride(0), dim, columns)

    def run(tiles):
        blocks_m = max(triton.cdiv(dim, tiles.m), 1)  # without columns of x the kernel still computes dbias
        launch(
            _grouped_gemm_bwd_weight, (blocks_m * triton.cdiv(columns, tiles.n) * num_experts,),
            x, grad, expert_offsets if x_token is None else x_token,
            expert_offsets if grad_token is None else grad_token, expert_offsets,
            dweight if row_weight is None else row_weight, dweight, dbias,
            stride_x, stride_grad, num_experts, units_k, units_n, **units,
            SORTED=block_of(num_experts, 4) if num_experts <= MAX_SORTED else 0,  # 8 would take more barriers
            GATHER_X=x_token is not None, GATHER_GRAD=grad_token is not None, BIAS=with_bias,
            WEIGHTED=row_weight is not None,
            **precision(x), **blocks(_stages(tiles, x_token is not None or grad_token is not None)),
        )  # fmt: skip

    run_with_tiles("weight", x, grad, num_rows, num_experts, columns, run, training=True)
    return dweight, dbias


@on_device
def expert_mlp_bwd_hidden(
    grad: Tensor,
    w_out: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None,
    row_weight: Tensor,
    pre: Tensor,
    activation: str,
    b_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, (num_experts, hidden, _) = pre.shape[0], w_out.shape
    dpre, weighted = pre.new_empty(pre.shape), pre.new_empty((num_rows, hidden))
    drow_weight = row_weight.new_empty(num_rows)
    if num_rows == 0:
        return dpre, weighted, drow_weight

    def run(tiles):
        nonlocal drow_weight
        column_tiles = max(triton.cdiv(hidden, tiles.n), 1)  # if hidden is 0, the kernel still computes <b_out, dy>
        partial = row_weight.new_empty((num_rows, column_tiles))
        launch(
            _expert_mlp_bwd_hidden, (row_tiles(num_rows, num_experts, tiles) * column_tiles,),
            row_token_ptr=expert_offsets if row_token is None else row_token, row_weight_ptr=row_weight,
            bias_ptr=expert_offsets if b_out is None else b_out, expert_offsets_ptr=expert_offsets, pre_ptr=pre,
            dpre_ptr=dpre, weighted_ptr=weighted, partial_ptr=partial, R=num_rows, BIAS=b_out is not None,
            **operands(grad, w_out.transpose(1, 2), hidden, row_token is not None, tiles), **activation_of(activation),
        )  # fmt: skip
        drow_weight = sum_tiles(partial, 1)

    run_with_tiles("hidden", grad, w_out, num_rows, num_experts, hidden, run, training=True)
    return dpre, weighted, drow_weight


@on_device
def activation_bwd(grad: Tensor, pre: Tensor, activation: str) -> Tensor:
    dpre = pre.new_empty(pre.shape)
    num_rows, columns = grad.shape
    if grad.numel():
        block = min(triton.next_power_of_2(columns), TILE)
        block_m = TILE // block
        (stride_grad, stride_pre, units_n), units = in_units(grad, grad.stride(0), pre.stride(0), columns)
        launch(
            _activation_bwd, (triton.cdiv(num_rows, block_m), triton.cdiv(columns, block)),
            grad, pre, dpre, stride_grad, stride_pre, num_rows, units_n, **units, **activation_of(activation),
            BLOCK_M=block_m, BLOCK_N=block,
        )  # fmt: skip
    return dpre


@on_device
def grouped_gemm_sum_rows(rows: Tensor, row_token: Tensor, num_tokens: int) -> Tensor:
    """(R, D) -> (T, D): the sum of each token's rows."""
    dim = rows.shape[1]
    out = rows.new_empty((num_tokens, dim))
    if rows.numel() == 0:
        return out.zero_()
    if out.numel():
        token_offsets, by_token = rows_by_token(row_token, num_tokens)
        shape = tile(dim)
        grid = (triton.cdiv(num_tokens, shape["BLOCK_T"]), triton.cdiv(dim, shape["BLOCK_D"]))
        (stride, units_d), units = in_units(rows, rows.stride(0), dim)
        launch(
            _token_sums, grid, rows, by_token, token_offsets, out, stride, num_tokens, units_d, **units, **shape,
        )  # fmt: skip
    return out
