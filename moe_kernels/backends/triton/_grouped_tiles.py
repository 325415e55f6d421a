"""Functions that kernels of the grouped GEMM share: the expert of a program's tile, the loop over k, activations.

A launch lists the row tiles that have rows: those of expert 0, of expert 1, and so on, BLOCK_M rows each but for an
expert's last. Each program finds its tile by a prefix sum, so the host need not wait for the offsets. Rows from
expert_offsets[E] on, which no expert uses, count as rows of one more expert, E. R rows of E + 1 experts fill at most
min(R, R // BLOCK_M + E) + 1 tiles (`row_tiles`).

In shapes K is the width of x, N that of the product.
"""

from __future__ import annotations

import triton
import triton.language as tl

SLICE = tl.constexpr(32)  # most columns of a tile in one pass of an epilogue (_finish, _finish_hidden)
GROUP = tl.constexpr(8)  # row tiles that programs take before the next column tile, so that rows and weights stay in L2


@triton.jit
def scaled(size, which: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr):
    """The size that a launch passed in units of UNIT elements, or in elements if its bit of WHOLE is 0 (`in_units`)."""
    return size * UNIT if WHOLE >> which & 1 else size


@triton.jit
def find_tile(
    tile,
    expert_offsets_ptr,  # (E + 1)
    E,
    R,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,  # more than E; 0 if E is too large to load all offsets at once
):
    """(expert of a row tile, first row of the tile, end of the expert's rows). The tile has no rows if first >= end."""
    if BLOCK_E > 0:
        e = tl.arange(0, BLOCK_E)
        # Offsets of a stale plan are kept inside the R rows, which kernels write.
        begin = tl.maximum(tl.load(expert_offsets_ptr + e, mask=e <= E, other=0), 0)
        end = tl.minimum(tl.load(expert_offsets_ptr + e + 1, mask=e < E, other=R), R)
        tiles = tl.where(e <= E, tl.maximum(end - begin + BLOCK_M - 1, 0) // BLOCK_M, 0)
        expert = tl.minimum(tl.sum(((tl.cumsum(tiles, 0) <= tile) & (e <= E)).to(tl.int32), axis=0), E)
        first = tile - tl.sum(tl.where(e < expert, tiles, 0), axis=0)
        begin = tl.sum(tl.where(e == expert, begin, 0), axis=0) + first * BLOCK_M
        return expert, begin, tl.sum(tl.where(e == expert, end, 0), axis=0)
    # Too many experts to load at once: expert e has its first tile at expert_offsets[e] // BLOCK_M + e, and at most
    # one tile without rows, so that a search finds it.
    expert = tile * 0
    above = expert + E + 1
    while above - expert > 1:
        middle = (expert + above) // 2
        reached = tl.load(expert_offsets_ptr + middle) // BLOCK_M + middle <= tile
        expert = tl.where(reached, middle, expert)
        above = tl.where(reached, above, middle)
    begin = tl.maximum(tl.load(expert_offsets_ptr + expert), 0)
    end = tl.minimum(tl.load(expert_offsets_ptr + expert + 1, mask=expert < E, other=R), R)
    return expert, begin + (tile - begin // BLOCK_M - expert) * BLOCK_M, end


@triton.jit
def by_size(
    place,
    expert_offsets_ptr,  # (E + 1)
    E,
    SORTED: tl.constexpr,  # a power of two, at least E; 0: not sorted
):
    """The expert at this place in the order of descending numbers of rows, of equal ones the lower first; `place` if
    not sorted. Programs of experts with many rows then start first, and none is left over at the end."""
    if SORTED == 0:
        return place
    e = tl.arange(0, SORTED)
    rows = tl.load(expert_offsets_ptr + e + 1, mask=e < E, other=-1) - tl.load(
        expert_offsets_ptr + e, mask=e < E, other=0
    )
    before = (rows[None, :] > rows[:, None]) | ((rows[None, :] == rows[:, None]) & (e[None, :] < e[:, None]))
    rank = tl.sum(before.to(tl.int32), axis=1)
    return tl.sum(tl.where(rank == place, e, 0), axis=0)


@triton.jit
def raster(column_tiles, programs, first):
    """Row tile and column tile of this program, one of `programs` from id `first` on. In order of id, programs take
    GROUP row tiles of the first column tile, the same row tiles of each other column tile, then the next GROUP."""
    group = (tl.program_id(0) - first) // (GROUP * column_tiles)
    group_rows = tl.minimum(programs // column_tiles - group * GROUP, GROUP)
    index = (tl.program_id(0) - first) - group * GROUP * column_tiles
    return group * GROUP + index % group_rows, index // group_rows


@triton.jit
def tile_rows(first, end, row_token_ptr, GATHER: tl.constexpr, BLOCK_M: tl.constexpr):
    """(valid, token), (BLOCK_M) each: whether the tile has the row, and the row of x to read (int64, -1 for none)."""
    row = tl.arange(0, BLOCK_M)
    valid = row < end - first
    if GATHER:
        token = tl.load(row_token_ptr + (first + row), mask=valid, other=-1).to(tl.int64)
    else:
        token = tl.where(valid, first.to(tl.int64) + row, -1)
    return valid, token


@triton.jit
def multiply_tile(
    x,  # (T or R, K), or its descriptor
    w,  # (E, K, N), or its descriptor; (E, N, K) if TRANSPOSED
    token,  # (BLOCK_M): rows of x
    first, expert, column,
    linear_column,  # if GATED: `column` of the linear part
    depth,  # K, or 0 for a result of zeros
    N, stride_x, stride_w_E,
    stride_w,  # stride of K, or of N if TRANSPOSED
    GATED: tl.constexpr, TRANSPOSED: tl.constexpr, X_TMA: tl.constexpr, W_TMA: tl.constexpr, WIDEN: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(total, linear): float32 tiles of x w_e at `column` and, if GATED, at linear_column; else `linear` is zeros.

    w_e: the weight of the expert. A gathered x has no descriptor: before sm_100 a bulk copy takes consecutive rows.
    """
    k = tl.arange(0, BLOCK_K)
    n = column + tl.arange(0, BLOCK_N)
    if not X_TMA:
        x += token[:, None] * stride_x + k[None, :]
    if not W_TMA:
        w += expert.to(tl.int64) * stride_w_E
        if TRANSPOSED:
            w += n[None, :].to(tl.int64) * stride_w + k[:, None]
        else:
            w += k[:, None].to(tl.int64) * stride_w + n[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    linear = total
    for start in range(0, depth, BLOCK_K):
        inside = start + k < depth
        if X_TMA:
            a = x.load([first, start])
        else:
            a = tl.load(x, mask=(token >= 0)[:, None] & inside[None, :], other=0.0)
            x += BLOCK_K
        if WIDEN:
            a = a.to(tl.float32)
        b = _weights(w, expert, start, column, inside, n < N, TRANSPOSED, W_TMA, WIDEN, BLOCK_N, BLOCK_K)
        total = product(a, b, total, PRECISION)
        if GATED:
            second = w if W_TMA else w + (linear_column - column).to(tl.int64) * (stride_w if TRANSPOSED else 1)
            b = _weights(
                second, expert, start, linear_column, inside, n < N, TRANSPOSED, W_TMA, WIDEN, BLOCK_N, BLOCK_K
            )
            linear = product(a, b, linear, PRECISION)
        if not W_TMA:
            w += BLOCK_K if TRANSPOSED else BLOCK_K * stride_w
    return total, linear


@triton.jit
def _weights(
    w, expert, start, column, k_inside, n_inside,
    TRANSPOSED: tl.constexpr, W_TMA: tl.constexpr, WIDEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A block (BLOCK_K, BLOCK_N) of an expert's weight."""
    if W_TMA and TRANSPOSED:
        b = w.load([expert, column, start]).reshape(BLOCK_N, BLOCK_K).T
    elif W_TMA:
        b = w.load([expert, start, column]).reshape(BLOCK_K, BLOCK_N)
    else:
        b = tl.load(w, mask=k_inside[:, None] & n_inside[None, :], other=0.0)
    if WIDEN:
        b = b.to(tl.float32)
    return b


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """total + a b for tiles a (M, K) and b (K, N).

    PRECISION "three": float32 by three TF32 products. a = a1 + a2 + r with a1 and a2 of 11 bits, so |r| <= 2^-23 |a|;
    a1 b1 + a1 b2 + a2 b1 lacks about 2^-22 |a b|, which from 16 terms on costs less than the rounding of their sum.
    Tensor cores round sums towards zero: each step is summed apart, and added to `total` with rounding to nearest.
    """
    if PRECISION == "three":
        a1, a2, a_finite = _split(a)
        b1, b2, b_finite = _split(b)
        part = tl.dot(a2, b_finite, input_precision="tf32")
        part = tl.dot(a_finite, b2, part, input_precision="tf32")
        part = tl.dot(a1, b1, part, input_precision="tf32")
        total += part
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def _split(x):
    """(high, low, high or 0): float32 x as high, x rounded to 11 bits, and the rest, which the tensor core truncates to
    11 bits; (x, 0, 0) if x is infinite, since products of inf with low parts would be NaN. A number above 3.4019e38
    counts as infinite. The low part of a NaN is NaN. Below 2^-115 low parts are denormal and have fewer bits."""
    high = ((x.to(tl.int32, bitcast=True) + 0x1000) & -8192).to(tl.float32, bitcast=True)
    infinite = tl.abs(high) == float("inf")
    return high, tl.where(infinite, 0.0, x - high), tl.where(infinite, 0.0, high)


@triton.jit
def split_columns(x):
    """The left and the right half of a tile's columns."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of float32 x: "relu", "gelu" (the form with erf), "silu", "tanh", or x itself for ""."""
    if ACTIVATION == "relu":
        y = tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == "gelu":
        share, _ = _normal(x)
        y = x * share
    elif ACTIVATION == "silu":
        share, _ = _sigmoid(x)
        y = x * share
    elif ACTIVATION == "tanh":
        y = _tanh(x)
    else:
        y = x
    return y


@triton.jit
def activate_with_slope(x, ACTIVATION: tl.constexpr):
    """The activation of float32 x and its derivative, which is 0 for relu at 0."""
    if ACTIVATION == "relu":
        y = tl.where(x < 0.0, 0.0, x)
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    elif ACTIVATION == "gelu":
        share, density = _normal(x)
        y = x * share
        slope = tl.fma(x, density, share)
    elif ACTIVATION == "silu":
        share, rest = _sigmoid(x)
        y = x * share
        slope = share * tl.fma(x, rest, 1.0)
    elif ACTIVATION == "tanh":
        y = _tanh(x)
        slope = tl.fma(-y, y, 1.0)
    else:
        y = x
        slope = tl.full(x.shape, 1.0, tl.float32)
    return y, slope


@triton.jit
def _normal(x):
    """The standard normal distribution function at x, and its density.

    For x <= 0 the function is e^(-x^2 / 2) P(t) with t = 1 / (1 + 0.29 |x|) and a polynomial P of degree 8. In exact
    arithmetic its relative error is at most 8e-8 for -13 <= x <= 0, where 1 + erf(x / sqrt(2)) would lose digits.
    """
    t = _reciprocal(tl.fma(tl.abs(x), 0.29, 1.0))
    p = tl.fma(t, 0.0391919046, -0.192664613)
    p = tl.fma(p, t, 0.306926813)
    p = tl.fma(p, t, -0.153627184)
    p = tl.fma(p, t, 0.188577959)
    p = tl.fma(p, t, 0.0749879413)
    p = tl.fma(p, t, 0.121498381)
    p = tl.fma(p, t, 0.115081028)
    p = tl.fma(p, t, 2.77463863e-5)
    bell = tl.exp2(-0.7213475204444817 * x * x)  # log2(e) / 2
    tail = p * bell
    return tl.where(x < 0.0, tail, tl.fma(-p, bell, 1.0)), 0.3989422804014327 * bell


@triton.jit
def _sigmoid(x):
    """The sigmoid of x and of -x, without cancellation."""
    power = tl.exp2(-1.4426950408889634 * tl.abs(x))
    more = _reciprocal(1.0 + power)
    less = power * more
    return tl.where(x < 0.0, less, more), tl.where(x < 0.0, more, less)


@triton.jit
def _reciprocal(x):
    """1 / x for x >= 1, with a relative error of up to about 3e-7."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def _tanh(x):
    """tanh by exp; for |x| < 1/4, where digits would cancel, by a series. Its truncation error is below 2.2e-9."""
    square = x * x
    series = tl.fma(square, 0.021869488536155203, -0.05396825396825397)
    series = tl.fma(tl.fma(series, square, 0.13333333333333333), square, -0.3333333333333333)
    return tl.where(square < 0.0625, tl.fma(x * square, series, x), 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))
