"""Sinkhorn's iteration in logarithms, on matrices that stay in registers, M of them a program; and what it shares with
other ways. With neither sums nor a tolerance, flags say which matrices are for these kernels.

Where rows and columns have sums, or a tolerance stops it (SUMS), each matrix counts the iterations that it takes. One
that has stopped goes along with its program's others: its f stays, and of the same f come the same columns.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exponential(x, WIDE: tl.constexpr):
    if WIDE:
        y = tl.exp(x)
    else:
        y = tl.exp(x.to(tl.float32)).to(tl.float64)
    return y


@triton.jit
def log_of(total):
    """The logarithm of a sum after its largest summand; of nothing 0."""
    return tl.where(total > 0, tl.log(tl.where(total > 0, total, 1.0)), 0.0)


@triton.jit
def log_sum_exp(d, inv_sums, inv_tau, AXIS: tl.constexpr, WIDE: tl.constexpr):
    """The largest of d along an axis, and log(inv_sums * sum exp) of what is above it, over tau; 0 and 0 of nothing."""
    most = tl.max(d, axis=AXIS)
    anchor = tl.where(most > -float("inf"), most, 0.0)
    total = tl.sum(exponential((d - tl.expand_dims(anchor, AXIS)) * inv_tau, WIDE), axis=AXIS)
    return anchor, log_of(total * inv_sums)


@triton.jit
def _load(ptr, stride_B, stride_I, B, n, M: tl.constexpr, N: tl.constexpr, other):
    """(M, N, N) in float64; `other` where there is no element."""
    matrix = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    i = tl.arange(0, N)
    inside = (matrix < B)[:, None, None] & (i < n)[None, :, None] & (i < n)[None, None, :]
    offsets = matrix[:, None, None] * stride_B + i[None, :, None] * stride_I + i[None, None, :]
    return tl.load(ptr + offsets, mask=inside, other=other).to(tl.float32).to(tl.float64)


@triton.jit
def _store(ptr, x, which, B, n, M: tl.constexpr, N: tl.constexpr):
    """x (M, N, N), of matrices of `which` (M)."""
    matrix = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    i = tl.arange(0, N)
    inside = (which & (matrix < B))[:, None, None] & (i < n)[None, :, None] & (i < n)[None, None, :]
    # Not (matrix * n + i) * n: the rows of _vectors, in 64 bits, would be kept for it all through the solve.
    offsets = matrix[:, None, None] * n * n + (i[None, :, None] * n + i[None, None, :])
    tl.store(ptr + offsets, x.to(tl.float32).to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _vectors(ptr, which, B, n, M: tl.constexpr, N: tl.constexpr):
    """Addresses of the program's (M, N) in vector `which` of (.., B, n), and which there are."""
    matrix = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    i = tl.arange(0, N)
    offsets = (tl.cast(which, tl.int64) * B + matrix[:, None]) * n + i[None, :]
    return ptr + offsets, (matrix < B)[:, None] & (i < n)[None, :]


@triton.jit
def _inverse(ptr, B, n, M: tl.constexpr, N: tl.constexpr, SUMS: tl.constexpr):
    """(M, N): one over what rows or columns are to sum to."""
    y = tl.full((M, N), 1.0, dtype=tl.float64)
    if SUMS:
        at, inside = _vectors(ptr, 0, B, n, M, N)
        y = 1.0 / tl.load(at, mask=inside, other=1.0)
    return y


@triton.jit
def _lower(ptr, d, B, n, M: tl.constexpr, N: tl.constexpr):
    """(B, n) less d."""
    at, inside = _vectors(ptr, 0, B, n, M, N)
    tl.store(at, tl.load(at, mask=inside, other=0.0) - d, mask=inside)


@triton.jit
def _counts(ptr, B, M: tl.constexpr):
    """Addresses of (M) of (B), and which there are."""
    matrix = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    return ptr + matrix, matrix < B


@triton.jit
def _wanted(flags_ptr, B, M: tl.constexpr, SUMS: tl.constexpr):
    """(M): the matrices of the program that are to be written."""
    at, real = _counts(flags_ptr, B, M)
    if SUMS:
        which = real
    else:
        which = tl.load(at, mask=real, other=0) > 0
    return which


@triton.jit
def _broken(scores):
    """(M): matrices that hold NaN or +inf."""
    return tl.max(tl.max((scores < float("inf")).to(tl.int32) ^ 1, axis=2), axis=1) > 0


