"""Tiles and vectors of a matrix, for the kernels that scale exp(scores / tau): _sinkhorn_scaled.py.

A program has one matrix. A tile of ROWS rows is (FOLD, ROWS, N / FOLD), a vector of columns (FOLD, N / FOLD). With FOLD
= 8 Triton gives a thread many elements of the same row, and a sum of a row needs few shuffles. With FOLD = 1, where a
thread has rows and columns of the matrix, both sums need as many.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

SMALLEST = tl.constexpr(1e-20)  # 1 / tau of matrices that are scaled is between this and its inverse: see to_double
LOG2_E, LN_2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2))
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no inline assembly


@triton.jit
def columns_of_tile(N: tl.constexpr):
    """The column of each element of a vector of columns, (FOLD, N / FOLD)."""
    FOLD: tl.constexpr = 1 if N <= 64 else 8
    return tl.arange(0, FOLD)[:, None] * (N // FOLD) + tl.arange(0, N // FOLD)[None, :]


@triton.jit
def full_vector(value, dtype: tl.constexpr, N: tl.constexpr):
    FOLD: tl.constexpr = 1 if N <= 64 else 8
    return tl.full((FOLD, N // FOLD), value, dtype=dtype)


@triton.jit
def full_tile(value, dtype: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr):
    FOLD: tl.constexpr = 1 if N <= 64 else 8
    return tl.full((FOLD, ROWS, N // FOLD), value, dtype=dtype)


@triton.jit
def tile(ptr, stride_B, stride_I, first, n, ROWS: tl.constexpr, N: tl.constexpr):
    """Pointers to ROWS rows of the program's matrix, (FOLD, ROWS, N / FOLD), and their mask."""
    i = (first + tl.arange(0, ROWS))[None, :, None]
    j = columns_of_tile(N)[:, None, :]
    start = ptr + tl.program_id(0).to(tl.int64) * stride_B
    return start + (i.to(tl.int64) * stride_I + j), (i < n) & (j < n)


@triton.jit
def scratch_tile(ptr, first, n, ROWS: tl.constexpr, N: tl.constexpr):
    """`tile` of a matrix that is contiguous and has fewer than 2^31 elements."""
    i = (first + tl.arange(0, ROWS))[None, :, None]
    j = columns_of_tile(N)[:, None, :]
    return ptr + tl.program_id(0).to(tl.int64) * n * n + (i * n + j), (i < n) & (j < n)


@triton.jit
def read_tile(ptr, stride_B, stride_I, first, n, ROWS: tl.constexpr, N: tl.constexpr, other):
    ptrs, inside = tile(ptr, stride_B, stride_I, first, n, ROWS, N)
    return tl.load(ptrs, mask=inside, other=other).to(tl.float32)


