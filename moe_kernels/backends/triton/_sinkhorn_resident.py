"""Sinkhorn's iteration in logarithms on matrices that stay in registers, M for each program; and shared helpers.

P = exp((scores - f - g) / tau) with potentials f of rows and g of columns. A potential is anchor + tau *
logarithm; log_sum_exp returns these two vectors.

SUMS: row and column sums are prescribed, or there is a tolerance. A matrix that meets the tolerance takes no further
iteration, so each matrix has its own number of iterations. Without SUMS, flags (counts_ptr) select the matrices that
these kernels compute.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exponential(x, FLOAT64: tl.constexpr):
    if FLOAT64:
        y = tl.exp(x)
    else:
        y = tl.exp(x.to(tl.float32)).to(tl.float64)
    return y


@triton.jit
def log_of(total):
    return tl.where(total > 0, tl.log(tl.where(total > 0, total, 1.0)), 0.0)


@triton.jit
def log_sum_exp(d, inv_sums, inv_tau, AXIS: tl.constexpr, FLOAT64: tl.constexpr):
    """(anchor, logarithm): the largest of d along AXIS, and log(inv_sums * sum exp((d - anchor) / tau)). Both are 0 if
    d is -inf all along AXIS."""
    largest = tl.max(d, axis=AXIS)
    anchor = tl.where(largest > -float("inf"), largest, 0.0)
    total = tl.sum(exponential((d - tl.expand_dims(anchor, AXIS)) * inv_tau, FLOAT64), axis=AXIS)
    return anchor, log_of(total * inv_sums)


@triton.jit
def _load(ptr, stride_B, stride_I, B, n, M: tl.constexpr, N: tl.constexpr, other):
    """The program's matrices, (M, N, N) in float64, padded with `other`."""
    matrix = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    i = tl.arange(0, N)
    inside = (matrix < B)[:, None, None] & (i < n)[None, :, None] & (i < n)[None, None, :]
    offsets = matrix[:, None, None] * stride_B + i[None, :, None] * stride_I + i[None, None, :]
    return tl.load(ptr + offsets, mask=inside, other=other).to(tl.float32).to(tl.float64)