@triton.jit
def _columns_near(scores, inv_columns, inv_tau, tolerance):
    """(M), 0 or 1: whether the columns of exp(scores / tau) itself are within the tolerance: an empty one is."""
    off = tl.abs(tl.sum(tl.exp(scores * inv_tau), axis=1) * inv_columns - 1.0)
    empty = tl.max(scores, axis=1) == -float("inf")
    return tl.min(((off <= tolerance * inv_columns) | empty).to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["iterations"])
def resident_fwd(
    scores_ptr,  # (B, n, n)
    taus_ptr,  # (iterations)
    p_ptr,  # (B, n, n) contiguous
    history_ptr,  # (iterations, 2, B, n)
    rows_ptr,  # (B, n)
    columns_ptr,  # (B, n)
    counts_ptr,  # (B): with SUMS, iterations that were taken; else int32, 1 for a matrix that these are for
    stride_scores_B, stride_scores_I, B, n, iterations,
    tolerance: tl.float64,  # below 0: none
    M: tl.constexpr, N: tl.constexpr, HISTORY: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    if not SUMS:
        if tl.max(_wanted(counts_ptr, B, M, SUMS).to(tl.int32), axis=0) == 0:
            return
    scores = _load(scores_ptr, stride_scores_B, stride_scores_I, B, n, M, N, -float("inf"))
    broken = _broken(scores)
    scores = tl.where(broken[:, None, None], 0.0, scores)
    inv_rows = _inverse(rows_ptr, B, n, M, N, SUMS)
    inv_columns = _inverse(columns_ptr, B, n, M, N, SUMS)
    if SUMS:
        near = _columns_near(scores, inv_columns, 1.0 / tl.load(taus_ptr), tolerance)
        going = tl.full((M,), 1, dtype=tl.int32)
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
            # Columns are off by rounding after any iteration, rows by as much as their potentials change.
            risen = anchor + tau * log_sum
            if tolerance >= 0:
                off = tl.abs(tl.exp((risen - f) * inv_tau) - 1.0)
                going *= 1 - near * tl.min((off <= tolerance * inv_rows).to(tl.int32), axis=1)
                near = tl.full((M,), 1, dtype=tl.int32)
            f = tl.where(going[:, None] > 0, risen, f)
            count += going
        else:
            f = anchor + tau * log_sum
        d = scores - f[:, :, None]
        anchor, log_sum = log_sum_exp(d, inv_columns, inv_tau, 1, HISTORY)
        if HISTORY:
            at, inside = _vectors(history_ptr, 2 * t, B, n, M, N)
            tl.store(at, anchor, mask=inside)
            at, inside = _vectors(history_ptr, 2 * t + 1, B, n, M, N)
            tl.store(at, log_sum, mask=inside)
        else:
            x = (d - anchor[:, None, :]) * inv_tau - log_sum[:, None, :]
        g = anchor + tau * log_sum
        t += 1
        if SUMS:
            t = tl.where(tl.max(going, axis=0) > 0, t, iterations)
    if SUMS and HISTORY:
        count_at, real = _counts(counts_ptr, B, M)
        tl.store(count_at, count, mask=real)
    if not HISTORY:
        if SUMS:
            x = tl.where(count[:, None, None] > 0, x, scores * (1.0 / tl.load(taus_ptr)))
        p = exponential(x, False)
        p = tl.where(broken[:, None, None], float("nan"), p)
        _store(p_ptr, p, _wanted(counts_ptr, B, M, SUMS), B, n, M, N)


@triton.jit
def _columns_before(history_ptr, taus_ptr, t, B, n, M: tl.constexpr, N: tl.constexpr):
    """(M, N): the potential of the columns that iteration t starts from; 0 before the first."""
    before = tl.maximum(t - 1, 0)
    at, inside = _vectors(history_ptr, 2 * before, B, n, M, N)
    later = inside & (t + tl.zeros((M, N), dtype=tl.int32) > 0)
    g = tl.load(at, mask=later, other=0.0)
    at, _ = _vectors(history_ptr, 2 * before + 1, B, n, M, N)
    return g + tl.load(taus_ptr + before) * tl.load(at, mask=later, other=0.0)


@triton.jit(do_not_specialize=["iterations"])
def resident_bwd(
    grad_ptr,  # (B, n, n)
    stride_grad_B, stride_grad_I,
    dscores_ptr,  # (B, n, n) contiguous
    drows_ptr,  # (B, n), zeros
    dcolumns_ptr,  # (B, n), zeros
    scores_ptr,  # (B, n, n)
    taus_ptr,  # (iterations)
    history_ptr,  # (iterations, 2, B, n)
    rows_ptr,  # (B, n)
    columns_ptr,  # (B, n)
    counts_ptr,  # (B): with SUMS, iterations that were taken; else int32, 1 for a matrix that these are for
    stride_scores_B, stride_scores_I, B, n, iterations,
    M: tl.constexpr, N: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    if not SUMS:
        if tl.max(_wanted(counts_ptr, B, M, SUMS).to(tl.int32), axis=0) == 0:
            return
    scores = _load(scores_ptr, stride_scores_B, stride_scores_I, B, n, M, N, -float("inf"))
    broken = _broken(scores)
    scores = tl.where(broken[:, None, None], 0.0, scores)
    ds = _load(grad_ptr, stride_grad_B, stride_grad_I, B, n, M, N, 0.0)  # dP until the first step
    df = tl.zeros((M, N), dtype=tl.float64)
    dg = tl.zeros((M, N), dtype=tl.float64)
    last = iterations - 1
    last_tau = tl.load(taus_ptr + last)
    if SUMS:
        count_at, real = _counts(counts_ptr, B, M)
        count = tl.load(count_at, mask=real, other=0)
        last = tl.max(count, axis=0) - 1
        ds *= tl.where(count[:, None, None] > 0, 1.0, tl.exp(scores * (1.0 / tl.load(taus_ptr))))
    t = last
    while t >= 0:
        tau = tl.load(taus_ptr + t)
        inv_tau = 1.0 / tau
        d = scores - _columns_before(history_ptr, taus_ptr, t, B, n, M, N)[:, None, :]
        inv_rows = _inverse(rows_ptr, B, n, M, N, SUMS)
        row_anchor, row_log = log_sum_exp(d, inv_rows, inv_tau, 2, True)
        f = row_anchor + tau * row_log
        rows_normal = tl.exp((d - row_anchor[:, :, None]) * inv_tau - row_log[:, :, None])
        at, inside = _vectors(history_ptr, 2 * t, B, n, M, N)
        anchor = tl.load(at, mask=inside, other=0.0)
        at, inside = _vectors(history_ptr, 2 * t + 1, B, n, M, N)
        log_sum = tl.load(at, mask=inside, other=0.0)
        columns_normal = tl.exp(((scores - f[:, :, None]) - anchor[:, None, :]) * inv_tau - log_sum[:, None, :])
        if SUMS and M > 1:
            starts = count == t + 1
            ds = tl.where(starts[:, None, None], columns_normal * ds, ds)
            df = tl.where(starts[:, None], -tl.sum(ds, axis=2), 0.0)
            dg = tl.where(starts[:, None], -tl.sum(ds, axis=1), dg)
        elif t == last:
            ds = columns_normal * ds
            df = -tl.sum(ds, axis=2)
            dg = -tl.sum(ds, axis=1)
        if SUMS:
            dg *= _inverse(columns_ptr, B, n, M, N, SUMS)
            _lower(dcolumns_ptr, dg * (tau / last_tau), B, n, M, N)
        change = columns_normal * dg[:, None, :]
        ds += change
        df -= tl.sum(change, axis=2)
        if SUMS:
            df *= inv_rows
            _lower(drows_ptr, df * (tau / last_tau), B, n, M, N)
            tl.debug_barrier()  # the next turn may read these gradients from other threads
        change = rows_normal * df[:, :, None]
        ds += change
        dg = -tl.sum(change, axis=1)
        df = tl.zeros((M, N), dtype=tl.float64)
        t -= 1
    ds = ds / last_tau
    ds = tl.where(broken[:, None, None], float("nan"), ds)
    _store(dscores_ptr, ds, _wanted(counts_ptr, B, M, SUMS), B, n, M, N)
    if SUMS:
        at, inside = _vectors(drows_ptr, 0, B, n, M, N)
        tl.store(at, float("nan"), mask=inside & broken[:, None])
        at, inside = _vectors(dcolumns_ptr, 0, B, n, M, N)
        tl.store(at, float("nan"), mask=inside & broken[:, None])