@triton.jit
def write_tile(ptr, x, first, n, ROWS: tl.constexpr, N: tl.constexpr):
    ptrs, inside = scratch_tile(ptr, first, n, ROWS, N)
    tl.store(ptrs, x.to(tl.float32).to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def rows_of(ptr, first, n, ROWS: tl.constexpr):
    """Pointers (ROWS) to the program's vector in ptr (B, n), from element `first` on, and their mask."""
    i = first + tl.arange(0, ROWS)
    return ptr + tl.program_id(0).to(tl.int64) * n + i, i < n


@triton.jit
def columns_of(ptr, n, N: tl.constexpr):
    """Pointers (FOLD, N / FOLD) to the program's vector in ptr (B, n), and their mask."""
    j = columns_of_tile(N)
    return ptr + tl.program_id(0).to(tl.int64) * n + j, j < n


@triton.jit
def of_iteration(history_ptr, t, which, B, n):
    """history_ptr[t, which]: u (0) or v (1) of all matrices, (B, n)."""
    return history_ptr + (tl.cast(t, tl.int64) * 2 + which) * B * n


@triton.jit
def sum_rows(x):
    """The sum of each row of a tile, (ROWS)."""
    return tl.sum(tl.sum(x, axis=0), axis=1)


@triton.jit
def largest_of_rows(x):
    return tl.max(tl.max(x, axis=0), axis=1)


@triton.jit
def sum_columns(x):
    """The sum of a vector of columns."""
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def largest_column(x):
    return tl.max(tl.max(x, axis=1), axis=0)


@triton.jit
def limit_for(inv_tau, limit):
    """`limit` of the range of a row of scores / tau; 0 for 1 / tau that is too small or large for float32."""
    return tl.where((inv_tau > SMALLEST) & (inv_tau < 1.0 / SMALLEST), limit, 0.0)


@triton.jit
def begin(scores_ptr, stride_B, stride_I, taus_ptr, slow_ptr, n, limit, ROWS: tl.constexpr, N: tl.constexpr):
    """(the largest range of a row of scores / tau, whether that is below `limit` and the matrix is scaled, whether it
    holds NaN or +inf, 1 / tau). Writes the matrix's flag."""
    span = tl.zeros((ROWS,), dtype=tl.float32)
    bad = tl.zeros((ROWS,), dtype=tl.int32)
    for first in range(0, n, ROWS):
        s = read_tile(scores_ptr, stride_B, stride_I, first, n, ROWS, N, -float("inf"))
        bad = tl.maximum(bad, largest_of_rows((s < float("inf")).to(tl.int32) ^ 1))
        negated_low = largest_of_rows(tl.where((columns_of_tile(N) < n)[:, None, :], -s, -float("inf")))
        # A row with -inf has an infinite range. A row of -inf alone would give NaN, which the maximum would ignore.
        row = tl.where(negated_low < float("inf"), largest_of_rows(s) + negated_low, float("inf"))
        span = tl.maximum(span, tl.where(first + tl.arange(0, ROWS) < n, row, 0.0))
    broken = tl.max(bad, axis=0) > 0
    inv_tau = 1.0 / tl.load(taus_ptr)
    largest = tl.max(span, axis=0).to(tl.float64) * inv_tau
    scaled = (largest < limit_for(inv_tau, limit)) & (broken == 0)
    tl.store(slow_ptr + tl.program_id(0), (scaled | broken).to(tl.int32) ^ 1)
    return largest, scaled, broken, inv_tau


@triton.jit
def fill_with_nan(ptr, n, ROWS: tl.constexpr, N: tl.constexpr):
    for first in range(0, n, ROWS):
        write_tile(ptr, full_tile(float("nan"), tl.float32, ROWS, N), first, n, ROWS, N)


@triton.jit
def anchors(s):
    """The largest score of each row, or 0 for -inf: padding rows hold only -inf."""
    largest = largest_of_rows(s)
    return tl.where(largest > -float("inf"), largest, 0.0)


@triton.jit
def log_k(scores_ptr, stride_B, stride_I, first, n, inv_tau, ROWS: tl.constexpr, N: tl.constexpr):
    """log(k) of ROWS rows, in float64."""
    s = read_tile(scores_ptr, stride_B, stride_I, first, n, ROWS, N, -float("inf"))
    largest = anchors(s)
    return (to_double(s) - largest.to(tl.float64)[None, :, None]) * inv_tau


@triton.jit
def exponential(below, inv_tau):
    """exp(below / tau) in float32 for float32 <= 0, with one conversion, of 1 / tau: many GPUs do 1 / 64 as much of
    float64. log2(e) / tau is high + low, and `rest` is what x lacks."""
    scale = inv_tau * LOG2_E
    high = scale.to(tl.float32)
    low = (scale - high.to(tl.float64)).to(tl.float32)
    x = below * high
    rest = tl.maximum(tl.fma(below, low, tl.fma(below, high, -x)) * LN_2, -1.0)  # NaN if x is -inf: then -1
    y = tl.exp2(x)
    return tl.fma(y, rest, y)


@triton.jit
def k_in_float32(scores_ptr, stride_B, stride_I, first, n, inv_tau, ROWS: tl.constexpr, N: tl.constexpr):
    """k of ROWS rows, in float32."""
    s = read_tile(scores_ptr, stride_B, stride_I, first, n, ROWS, N, -float("inf"))
    largest = anchors(s)
    return exponential(s - largest[None, :, None], inv_tau)


@triton.jit
def v_before(history_ptr, t, B, n, N: tl.constexpr):
    """v before iteration t; 1 before the first iteration."""
    ptrs, inside = columns_of(of_iteration(history_ptr, tl.maximum(t - 1, 0), 1, B, n), n, N)
    later = inside & (t + tl.zeros(inside.shape, dtype=tl.int32) > 0)
    return tl.load(ptrs, mask=later, other=1.0)


@triton.jit
def bits_of(x):
    """x (float64) as int64: for x >= 0, numbers of units of the last place."""
    return x.to(tl.int64, bitcast=True)


@triton.jit
def is_positive(x):
    """Whether x > 0 and normal, for x >= 0; float64 in integer instructions, as its pipe is slow in many GPUs."""
    return bits_of(x) >= 2**52 if x.dtype == tl.float64 else x > 0


@triton.jit
def to_double(x):
    """x (float32) as float64, in integer instructions: a conversion takes as long as two additions of float64. Some
    2^-127 if x is subnormal or zero."""
    bits = x.to(tl.int32, bitcast=True).to(tl.int64) << 29  # sign extended: bits 60 to 63 are the sign
    return ((bits & -0x7000000000000001) + (896 << 52)).to(tl.float64, bitcast=True)


@triton.jit
def inverse_of(total):
    """1 / total, or 0 for 0; in float64 for normal numbers, with an error of about a unit in the last place."""
    some = is_positive(total)
    safe = tl.where(some, total, 1.0)
    if COMPILED and total.dtype == tl.float64:
        # The estimate y has a relative error of some 2^-20, so y (1 + e + e^2), e = 1 - total y, has one of some 2^-60.
        # This takes 3 instructions of float64, a division 10.
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f64 $0, $1;", "=d,d", [safe], dtype=tl.float64, is_pure=True, pack=1
        )
        error = tl.fma(-safe, y, 1.0)
        y = tl.fma(y, tl.fma(error, error, error), y)
    else:
        y = 1.0 / safe
    return tl.where(some, y, 0.0)
