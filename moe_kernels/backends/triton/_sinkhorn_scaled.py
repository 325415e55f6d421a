"""Sinkhorn's iteration on k = exp((scores - row maximum) / tau), computed once and scaled: P = diag(u) k diag(v).

For matrices whose rows have so small a range that k, u and v are normal floating-point numbers. The kernels write a
flag for each matrix: 1 if the matrix needs logarithms, else 0. The kernels in logarithms run next and compute the
matrices with flag 1. Here are those for 8 < n <= 64, which keep a matrix in registers; for other n see
_sinkhorn_scaled_few.py and _sinkhorn_scaled_streamed.py.

Forward is in float32. It stops when an iteration leaves v unchanged: later iterations would too.

Backward is in float64, since the terms of a gradient can cancel, and continues in float32 where that suffices, since
float64 is slow on many GPUs. It needs rows of a range below FLOAT_RANGE to do so. A and B of ops/sinkhorn.py are the
matrix after an iteration's row step and after its column step. Rows of A and columns of B sum to one.
* u and v: an iteration that changes v by the factors 1 + c_j is followed by one that changes u by 1 / (1 + a_i),
  a = A c, and v by 1 / (1 + b_j), b = -B' a. Float32 computes them with errors of some 2^-24 |c|, and 1 - a is
  1 / (1 + a) up to a^2. With |c_j| (t + 16) <= 2^-21 and t iterations left, row sums of A and column sums of B are then
  1 up to some 2^-45. If no |c_j| is above 2^-53, later iterations have the same u and v.
* Gradients: sum |dg| does not grow, and entries of A and B are at most 1, so t iterations add at most 2 t sum |dg| to
  an entry of tau dS. Errors of 2^-24 in each of them add up to at most t (t + 4) / 4 sum |dg| 2^-22. Where
  t (t + 4) / 4 sum |dg| <= 2^-22 sum |P * dP| they are at most 2^-44 sum |P * dP|. Where
  t sum |dg| <= 2^-45 sum |P * dP|, the iterations are left out, which is as much.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.backends.triton._sinkhorn_tiles import (
    begin,
    bits_of,
    columns_of,
    fill_with_nan,
    full_vector,
    inverse_of,
    k_in_float32,
    largest_column,
    log_k,
    of_iteration,
    read_tile,
    rows_of,
    sum_columns,
    sum_rows,
    to_double,
    v_before,
    write_tile,
)

# A matrix is scaled if each row of scores / tau has a range below FLOAT_RANGE (forward, and backward for n > 64) or
# DOUBLE_RANGE (backward): k, u and v are then normal numbers of float32 or float64.
FLOAT_RANGE = tl.constexpr(60.0)
DOUBLE_RANGE = tl.constexpr(300.0)
SMALL_CHANGE, LAST_BIT = tl.constexpr(2.0**-21), tl.constexpr(2.0**-53)
SMALL_SHARE, NEGLIGIBLE = tl.constexpr(2.0**-22), tl.constexpr(2.0**-45)


@triton.jit(do_not_specialize=["iterations"])
def scaled_fwd(
    scores_ptr,  # (B, n, n)
    taus_ptr,  # (iterations), all equal
    p_ptr,  # (B, n, n) contiguous
    slow_ptr,  # (B) int32, receives 1 if a matrix needs logarithms (its p is not written), else 0
    stride_scores_B, stride_scores_I, n, iterations,
    N: tl.constexpr,
):  # fmt: skip
    _span, scaled, broken, inv_tau = begin(
        scores_ptr, stride_scores_B, stride_scores_I, taus_ptr, slow_ptr, n, FLOAT_RANGE, N, N
    )
    if broken:
        fill_with_nan(p_ptr, n, N, N)
    if scaled:
        k = k_in_float32(scores_ptr, stride_scores_B, stride_scores_I, 0, n, inv_tau, N, N)
        u = tl.zeros((N,), dtype=tl.float32)
        v = full_vector(1.0, tl.float32, N)
        t = 0
        while t < iterations:
            u = inverse_of(sum_rows(k * v[:, None, :]))
            before = v
            v = inverse_of(tl.sum(k * u[None, :, None], axis=1))
            t = tl.where(largest_column((v != before).to(tl.int32)) > 0, t + 1, iterations)
        write_tile(p_ptr, k * u[None, :, None] * v[:, None, :], 0, n, N, N)


@triton.jit
def _store_vectors(history_ptr, t, u, v, B, n, N: tl.constexpr):
    ptrs, inside = rows_of(of_iteration(history_ptr, t, 0, B, n), 0, n, N)
    tl.store(ptrs, u, mask=inside)
    ptrs, inside = columns_of(of_iteration(history_ptr, t, 1, B, n), n, N)
    tl.store(ptrs, v, mask=inside)


@triton.jit
def _load_u(history_ptr, t, B, n, N: tl.constexpr):
    ptrs, inside = rows_of(of_iteration(history_ptr, t, 0, B, n), 0, n, N)
    return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def small_change(left):
    """The largest relative change of v after which `left` iterations in float32 suffice."""
    return SMALL_CHANGE / (left + 16)


@triton.jit
def share(dg, t):
    """A bound on what t iterations add to an entry of tau dS, and on their errors in float32 times 2^22."""
    steps = t.to(tl.float32)
    return sum_columns(tl.abs(dg)) * (steps * (0.25 * steps + 1.0))


@triton.jit
def _solve(history_ptr, k, tame, B, n, iterations, N: tl.constexpr):
    """Writes u and v of all iterations that change them. Returns the last of these, and its u and v."""
    u = tl.zeros((N,), dtype=tl.float64)
    v = full_vector(1.0, tl.float64, N)
    before = full_vector(0.0, tl.float64, N)  # if this were v, Triton 3.9 would return it from the loop unchanged
    t = 0
    more = 1
    while (t < iterations) & (more > 0):
        before = v
        u = inverse_of(sum_rows(k * v[:, None, :]))
        v = inverse_of(tl.sum(k * u[None, :, None], axis=1))
        _store_vectors(history_ptr, t, u, v, B, n, N)
        t += 1
        # In units of the last place v has changed by 2^52 times the relative change or up to twice that.
        small = tl.where(tame, small_change(iterations - t) * 2.0**52, 0.0).to(tl.int64)
        more = largest_column((tl.abs(bits_of(v) - bits_of(before)) > small).to(tl.int32))
    short_v = v.to(tl.float32)
    change = tl.where(short_v > 0, (v - before).to(tl.float32) / short_v, 0.0)
    short_k = k.to(tl.float32)
    short_u = u.to(tl.float32)
    while (t < iterations) & tame & (largest_column(tl.abs(change)) > LAST_BIT):
        row_change = -short_u * sum_rows(short_k * (short_v * change)[:, None, :])
        u = tl.fma(u, to_double(row_change), u)
        change = -short_v * tl.sum(short_k * (short_u * row_change)[None, :, None], axis=1)
        v = tl.fma(v, to_double(change), v)
        _store_vectors(history_ptr, t, u, v, B, n, N)
        t += 1
    return t - 1, u, v


@triton.jit(do_not_specialize=["iterations"])
def scaled_bwd(
    grad_ptr,  # (B, n, n)
    stride_grad_B, stride_grad_I,
    dscores_ptr,  # (B, n, n) contiguous
    scores_ptr,  # (B, n, n)
    taus_ptr,  # (iterations), all equal
    history_ptr,  # (iterations, 2, B, n), receives u and v
    slow_ptr,  # (B) int32, receives 1 if a matrix needs logarithms (its dscores is not written), else 0
    stride_scores_B, stride_scores_I, B, n, iterations,
    N: tl.constexpr,
):  # fmt: skip
    span, scaled, broken, inv_tau = begin(
        scores_ptr, stride_scores_B, stride_scores_I, taus_ptr, slow_ptr, n, DOUBLE_RANGE, N, N
    )
    if broken:
        fill_with_nan(dscores_ptr, n, N, N)
    if scaled:
        k = tl.exp(log_k(scores_ptr, stride_scores_B, stride_scores_I, 0, n, inv_tau, N, N))
        tame = span < FLOAT_RANGE
        last, u, v = _solve(history_ptr, k, tame, B, n, iterations, N)
        tl.debug_barrier()  # threads read u and v that other threads have stored
        # dscores = k * h / tau. k * h starts as w = P * dP. An iteration computed u from v before it, here called w,
        # and then v from u. Its backward pass: y = dg * v, dx = u * (df - u * (k y)), h += u y' + dx w', df = 0,
        # dg = -w * (k' dx).
        grad = read_tile(grad_ptr, stride_grad_B, stride_grad_I, 0, n, N, N, 0.0)
        h = u[None, :, None] * v[:, None, :] * grad.to(tl.float64)
        weight = k * h
        df = -sum_rows(weight)
        dg = -tl.sum(weight, axis=1)
        whole = sum_columns(tl.sum(tl.abs(weight), axis=1))
        enough = tl.where(tame, SMALL_SHARE, NEGLIGIBLE) * whole
        left = whole
        t = iterations - 1
        # df is 0 after the last iteration. NaN is not at most `enough`.
        while (t >= 0) & (((left <= enough) == 0) | (t == iterations - 1)):
            y = dg * v
            if t < last:
                u = _load_u(history_ptr, t, B, n, N)
            if t <= last:
                v = v_before(history_ptr, t, B, n, N)
            dx = u * tl.fma(-u, sum_rows(k * y[:, None, :]), df)
            h = tl.fma(u[None, :, None], y[:, None, :], tl.fma(dx[None, :, None], v[:, None, :], h))
            dg = -v * tl.sum(k * dx[None, :, None], axis=1)
            df = tl.zeros((N,), dtype=tl.float64)
            left = tl.where(tame, share(dg, t), sum_columns(tl.abs(dg)) * t)
            t -= 1
        if tame & (t >= 0):
            short_k = k.to(tl.float32)
            short_h = tl.zeros(short_k.shape, dtype=tl.float32)  # divided by `whole`
            short_dg = tl.where(whole > 0, dg * (1.0 / whole), 0.0).to(tl.float32)
            short_u = u.to(tl.float32)
            short_v = v.to(tl.float32)
            while (t >= 0) & (sum_columns(tl.abs(short_dg)) * (t + 1) > NEGLIGIBLE):
                short_y = short_dg * short_v
                if t < last:
                    short_u = _load_u(history_ptr, t, B, n, N).to(tl.float32)
                if t <= last:
                    short_v = v_before(history_ptr, t, B, n, N).to(tl.float32)
                short_dx = -short_u * (short_u * sum_rows(short_k * short_y[:, None, :]))
                short_h = tl.fma(short_dx[None, :, None], short_v[:, None, :], short_h)
                short_h = tl.fma(short_u[None, :, None], short_y[:, None, :], short_h)
                short_dg = -short_v * tl.sum(short_k * short_dx[None, :, None], axis=1)
                t -= 1
            h = tl.fma(to_double(short_h), whole, h)
        write_tile(dscores_ptr, k * h * inv_tau, 0, n, N, N)
