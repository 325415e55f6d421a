"""Sinkhorn's iteration on k = exp((scores - row maximum) / tau), scaled by vectors as in _sinkhorn_scaled.py, for
n > 64. A program has one matrix, keeps k in scratch memory and reads it in every iteration, ROWS rows at a time.

A tile of ROWS rows is (8, ROWS, N / 8), a vector of columns (8, N / 8). Triton then gives a thread many elements of the
same row, and a sum of a row needs few shuffles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.backends.triton._sinkhorn_scaled import (
    FLOAT_RANGE,
    LAST_BIT,
    NEGLIGIBLE,
    SMALL_CHANGE,
    SMALL_SHARE,
    inverse_of,
)

@triton.jit
def _columns(N: tl.constexpr):
    """The column of each element of a vector of columns, (8, N / 8)."""
    return tl.arange(0, 8)[:, None] * (N // 8) + tl.arange(0, N // 8)[None, :]


@triton.jit
def _tile(ptr, stride_B, stride_I, first, n, ROWS: tl.constexpr, N: tl.constexpr):
    """Pointers to ROWS rows of the program's matrix, (8, ROWS, N / 8), and their mask."""
    i = (first + tl.arange(0, ROWS))[None, :, None]
    j = _columns(N)[:, None, :]
    start = ptr + tl.program_id(0).to(tl.int64) * stride_B
    return start + (i.to(tl.int64) * stride_I + j), (i < n) & (j < n)


@triton.jit
def _scratch(ptr, first, n, ROWS: tl.constexpr, N: tl.constexpr):
    """_tile of a matrix that is contiguous and has fewer than 2^31 elements."""
    i = (first + tl.arange(0, ROWS))[None, :, None]
    j = _columns(N)[:, None, :]
    return ptr + tl.program_id(0).to(tl.int64) * n * n + (i * n + j), (i < n) & (j < n)


@triton.jit
def _read(ptr, stride_B, stride_I, first, n, ROWS: tl.constexpr, N: tl.constexpr, other):
    ptrs, inside = _tile(ptr, stride_B, stride_I, first, n, ROWS, N)
    return tl.load(ptrs, mask=inside, other=other).to(tl.float32)