@triton.jit
def _store(ptr, x, which, B, n, M: tl.constexpr, N: tl.constexpr):
    """Stores the matrices of x (M, N, N) that the mask `which` (M) selects."""
    matrix = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    i = tl.arange(0, N)
    inside = (which & (matrix < B))[:, None, None] & (i < n)[None, :, None] & (i < n)[None, None, :]
    offsets = matrix[:, None, None] * n * n + (i[None, :, None] * n + i[None, None, :])
    tl.store(ptr + offsets, x.to(tl.float32).to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _vectors(ptr, index, B, n, M: tl.constexpr, N: tl.constexpr):
    """Pointers (M, N) to the program's vectors in ptr[index], where ptr has the shape (.., B, n), and their mask."""
    matrix = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    i = tl.arange(0, N)
    offsets = (tl.cast(index, tl.int64) * B + matrix[:, None]) * n + i[None, :]
    return ptr + offsets, (matrix < B)[:, None] & (i < n)[None, :]


@triton.jit
def _inverse(ptr, B, n, M: tl.constexpr, N: tl.constexpr, SUMS: tl.constexpr):
    """(M, N): 1 / the prescribed sums of rows or columns; 1 without SUMS."""
    y = tl.full((M, N), 1.0, dtype=tl.float64)
    if SUMS:
        ptrs, inside = _vectors(ptr, 0, B, n, M, N)
        y = 1.0 / tl.load(ptrs, mask=inside, other=1.0)
    return y


@triton.jit
def _subtract(ptr, d, B, n, M: tl.constexpr, N: tl.constexpr):
    """Subtracts d (M, N) from the program's part of ptr (B, n)."""
    ptrs, inside = _vectors(ptr, 0, B, n, M, N)
    tl.store(ptrs, tl.load(ptrs, mask=inside, other=0.0) - d, mask=inside)


@triton.jit
def _scalars(ptr, B, M: tl.constexpr):
    """Pointers (M) to the program's part of ptr (B), and their mask."""
    matrix = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    return ptr + matrix, matrix < B


@triton.jit
def _selected(flags_ptr, B, M: tl.constexpr, SUMS: tl.constexpr):
    """(M), bool: True for each matrix of the program that this kernel computes."""
    ptrs, real = _scalars(flags_ptr, B, M)
    if SUMS:
        which = real
    else:
        which = tl.load(ptrs, mask=real, other=0) > 0
    return which


@triton.jit
def _broken(scores):
    """(M), bool: True for each matrix that holds NaN or +inf."""
    return tl.max(tl.max((scores < float("inf")).to(tl.int32) ^ 1, axis=2), axis=1) > 0


@triton.jit
def _columns_near(scores, inv_columns, inv_tau, tolerance):
    """(M), 0 or 1: whether all columns of exp(scores / tau), except those of -inf, have sums within the tolerance."""
    error = tl.abs(tl.sum(tl.exp(scores * inv_tau), axis=1) * inv_columns - 1.0)
    empty = tl.max(scores, axis=1) == -float("inf")
    return tl.min(((error <= tolerance * inv_columns) | empty).to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["iterations"])
def resident_fwd(
    scores_ptr,  # (B, n, n)
    taus_ptr,  # (iterations)
    p_ptr,  # (B, n, n) contiguous; not written if HISTORY
    history_ptr,  # (iterations, 2, B, n) column anchors and logarithms; not written unless HISTORY
    rows_ptr,  # (B, n) prescribed sums; not read unless SUMS
    columns_ptr,  # (B, n) prescribed sums; not read unless SUMS
    counts_ptr,  # (B) int32: without SUMS 1 for a matrix to compute; with SUMS and HISTORY receives iteration counts
    stride_scores_B, stride_scores_I, B, n, iterations,
    tolerance: tl.float64,  # below 0 for none
    M: tl.constexpr, N: tl.constexpr, HISTORY: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    if not SUMS:
        if tl.max(_selected(counts_ptr, B, M, SUMS).to(tl.int32), axis=0) == 0:
            return
    scores = _load(scores_ptr, stride_scores_B, stride_scores_I, B, n, M, N, -float("inf"))
    broken = _broken(scores)
    scores = tl.where(broken[:, None, None], 0.0, scores)
    inv_rows = _inverse(rows_ptr, B, n, M, N, SUMS)
    inv_columns = _inverse(columns_ptr, B, n, M, N, SUMS)
    if SUMS:
        columns_near = _columns_near(scores, inv_columns, 1.0 / tl.load(taus_ptr), tolerance)
        active = tl.full((M,), 1, dtype=tl.int32)
        count = tl.zeros((M,), dtype=tl.int32)
        f = tl.zeros((M, N), dtype=tl.float64)
    g = tl.zeros((M, N), dtype=tl.float64)
    x = scores
    t = 0
    while t < iterations:
        tau = tl.load(taus_ptr + t)
        inv_tau = 1.0 / tau
        anchor, log_sum = log_sum_exp(scores - g[:, None, :], inv_rows, inv_tau, 2, HISTORY)
        if SUMS:
            # Before this iteration, the sum of a row (not of -inf alone) is its prescribed sum times
            # exp((new_f - f) / tau). Column sums are checked before the first iteration only: each iteration ends by
            # making them the prescribed ones.
            new_f = anchor + tau * log_sum
            if tolerance >= 0:
                error = tl.abs(tl.exp((new_f - f) * inv_tau) - 1.0)
                active *= 1 - columns_near * tl.min((error <= tolerance * inv_rows).to(tl.int32), axis=1)
                columns_near = tl.full((M,), 1, dtype=tl.int32)
            f = tl.where(active[:, None] > 0, new_f, f)
            count += active
        else:
            f = anchor + tau * log_sum
        d = scores - f[:, :, None]
        anchor, log_sum = log_sum_exp(d, inv_columns, inv_tau, 1, HISTORY)
        if HISTORY:
            ptrs, inside = _vectors(history_ptr, 2 * t, B, n, M, N)
            tl.store(ptrs, anchor, mask=inside)
            ptrs, inside = _vectors(history_ptr, 2 * t + 1, B, n, M, N)
            tl.store(ptrs, log_sum, mask=inside)
        else:
            x = (d - anchor[:, None, :]) * inv_tau - log_sum[:, None, :]
        g = anchor + tau * log_sum
        t += 1
        if SUMS:
            t = tl.where(tl.max(active, axis=0) > 0, t, iterations)
    if SUMS and HISTORY:
        count_ptrs, real = _scalars(counts_ptr, B, M)
        tl.store(count_ptrs, count, mask=real)
    if not HISTORY:
        if SUMS:
            x = tl.where(count[:, None, None] > 0, x, scores * (1.0 / tl.load(taus_ptr)))
        p = exponential(x, False)
        p = tl.where(broken[:, None, None], float("nan"), p)
        _store(p_ptr, p, _selected(counts_ptr, B, M, SUMS), B, n, M, N)


@triton.jit
def _columns_before(history_ptr, taus_ptr, t, B, n, M: tl.constexpr, N: tl.constexpr):
    """(M, N): the column potentials before iteration t; 0 for t = 0."""
    before = tl.maximum(t - 1, 0)
    ptrs, inside = _vectors(history_ptr, 2 * before, B, n, M, N)
    later = inside & (t + tl.zeros((M, N), dtype=tl.int32) > 0)
    g = tl.load(ptrs, mask=later, other=0.0)
    ptrs, _ = _vectors(history_ptr, 2 * before + 1, B, n, M, N)
    return g + tl.load(taus_ptr + before) * tl.load(ptrs, mask=later, other=0.0)


@triton.jit(do_not_specialize=["iterations"])
def resident_bwd(
    grad_ptr,  # (B, n, n)
    stride_grad_B, stride_grad_I,
    dscores_ptr,  # (B, n, n) contiguous
    drows_ptr,  # (B, n), filled with zeros by the caller; not written unless SUMS
    dcolumns_ptr,  # (B, n), filled with zeros by the caller; not written unless SUMS
    scores_ptr,  # (B, n, n)
    taus_ptr,  # (iterations)
    history_ptr,  # (iterations, 2, B, n) column anchors and logarithms
    rows_ptr,  # (B, n) prescribed sums; not read unless SUMS
    columns_ptr,  # (B, n) prescribed sums; not read unless SUMS
    counts_ptr,  # (B) int32: with SUMS each matrix's number of iterations, else 1 for a matrix to compute
    stride_scores_B, stride_scores_I, B, n, iterations,
    M: tl.constexpr, N: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    if not SUMS:
        if tl.max(_selected(counts_ptr, B, M, SUMS).to(tl.int32), axis=0) == 0:
            return
    scores = _load(scores_ptr, stride_scores_B, stride_scores_I, B, n, M, N, -float("inf"))
    broken = _broken(scores)
    scores = tl.where(broken[:, None, None], 0.0, scores)
    # `ds` is dP at first. In the loop, the step of a matrix's last iteration multiplies `ds` by P.
    ds = _load(grad_ptr, stride_grad_B, stride_grad_I, B, n, M, N, 0.0)
    df = tl.zeros((M, N), dtype=tl.float64)
    dg = tl.zeros((M, N), dtype=tl.float64)
    last = iterations - 1
    last_tau = tl.load(taus_ptr + last)
    if SUMS:
        count_ptrs, real = _scalars(counts_ptr, B, M)
        count = tl.load(count_ptrs, mask=real, other=0)
        last = tl.max(count, axis=0) - 1
        # A matrix without iterations has no such step: P = exp(scores / tau).
        ds *= tl.where(count[:, None, None] > 0, 1.0, tl.exp(scores * (1.0 / tl.load(taus_ptr))))
    t = last
    while t >= 0:
        tau = tl.load(taus_ptr + t)
        inv_tau = 1.0 / tau
        d = scores - _columns_before(history_ptr, taus_ptr, t, B, n, M, N)[:, None, :]
        inv_rows = _inverse(rows_ptr, B, n, M, N, SUMS)
        row_anchor, row_log = log_sum_exp(d, inv_rows, inv_tau, 2, True)
        f = row_anchor + tau * row_log
        rows_normalised = tl.exp((d - row_anchor[:, :, None]) * inv_tau - row_log[:, :, None])
        ptrs, inside = _vectors(history_ptr, 2 * t, B, n, M, N)
        anchor = tl.load(ptrs, mask=inside, other=0.0)
        ptrs, inside = _vectors(history_ptr, 2 * t + 1, B, n, M, N)
        log_sum = tl.load(ptrs, mask=inside, other=0.0)
        columns_normalised = tl.exp(((scores - f[:, :, None]) - anchor[:, None, :]) * inv_tau - log_sum[:, None, :])
        if SUMS and M > 1:
            starts = count == t + 1
            ds = tl.where(starts[:, None, None], columns_normalised * ds, ds)
            df = tl.where(starts[:, None], -tl.sum(ds, axis=2), 0.0)
            dg = tl.where(starts[:, None], -tl.sum(ds, axis=1), dg)
        elif t == last:
            ds = columns_normalised * ds
            df = -tl.sum(ds, axis=2)
            dg = -tl.sum(ds, axis=1)
        if SUMS:
            dg *= _inverse(columns_ptr, B, n, M, N, SUMS)
            _subtract(dcolumns_ptr, dg * (tau / last_tau), B, n, M, N)
        change = columns_normalised * dg[:, None, :]
        ds += change
        df -= tl.sum(change, axis=2)
        if SUMS:
            df *= inv_rows
            _subtract(drows_ptr, df * (tau / last_tau), B, n, M, N)
            tl.debug_barrier()  # the next step may load values of drows and dcolumns that other threads have stored
        change = rows_normalised * df[:, :, None]
        ds += change
        dg = -tl.sum(change, axis=1)
        df = tl.zeros((M, N), dtype=tl.float64)
        t -= 1
    ds = ds / last_tau
    ds = tl.where(broken[:, None, None], float("nan"), ds)
    _store(dscores_ptr, ds, _selected(counts_ptr, B, M, SUMS), B, n, M, N)
    if SUMS:
        ptrs, inside = _vectors(drows_ptr, 0, B, n, M, N)
        tl.store(ptrs, float("nan"), mask=inside & broken[:, None])
        ptrs, inside = _vectors(dcolumns_ptr, 0, B, n, M, N)
        tl.store(ptrs, float("nan"), mask=inside & broken[:, None])
