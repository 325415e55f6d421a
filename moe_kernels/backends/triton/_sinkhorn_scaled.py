# ruff: noqa: RUF005 (Triton's language has no (*x, y), so tuples grow as x = x + (y,))
# mypy: disable-error-code="assignment"
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
    exponential,
    fill_with_nan,
    inverse_of,
    of_iteration,
    read_tile,
    rows_of,
    to_double,
    write_tile,
)

# A matrix is scaled if each row of scores / tau has a range below FLOAT_RANGE (forward, and backward for n > 64) or
# DOUBLE_RANGE (backward): k, u and v are then normal numbers of float32 or float64.
FLOAT_RANGE = tl.constexpr(60.0)
DOUBLE_RANGE = tl.constexpr(300.0)
SMALL_CHANGE, LAST_BIT = tl.constexpr(2.0**-21), tl.constexpr(2.0**-53)
SMALL_SHARE, NEGLIGIBLE = tl.constexpr(2.0**-22), tl.constexpr(2.0**-45)


# A matrix (N, N) is in 8 tensors (N, N / 8). Triton gives them to threads so that each has 8 neighbours of a row or 2.
# Sums of rows are sums of these tensors and then of N / 8 threads. For sums of columns there is the transpose as well.
@triton.jit
def _split(x):
    """The 8 elements of the last three dimensions, (2, 2, 2), in some order."""
    x0, x1 = tl.split(x)
    x00, x01 = tl.split(x0)
    x10, x11 = tl.split(x1)
    a, b = tl.split(x00)
    c, d = tl.split(x01)
    e, f = tl.split(x10)
    g, h = tl.split(x11)
    return a, b, c, d, e, f, g, h