@triton.jit
def _write(ptr, x, first, n, ROWS: tl.constexpr, N: tl.constexpr):
    ptrs, inside = _scratch(ptr, first, n, ROWS, N)
    tl.store(ptrs, x.to(tl.float32).to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rows_of(ptr, first, n, ROWS: tl.constexpr):
    """Pointers (ROWS) to the program's vector in ptr (B, n), from element `first` on, and their mask."""
    i = first + tl.arange(0, ROWS)
    return ptr + tl.program_id(0).to(tl.int64) * n + i, i < n


@triton.jit
def _columns_of(ptr, n, N: tl.constexpr):
    """Pointers (8, N / 8) to the program's vector in ptr (B, n), and their mask."""
    j = _columns(N)
    return ptr + tl.program_id(0).to(tl.int64) * n + j, j < n


@triton.jit
def _of_iteration(history_ptr, t, which, B, n):
    """history_ptr[t, which]: u (0) or v (1) of all matrices, (B, n)."""
    return history_ptr + (tl.cast(t, tl.int64) * 2 + which) * B * n


@triton.jit
def _sum_rows(x):
    return tl.sum(tl.sum(x, axis=0), axis=1)


@triton.jit
def _largest_of_rows(x):
    return tl.max(tl.max(x, axis=0), axis=1)


@triton.jit
def _of_columns(x):
    """The sum (1) or largest element (1) of a vector of columns."""
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def _largest(x):
    return tl.max(tl.max(x, axis=1), axis=0)


@triton.jit
def _begin(scores_ptr, stride_B, stride_I, taus_ptr, slow_ptr, n, ROWS: tl.constexpr, N: tl.constexpr):
    """(whether the matrix is scaled, whether it holds NaN or +inf). Writes the matrix's flag."""
    span = tl.zeros((ROWS,), dtype=tl.float32)
    bad = tl.zeros((ROWS,), dtype=tl.int32)
    for first in range(0, n, ROWS):
        s = _read(scores_ptr, stride_B, stride_I, first, n, ROWS, N, -float("inf"))
        bad = tl.maximum(bad, _largest_of_rows((s < float("inf")).to(tl.int32) ^ 1))
        negated_low = _largest_of_rows(tl.where((_columns(N) < n)[:, None, :], -s, -float("inf")))
        # A row with -inf has an infinite range. A row of -inf alone would give NaN, which the maximum would ignore.
        row = tl.where(negated_low < float("inf"), _largest_of_rows(s) + negated_low, float("inf"))
        span = tl.maximum(span, tl.where(first + tl.arange(0, ROWS) < n, row, 0.0))
    broken = tl.max(bad, axis=0) > 0
    scaled = (tl.max(span, axis=0).to(tl.float64) / tl.load(taus_ptr) < FLOAT_RANGE) & (broken == 0)
    tl.store(slow_ptr + tl.program_id(0), (scaled | broken).to(tl.int32) ^ 1)
    return scaled, broken


@triton.jit
def _fill_with_nan(ptr, n, ROWS: tl.constexpr, N: tl.constexpr):
    for first in range(0, n, ROWS):
        _write(ptr, tl.full((8, ROWS, N // 8), float("nan"), dtype=tl.float32), first, n, ROWS, N)


@triton.jit
def _log_k(scores_ptr, stride_B, stride_I, first, n, inv_tau, ROWS: tl.constexpr, N: tl.constexpr):
    """log(k) of ROWS rows, in float64."""
    s = _read(scores_ptr, stride_B, stride_I, first, n, ROWS, N, -float("inf"))
    largest = _largest_of_rows(s).to(tl.float64)
    largest = tl.where(largest > -float("inf"), largest, 0.0)  # padding rows hold only -inf
    return (s.to(tl.float64) - largest[None, :, None]) * inv_tau


@triton.jit(do_not_specialize=["iterations"])
def scaled_streamed_fwd(
    scores_ptr,  # (B, n, n)
    taus_ptr,  # (iterations), all equal
    p_ptr,  # (B, n, n) contiguous
    slow_ptr,  # (B) int32, receives 1 if a matrix needs logarithms (its p is not written), else 0
    k_ptr,  # (B, n, n) float32 scratch memory
    u_ptr,  # (B, n) float32 scratch memory
    stride_scores_B, stride_scores_I, n, iterations,
    ROWS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    scaled, broken = _begin(scores_ptr, stride_scores_B, stride_scores_I, taus_ptr, slow_ptr, n, ROWS, N)
    if broken:
        _fill_with_nan(p_ptr, n, ROWS, N)
    if scaled:
        inv_tau = 1.0 / tl.load(taus_ptr)
        for first in range(0, n, ROWS):
            x = _log_k(scores_ptr, stride_scores_B, stride_scores_I, first, n, inv_tau, ROWS, N)
            _write(k_ptr, tl.exp(x.to(tl.float32)), first, n, ROWS, N)
        v = tl.full((8, N // 8), 1.0, dtype=tl.float32)
        t = 0
        while t < iterations:
            tl.debug_barrier()  # threads read k that other threads have stored
            columns = tl.zeros((8, ROWS, N // 8), dtype=tl.float32)
            for first in range(0, n, ROWS):
                ptrs, inside = _scratch(k_ptr, first, n, ROWS, N)
                k = tl.load(ptrs, mask=inside, other=0.0)
                u = inverse_of(_sum_rows(k * v[:, None, :]))
                columns = tl.fma(k, u[None, :, None], columns)
                u_ptrs, i_inside = _rows_of(u_ptr, first, n, ROWS)
                tl.store(u_ptrs, u, mask=i_inside)
            before = v
            v = inverse_of(tl.sum(columns, axis=1))
            t = tl.where(_largest((v != before).to(tl.int32)) > 0, t + 1, iterations)
        tl.debug_barrier()  # threads read u that other threads have stored
        for first in range(0, n, ROWS):
            ptrs, inside = _scratch(k_ptr, first, n, ROWS, N)
            k = tl.load(ptrs, mask=inside, other=0.0)
            u_ptrs, i_inside = _rows_of(u_ptr, first, n, ROWS)
            u = tl.load(u_ptrs, mask=i_inside, other=0.0)
            _write(p_ptr, k * u[None, :, None] * v[:, None, :], first, n, ROWS, N)


@triton.jit
def _solve(history_ptr, k_ptr, short_ptr, B, n, iterations, ROWS: tl.constexpr, N: tl.constexpr):
    """Writes u and v of all iterations that change them. Returns the last of these and its v."""
    v = tl.full((8, N // 8), 1.0, dtype=tl.float64)
    change = tl.full((8, N // 8), 1.0, dtype=tl.float32)
    t = 0
    while (t < iterations) & (_largest(tl.abs(change)) > SMALL_CHANGE):
        tl.debug_barrier()  # threads read k that other threads have stored
        columns = tl.zeros((8, ROWS, N // 8), dtype=tl.float64)
        for first in range(0, n, ROWS):
            ptrs, inside = _scratch(k_ptr, first, n, ROWS, N)
            k = tl.load(ptrs, mask=inside, other=0.0)
            u = inverse_of(_sum_rows(k * v[:, None, :]))
            columns = tl.fma(k, u[None, :, None], columns)
            u_ptrs, i_inside = _rows_of(_of_iteration(history_ptr, t, 0, B, n), first, n, ROWS)
            tl.store(u_ptrs, u, mask=i_inside)
        total = tl.sum(columns, axis=1)
        change = tl.where(total > 0, 1.0 - v * total, 0.0).to(tl.float32)
        v = inverse_of(total)
        v_ptrs, j_inside = _columns_of(_of_iteration(history_ptr, t, 1, B, n), n, N)
        tl.store(v_ptrs, v, mask=j_inside)
        t += 1
    while (t < iterations) & (_largest(tl.abs(change)) > LAST_BIT):
        tl.debug_barrier()  # threads read u that other threads have stored
        y = v.to(tl.float32) * change
        short_columns = tl.zeros((8, ROWS, N // 8), dtype=tl.float32)
        for first in range(0, n, ROWS):
            ptrs, inside = _scratch(short_ptr, first, n, ROWS, N)
            short_k = tl.load(ptrs, mask=inside, other=0.0)
            u_ptrs, i_inside = _rows_of(_of_iteration(history_ptr, t - 1, 0, B, n), first, n, ROWS)
            u = tl.load(u_ptrs, mask=i_inside, other=0.0)
            short_u = u.to(tl.float32)
            row_change = -short_u * _sum_rows(short_k * y[:, None, :])
            tl.store(u_ptrs + 2 * B * n, tl.fma(u, row_change.to(tl.float64), u), mask=i_inside)
            short_columns = tl.fma(short_k, (short_u * row_change)[None, :, None], short_columns)
        change = -v.to(tl.float32) * tl.sum(short_columns, axis=1)
        v = tl.fma(v, change.to(tl.float64), v)
        v_ptrs, j_inside = _columns_of(_of_iteration(history_ptr, t, 1, B, n), n, N)
        tl.store(v_ptrs, v, mask=j_inside)
        t += 1
    return t - 1, v


@triton.jit
def _v_before(history_ptr, t, last, B, n, N: tl.constexpr):
    """v before iteration t, where later iterations than `last` have the same v; 1 before the first iteration."""
    before = tl.maximum(tl.minimum(t - 1, last), 0)
    ptrs, inside = _columns_of(_of_iteration(history_ptr, before, 1, B, n), n, N)
    later = inside & (t + tl.zeros(inside.shape, dtype=tl.int32) > 0)
    return tl.load(ptrs, mask=later, other=1.0)


@triton.jit(do_not_specialize=["iterations"])
def scaled_streamed_bwd(
    grad_ptr,  # (B, n, n)
    stride_grad_B, stride_grad_I,
    dscores_ptr,  # (B, n, n) contiguous
    scores_ptr,  # (B, n, n)
    taus_ptr,  # (iterations), all equal
    history_ptr,  # (iterations, 2, B, n), receives u and v
    slow_ptr,  # (B) int32, receives 1 if a matrix needs logarithms (its dscores is not written), else 0
    k_ptr,  # (B, n, n) float64 scratch memory
    h_ptr,  # (B, n, n) float64 scratch memory: sums of the iterations in float64, dscores = k * h / tau
    short_k_ptr,  # (B, n, n) float32 scratch memory: k
    short_h_ptr,  # (B, n, n) float32 scratch memory: sums of the iterations in float32, divided by sum |P * dP|
    stride_scores_B, stride_scores_I, B, n, iterations,
    ROWS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    scaled, broken = _begin(scores_ptr, stride_scores_B, stride_scores_I, taus_ptr, slow_ptr, n, ROWS, N)
    if broken:
        _fill_with_nan(dscores_ptr, n, ROWS, N)
    if scaled:
        inv_tau = 1.0 / tl.load(taus_ptr)
        for first in range(0, n, ROWS):
            k = tl.exp(_log_k(scores_ptr, stride_scores_B, stride_scores_I, first, n, inv_tau, ROWS, N))
            ptrs, inside = _scratch(k_ptr, first, n, ROWS, N)
            tl.store(ptrs, k, mask=inside)
            _write(short_k_ptr, k, first, n, ROWS, N)
        last, v = _solve(history_ptr, k_ptr, short_k_ptr, B, n, iterations, ROWS, N)
        tl.debug_barrier()  # threads read u that other threads have stored
        columns = tl.zeros((8, ROWS, N // 8), dtype=tl.float64)
        sizes = tl.zeros((8, ROWS, N // 8), dtype=tl.float64)
        for first in range(0, n, ROWS):
            ptrs, inside = _scratch(k_ptr, first, n, ROWS, N)
            k = tl.load(ptrs, mask=inside, other=0.0)
            u_ptrs, i_inside = _rows_of(_of_iteration(history_ptr, last, 0, B, n), first, n, ROWS)
            u = tl.load(u_ptrs, mask=i_inside, other=0.0)
            grad = _read(grad_ptr, stride_grad_B, stride_grad_I, first, n, ROWS, N, 0.0).to(tl.float64)
            h = u[None, :, None] * v[:, None, :] * grad
            h_ptrs, _ = _scratch(h_ptr, first, n, ROWS, N)
            tl.store(h_ptrs, h, mask=inside)
            columns = tl.fma(k, h, columns)
            sizes += tl.abs(k * h)
        dg = -tl.sum(columns, axis=1)
        whole = _of_columns(tl.sum(sizes, axis=1))
        left = whole
        t = iterations - 1
        while (t >= 0) & ((left > SMALL_SHARE * whole) | (t == iterations - 1)):  # df is 0 after the last iteration
            tl.debug_barrier()  # threads read h that other threads have stored
            y = dg * v
            v = _v_before(history_ptr, t, last, B, n, N)
            columns = tl.zeros((8, ROWS, N // 8), dtype=tl.float64)
            for first in range(0, n, ROWS):
                ptrs, inside = _scratch(k_ptr, first, n, ROWS, N)
                k = tl.load(ptrs, mask=inside, other=0.0)
                h_ptrs, _ = _scratch(h_ptr, first, n, ROWS, N)
                h = tl.load(h_ptrs, mask=inside, other=0.0)
                u_ptrs, i_inside = _rows_of(
                    _of_iteration(history_ptr, tl.minimum(t, last), 0, B, n), first, n, ROWS
                )
                u = tl.load(u_ptrs, mask=i_inside, other=0.0)
                dx = -u * _sum_rows(k * y[:, None, :])
                if t == iterations - 1:
                    dx -= _sum_rows(k * h)
                dx *= u
                h = tl.fma(u[None, :, None], y[:, None, :], tl.fma(dx[None, :, None], v[:, None, :], h))
                tl.store(h_ptrs, h, mask=inside)
                columns = tl.fma(k, dx[None, :, None], columns)
            dg = -v * tl.sum(columns, axis=1)
            left = _of_columns(tl.abs(dg)) * t
            t -= 1
        short_dg = tl.where(whole > 0, dg / whole, 0.0).to(tl.float32)
        short_v = v.to(tl.float32)
        first_short = t
        while (t >= 0) & (_of_columns(tl.abs(short_dg)) * (t + 1) > NEGLIGIBLE):
            tl.debug_barrier()
            short_y = short_dg * short_v
            short_v = _v_before(history_ptr, t, last, B, n, N).to(tl.float32)
            short_columns = tl.zeros((8, ROWS, N // 8), dtype=tl.float32)
            for first in range(0, n, ROWS):
                ptrs, inside = _scratch(short_k_ptr, first, n, ROWS, N)
                short_k = tl.load(ptrs, mask=inside, other=0.0)
                ptrs, inside = _scratch(short_h_ptr, first, n, ROWS, N)
                short_h = tl.load(ptrs, mask=inside & (t < first_short), other=0.0)
                u_ptrs, i_inside = _rows_of(
                    _of_iteration(history_ptr, tl.minimum(t, last), 0, B, n), first, n, ROWS
                )
                short_u = tl.load(u_ptrs, mask=i_inside, other=0.0).to(tl.float32)
                short_dx = -short_u * (short_u * _sum_rows(short_k * short_y[:, None, :]))
                short_h = tl.fma(short_dx[None, :, None], short_v[:, None, :], short_h)
                short_h = tl.fma(short_u[None, :, None], short_y[:, None, :], short_h)
                tl.store(ptrs, short_h, mask=inside)
                short_columns = tl.fma(short_k, short_dx[None, :, None], short_columns)
            short_dg = -short_v * tl.sum(short_columns, axis=1)
            t -= 1
        tl.debug_barrier()
        for first in range(0, n, ROWS):
            ptrs, inside = _scratch(k_ptr, first, n, ROWS, N)
            k = tl.load(ptrs, mask=inside, other=0.0)
            h_ptrs, _ = _scratch(h_ptr, first, n, ROWS, N)
            h = tl.load(h_ptrs, mask=inside, other=0.0)
            short_ptrs, _ = _scratch(short_h_ptr, first, n, ROWS, N)
            short_h = tl.load(short_ptrs, mask=inside & (t < first_short), other=0.0)
            _write(dscores_ptr, k * tl.fma(short_h.to(tl.float64), whole, h) * inv_tau, first, n, ROWS, N)
