"""The kernels of _sinkhorn_scaled.py for n > 64: a program keeps k in scratch memory and reads it in every iteration,
ROWS rows at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.backends.triton._sinkhorn_scaled import (
    FLOAT_RANGE,
    LAST_BIT,
    NEGLIGIBLE,
    SMALL_SHARE,
    share,
    small_change,
)
from moe_kernels.backends.triton._sinkhorn_tiles import (
    begin,
    columns_of,
    fill_with_nan,
    full_tile,
    full_vector,
    inverse_of,
    k_in_float32,
    largest_column,
    log_k,
    of_iteration,
    read_tile,
    rows_of,
    scratch_tile,
    sum_columns,
    sum_rows,
    v_before,
    write_tile,
)


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
    _span, scaled, broken, inv_tau = begin(
        scores_ptr, stride_scores_B, stride_scores_I, taus_ptr, slow_ptr, n, FLOAT_RANGE, ROWS, N
    )
    if broken:
        fill_with_nan(p_ptr, n, ROWS, N)
    if scaled:
        for first in range(0, n, ROWS):
            k = k_in_float32(scores_ptr, stride_scores_B, stride_scores_I, first, n, inv_tau, ROWS, N)
            write_tile(k_ptr, k, first, n, ROWS, N)
        v = full_vector(1.0, tl.float32, N)
        t = 0
        while t < iterations:
            tl.debug_barrier()  # threads read k that other threads have stored
            columns = full_tile(0.0, tl.float32, ROWS, N)
            for first in range(0, n, ROWS):
                ptrs, inside = scratch_tile(k_ptr, first, n, ROWS, N)
                k = tl.load(ptrs, mask=inside, other=0.0)
                u = inverse_of(sum_rows(k * v[:, None, :]))
                columns = tl.fma(k, u[None, :, None], columns)
                u_ptrs, i_inside = rows_of(u_ptr, first, n, ROWS)
                tl.store(u_ptrs, u, mask=i_inside)
            before = v
            v = inverse_of(tl.sum(columns, axis=1))
            t = tl.where(largest_column((v != before).to(tl.int32)) > 0, t + 1, iterations)
        tl.debug_barrier()  # threads read u that other threads have stored
        for first in range(0, n, ROWS):
            ptrs, inside = scratch_tile(k_ptr, first, n, ROWS, N)
            k = tl.load(ptrs, mask=inside, other=0.0)
            u_ptrs, i_inside = rows_of(u_ptr, first, n, ROWS)
            u = tl.load(u_ptrs, mask=i_inside, other=0.0)
            write_tile(p_ptr, k * u[None, :, None] * v[:, None, :], first, n, ROWS, N)


@triton.jit
def _solve(history_ptr, k_ptr, short_ptr, B, n, iterations, ROWS: tl.constexpr, N: tl.constexpr):
    """Writes u and v of all iterations that change them. Returns the last of these and its v."""
    v = full_vector(1.0, tl.float64, N)
    change = full_vector(1.0, tl.float32, N)
    t = 0
    while (t < iterations) & (largest_column(tl.abs(change)) > small_change(iterations - t)):
        tl.debug_barrier()  # threads read k that other threads have stored
        columns = full_tile(0.0, tl.float64, ROWS, N)
        for first in range(0, n, ROWS):
            ptrs, inside = scratch_tile(k_ptr, first, n, ROWS, N)
            k = tl.load(ptrs, mask=inside, other=0.0)
            u = inverse_of(sum_rows(k * v[:, None, :]))
            columns = tl.fma(k, u[None, :, None], columns)
            u_ptrs, i_inside = rows_of(of_iteration(history_ptr, t, 0, B, n), first, n, ROWS)
            tl.store(u_ptrs, u, mask=i_inside)
        total = tl.sum(columns, axis=1)
        change = tl.where(total > 0, 1.0 - v * total, 0.0).to(tl.float32)
        v = inverse_of(total)
        v_ptrs, j_inside = columns_of(of_iteration(history_ptr, t, 1, B, n), n, N)
        tl.store(v_ptrs, v, mask=j_inside)
        t += 1
    while (t < iterations) & (largest_column(tl.abs(change)) > LAST_BIT):
        tl.debug_barrier()  # threads read u that other threads have stored
        y = v.to(tl.float32) * change
        short_columns = full_tile(0.0, tl.float32, ROWS, N)
        for first in range(0, n, ROWS):
            ptrs, inside = scratch_tile(short_ptr, first, n, ROWS, N)
            short_k = tl.load(ptrs, mask=inside, other=0.0)
            u_ptrs, i_inside = rows_of(of_iteration(history_ptr, t - 1, 0, B, n), first, n, ROWS)
            u = tl.load(u_ptrs, mask=i_inside, other=0.0)
            short_u = u.to(tl.float32)
            row_change = -short_u * sum_rows(short_k * y[:, None, :])
            tl.store(u_ptrs + 2 * B * n, tl.fma(u, row_change.to(tl.float64), u), mask=i_inside)
            short_columns = tl.fma(short_k, (short_u * row_change)[None, :, None], short_columns)
        change = -v.to(tl.float32) * tl.sum(short_columns, axis=1)
        v = tl.fma(v, change.to(tl.float64), v)
        v_ptrs, j_inside = columns_of(of_iteration(history_ptr, t, 1, B, n), n, N)
        tl.store(v_ptrs, v, mask=j_inside)
        t += 1
    return t - 1, v


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
    h_ptr,  # (B, n, n) float64 scratch memory: sums of the iterations in float64, dscores = k * h
    short_k_ptr,  # (B, n, n) float32 scratch memory: k
    short_h_ptr,  # (B, n, n) float32 scratch memory: sums of the iterations in float32, divided by sum |P * dP|
    stride_scores_B, stride_scores_I, B, n, iterations,
    ROWS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    _span, scaled, broken, inv_tau = begin(
        scores_ptr, stride_scores_B, stride_scores_I, taus_ptr, slow_ptr, n, FLOAT_RANGE, ROWS, N
    )
    if broken:
        fill_with_nan(dscores_ptr, n, ROWS, N)
    if scaled:
        for first in range(0, n, ROWS):
            k = tl.exp(log_k(scores_ptr, stride_scores_B, stride_scores_I, first, n, inv_tau, ROWS, N))
            ptrs, inside = scratch_tile(k_ptr, first, n, ROWS, N)
            tl.store(ptrs, k, mask=inside)
            write_tile(short_k_ptr, k, first, n, ROWS, N)
        last, v = _solve(history_ptr, k_ptr, short_k_ptr, B, n, iterations, ROWS, N)
        tl.debug_barrier()  # threads read u that other threads have stored
        columns = full_tile(0.0, tl.float64, ROWS, N)
        sizes = full_tile(0.0, tl.float64, ROWS, N)
        for first in range(0, n, ROWS):
            ptrs, inside = scratch_tile(k_ptr, first, n, ROWS, N)
            k = tl.load(ptrs, mask=inside, other=0.0)
            u_ptrs, i_inside = rows_of(of_iteration(history_ptr, last, 0, B, n), first, n, ROWS)
            u = tl.load(u_ptrs, mask=i_inside, other=0.0)
            grad = read_tile(grad_ptr, stride_grad_B, stride_grad_I, first, n, ROWS, N, 0.0).to(tl.float64)
            h = (u * inv_tau)[None, :, None] * v[:, None, :] * grad
            h_ptrs, _ = scratch_tile(h_ptr, first, n, ROWS, N)
            tl.store(h_ptrs, h, mask=inside)
            columns = tl.fma(k, h, columns)
            sizes += tl.abs(k * h)
        dg = -tl.sum(columns, axis=1)
        whole = sum_columns(tl.sum(sizes, axis=1))
        inv_whole = tl.where(whole == 0, 0.0, 1.0 / whole)  # NaN stays NaN
        left = 1.0
        t = iterations - 1
        # df is 0 after the last iteration. NaN is not at most the share.
        while (t >= 0) & (((left <= SMALL_SHARE) == 0) | (t == iterations - 1)):
            tl.debug_barrier()  # threads read h that other threads have stored
            y = dg * v
            v = v_before(history_ptr, tl.minimum(t, last + 1), B, n, N)
            columns = full_tile(0.0, tl.float64, ROWS, N)
            for first in range(0, n, ROWS):
                ptrs, inside = scratch_tile(k_ptr, first, n, ROWS, N)
                k = tl.load(ptrs, mask=inside, other=0.0)
                h_ptrs, _ = scratch_tile(h_ptr, first, n, ROWS, N)
                h = tl.load(h_ptrs, mask=inside, other=0.0)
                u_ptrs, i_inside = rows_of(of_iteration(history_ptr, tl.minimum(t, last), 0, B, n), first, n, ROWS)
                u = tl.load(u_ptrs, mask=i_inside, other=0.0)
                dx = -u * sum_rows(k * y[:, None, :])
                if t == iterations - 1:
                    dx -= sum_rows(k * h)
                dx *= u
                h = tl.fma(u[None, :, None], y[:, None, :], tl.fma(dx[None, :, None], v[:, None, :], h))
                tl.store(h_ptrs, h, mask=inside)
                columns = tl.fma(k, dx[None, :, None], columns)
            dg = -v * tl.sum(columns, axis=1)
            left = share(sum_columns(tl.abs(dg)), inv_whole, t, True)
            t -= 1
        short_dg = (dg * inv_whole).to(tl.float32)
        short_v = v.to(tl.float32)
        first_short = t
        while (t >= 0) & (sum_columns(tl.abs(short_dg)) * (t + 1) > NEGLIGIBLE):
            tl.debug_barrier()
            short_y = short_dg * short_v
            short_v = v_before(history_ptr, tl.minimum(t, last + 1), B, n, N).to(tl.float32)
            short_columns = full_tile(0.0, tl.float32, ROWS, N)
            for first in range(0, n, ROWS):
                ptrs, inside = scratch_tile(short_k_ptr, first, n, ROWS, N)
                short_k = tl.load(ptrs, mask=inside, other=0.0)
                ptrs, inside = scratch_tile(short_h_ptr, first, n, ROWS, N)
                short_h = tl.load(
                    ptrs, mask=inside & (t - first_short + tl.zeros(inside.shape, dtype=tl.int32) < 0), other=0.0
                )
                u_ptrs, i_inside = rows_of(of_iteration(history_ptr, tl.minimum(t, last), 0, B, n), first, n, ROWS)
                short_u = tl.load(u_ptrs, mask=i_inside, other=0.0).to(tl.float32)
                short_dx = -short_u * (short_u * sum_rows(short_k * short_y[:, None, :]))
                short_h = tl.fma(short_dx[None, :, None], short_v[:, None, :], short_h)
                short_h = tl.fma(short_u[None, :, None], short_y[:, None, :], short_h)
                tl.store(ptrs, short_h, mask=inside)
                short_columns = tl.fma(short_k, short_dx[None, :, None], short_columns)
            short_dg = -short_v * tl.sum(short_columns, axis=1)
            t -= 1
        tl.debug_barrier()
        for first in range(0, n, ROWS):
            ptrs, inside = scratch_tile(k_ptr, first, n, ROWS, N)
            k = tl.load(ptrs, mask=inside, other=0.0)
            h_ptrs, _ = scratch_tile(h_ptr, first, n, ROWS, N)
            h = tl.load(h_ptrs, mask=inside, other=0.0)
            short_ptrs, _ = scratch_tile(short_h_ptr, first, n, ROWS, N)
            short_h = tl.load(
                short_ptrs, mask=inside & (t - first_short + tl.zeros(inside.shape, dtype=tl.int32) < 0), other=0.0
            )
            write_tile(dscores_ptr, k * tl.fma(short_h.to(tl.float64), whole, h), first, n, ROWS, N)