@triton.jit
def _columns(x):
    """A matrix (N, N) as 8 tensors (N, N / 8), each with a column out of eight neighbours."""
    N: tl.constexpr = x.shape[0]
    return _split(tl.reshape(x, (N, N // 8, 2, 2, 2)))


@triton.jit
def _elements(x):
    """A vector (N) as 8 tensors (1, N / 8), in the order of _columns."""
    # Sums of one element each: without them Triton would compute x in each thread that needs it, not exchange it.
    x = tl.sum(x[:, None], axis=1)
    return _split(tl.reshape(x, (1, x.shape[0] // 8, 2, 2, 2)))


@triton.jit
def _joined(x):
    """The inverse of _columns."""
    N: tl.constexpr = x[0].shape[0]
    low = tl.join(tl.join(x[0], x[1]), tl.join(x[2], x[3]))
    high = tl.join(tl.join(x[4], x[5]), tl.join(x[6], x[7]))
    return tl.reshape(tl.join(low, high), (N, N))


@triton.jit
def _transposed(x):
    return _columns(tl.trans(_joined(x)))


@triton.jit
def _anchors(s):
    """The largest score of each row, or 0 for -inf: padding rows hold only -inf."""
    largest = s[0]
    for c in tl.static_range(1, 8):
        largest = tl.maximum(largest, s[c])
    largest = tl.max(largest, axis=1)
    return tl.where(largest > -float("inf"), largest, 0.0)


@triton.jit
def _times(x, y):
    """The product of a matrix and a vector, of 8 tensors each: (N)."""
    total = x[0] * y[0]
    for c in tl.static_range(1, 8):
        total = tl.fma(x[c], y[c], total)
    return tl.sum(total, axis=1)


@triton.jit
def _in_float32(x):
    y = ()
    for c in tl.static_range(8):
        y = y + (x[c].to(tl.float32),)
    return y


@triton.jit
def _read(ptr, stride_B, stride_I, n, N: tl.constexpr, other):
    return tl.reshape(read_tile(ptr, stride_B, stride_I, 0, n, N, N, other), (N, N))


@triton.jit
def _write(ptr, x, n, N: tl.constexpr):
    write_tile(ptr, tl.reshape(_joined(_in_float32(x)), (1, N, N)), 0, n, N, N)


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
        s = _columns(_read(scores_ptr, stride_scores_B, stride_scores_I, n, N, -float("inf")))
        anchor, k = _anchors(s), ()
        for c in tl.static_range(8):
            k = k + (exponential(s[c] - anchor[:, None], inv_tau),)
        kt = _transposed(k)
        u = tl.zeros((N,), dtype=tl.float32)
        v = tl.full((N,), 1.0, dtype=tl.float32)
        t = 0
        while t < iterations:
            u = inverse_of(_times(k, _elements(v)))
            before = v
            v = inverse_of(_times(kt, _elements(u)))
            t = tl.where(tl.max((v != before).to(tl.int32), axis=0) > 0, t + 1, iterations)
        vs, p = _elements(v), ()
        for c in tl.static_range(8):
            p = p + (k[c] * u[:, None] * vs[c],)
        _write(p_ptr, p, n, N)


@triton.jit
def _store_vectors(history_ptr, t, u, v, B, n, N: tl.constexpr):
    ptrs, inside = rows_of(of_iteration(history_ptr, t, 0, B, n), 0, n, N)
    tl.store(ptrs, u, mask=inside)
    ptrs, inside = rows_of(of_iteration(history_ptr, t, 1, B, n), 0, n, N)
    tl.store(ptrs, v, mask=inside)


@triton.jit
def _load_u(history_ptr, t, B, n, N: tl.constexpr):
    ptrs, inside = rows_of(of_iteration(history_ptr, t, 0, B, n), 0, n, N)
    return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def _v_before(history_ptr, t, B, n, N: tl.constexpr):
    """v before iteration t; 1 before the first iteration."""
    ptrs, inside = rows_of(of_iteration(history_ptr, tl.maximum(t - 1, 0), 1, B, n), 0, n, N)
    return tl.load(ptrs, mask=inside & (t + tl.zeros((N,), dtype=tl.int32) > 0), other=1.0)


@triton.jit
def small_change(left):
    """The largest relative change of v after which `left` iterations in float32 suffice."""
    return SMALL_CHANGE / (left + 16)


@triton.jit
def share(size, inv_whole, t, tame):
    """Bounds on what t iterations add to an entry of tau dS and, if `tame`, on their errors in float32 times 2^22; both
    divided by sum |P * dP|. size: sum |dg|."""
    steps = t.to(tl.float32)
    return (size * inv_whole).to(tl.float32) * tl.where(tame, steps * (0.25 * steps + 1.0), steps)


@triton.jit
def _solve(history_ptr, k, kt, tame, B, n, iterations, N: tl.constexpr):
    """Writes u and v of all iterations that change them. Returns the last of these, and its u and v."""
    u = tl.zeros((N,), dtype=tl.float64)
    v = tl.full((N,), 1.0, dtype=tl.float64)
    before = tl.zeros((N,), dtype=tl.float64)  # if this were v, Triton 3.9 would return it from the loop unchanged
    t = 0
    more = 1
    while (t < iterations) & (more > 0):
        before = v
        u = inverse_of(_times(k, _elements(v)))
        v = inverse_of(_times(kt, _elements(u)))
        _store_vectors(history_ptr, t, u, v, B, n, N)
        t += 1
        # In units of the last place v has changed by 2^52 times the relative change or up to twice that.
        small = tl.where(tame, small_change(iterations - t) * 2.0**52, 0.0).to(tl.int64)
        more = tl.max((tl.abs(bits_of(v) - bits_of(before)) > small).to(tl.int32), axis=0)
    short_v = v.to(tl.float32)
    change = tl.where(short_v > 0, (v - before).to(tl.float32) / short_v, 0.0)
    short_k, short_u = _in_float32(k), u.to(tl.float32)
    short_kt = _transposed(short_k)  # _in_float32(kt) would convert as many elements again
    while (t < iterations) & tame & (tl.max(tl.abs(change), axis=0) > LAST_BIT):
        row_change = -short_u * _times(short_k, _elements(short_v * change))
        u = tl.fma(u, to_double(row_change), u)
        change = -short_v * _times(short_kt, _elements(short_u * row_change))
        v = tl.fma(v, to_double(change), v)
        _store_vectors(history_ptr, t, u, v, B, n, N)
        t += 1
    return t - 1, u, v


@triton.jit
def _add_outer_products(h, u, y, x, w):
    """h + u y' + x w', where y and w are tuples."""
    total = ()
    for c in tl.static_range(8):
        total = total + (tl.fma(u[:, None], y[c], tl.fma(x[:, None], w[c], h[c])),)
    return total


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
        s = _columns(_read(scores_ptr, stride_scores_B, stride_scores_I, n, N, -float("inf")))
        anchor, k = _anchors(s).to(tl.float64), ()
        for c in tl.static_range(8):
            k = k + (tl.exp((to_double(s[c]) - anchor[:, None]) * inv_tau),)
        kt = _transposed(k)
        tame = span < FLOAT_RANGE
        last, u, v = _solve(history_ptr, k, kt, tame, B, n, iterations, N)
        tl.debug_barrier()  # threads read u and v that other threads have stored
        # dscores = k * h. k * h starts as P * dP / tau. An iteration computed u from v before it, here called w,
        # and then v from u. Its backward pass: y = dg * v, dx = u * (df - u * (k y)), h += u y' + dx w', df = 0,
        # dg = -w * (k' dx).
        grad = _read(grad_ptr, stride_grad_B, stride_grad_I, n, N, 0.0)
        grads, grads_t, vs, us = _columns(grad), _columns(tl.trans(grad)), _elements(v), _elements(u * inv_tau)
        h, ht, sizes = (), (), ()
        for c in tl.static_range(8):
            h = h + ((u * inv_tau)[:, None] * vs[c] * grads[c].to(tl.float64),)
            ht = ht + (us[c] * grads_t[c].to(tl.float64),)
        for c in tl.static_range(8):
            sizes = sizes + (tl.abs(h[c]),)
        df = -_times(k, h)
        dg = -v * _times(kt, ht)
        whole = tl.sum(_times(k, sizes), axis=0)
        inv_whole = tl.where(whole == 0, 0.0, 1.0 / whole)  # NaN stays NaN
        enough = tl.where(tame, SMALL_SHARE, NEGLIGIBLE)
        left = 1.0
        t = iterations - 1
        # df is 0 after the last iteration. NaN is not at most `enough`.
        while (t >= 0) & (((left <= enough) == 0) | (t == iterations - 1)):
            y = _elements(dg * v)
            if t < last:
                u = _load_u(history_ptr, t, B, n, N)
            if t <= last:
                v = _v_before(history_ptr, t, B, n, N)
            dx = u * tl.fma(-u, _times(k, y), df)
            h = _add_outer_products(h, u, y, dx, _elements(v))
            dg = -v * _times(kt, _elements(dx))
            df = tl.zeros((N,), dtype=tl.float64)
            left = share(tl.sum(tl.abs(dg), axis=0), inv_whole, t, tame)
            t -= 1
        if tame & (t >= 0):
            short_k, short_h = _in_float32(k), ()
            short_kt = _transposed(short_k)
            for _ in tl.static_range(8):
                short_h = short_h + (tl.zeros(short_k[0].shape, dtype=tl.float32),)  # divided by `whole`
            short_dg = (dg * inv_whole).to(tl.float32)
            short_u = u.to(tl.float32)
            short_v = v.to(tl.float32)
            while (t >= 0) & (tl.sum(tl.abs(short_dg), axis=0) * (t + 1) > NEGLIGIBLE):
                short_y = _elements(short_dg * short_v)
                if t < last:
                    short_u = _load_u(history_ptr, t, B, n, N).to(tl.float32)
                if t <= last:
                    short_v = _v_before(history_ptr, t, B, n, N).to(tl.float32)
                short_dx = -short_u * (short_u * _times(short_k, short_y))
                short_h = _add_outer_products(short_h, short_u, short_y, short_dx, _elements(short_v))
                short_dg = -short_v * _times(short_kt, _elements(short_dx))
                t -= 1
            before, h = h, ()
            for c in tl.static_range(8):
                h = h + (tl.fma(to_double(short_h[c]), whole, before[c]),)
        ds = ()
        for c in tl.static_range(8):
            ds = ds + (k[c] * h[c],)
        _write(dscores_ptr, ds, n, N)
