"""Sinkhorn's iteration in logarithms for n > 64, or n > 32 in streamed_bwd with SUMS. A program has one matrix and
reads it in every iteration, ROWS rows at a time. f, g, SUMS and flags: see _sinkhorn_resident.py."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.backends.triton._sinkhorn_resident import exponential, log_of, log_sum_exp


@triton.jit
def _strip(ptr, stride_B, stride_I, first, n, ROWS: tl.constexpr, N: tl.constexpr, other):
    """Rows of the program's matrix from `first` on, (ROWS, N) in float64, padded with `other`."""
    i = first + tl.arange(0, ROWS)
    j = tl.arange(0, N)
    offsets = tl.program_id(0).to(tl.int64) * stride_B + i.to(tl.int64)[:, None] * stride_I + j[None, :]
    x = tl.load(ptr + offsets, mask=(i < n)[:, None] & (j < n)[None, :], other=other)
    return x.to(tl.float32).to(tl.float64)


@triton.jit
def _store_strip(ptr, x, first, n, ROWS: tl.constexpr, N: tl.constexpr):
    i = first + tl.arange(0, ROWS)
    j = tl.arange(0, N)
    offsets = tl.program_id(0).to(tl.int64) * n * n + (i[:, None] * n + j[None, :])
    inside = (i < n)[:, None] & (j < n)[None, :]
    tl.store(ptr + offsets, x.to(tl.float32).to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _broken_matrix(scores_ptr, stride_B, stride_I, n, ROWS: tl.constexpr, N: tl.constexpr):
    """0 or 1: whether the program's matrix holds NaN or +inf."""
    found = 0
    for first in range(0, n, ROWS):
        s = _strip(scores_ptr, stride_B, stride_I, first, n, ROWS, N, -float("inf"))
        found = tl.maximum(found, tl.max(tl.max((s < float("inf")).to(tl.int32) ^ 1, axis=1), axis=0))
    return found


@triton.jit
def _inverse(ptr, first, n, SIZE: tl.constexpr, SUMS: tl.constexpr):
    """(SIZE): 1 / the prescribed sums of rows or columns from `first` on; 1 without SUMS."""
    y = tl.full((SIZE,), 1.0, dtype=tl.float64)
    if SUMS:
        ptrs, inside = _vector(ptr, first, n, SIZE)
        y = 1.0 / tl.load(ptrs, mask=inside, other=1.0)
    return y


@triton.jit
def _vector(ptr, first, n, SIZE: tl.constexpr):
    """Pointers (SIZE) to the program's row of ptr (B, n), from `first` on, and their mask."""
    i = first + tl.arange(0, SIZE)
    return ptr + tl.program_id(0).to(tl.int64) * n + i, i < n


@triton.jit
def _subtract(ptr, d, first, n, SIZE: tl.constexpr):
    """Subtracts d (SIZE) from the program's row of ptr (B, n), from `first` on."""
    ptrs, inside = _vector(ptr, first, n, SIZE)
    tl.store(ptrs, tl.load(ptrs, mask=inside, other=0.0) - d, mask=inside)


@triton.jit
def _columns_near(
    scores_ptr, stride_B, stride_I, n, inv_columns, inv_tau, tolerance, ROWS: tl.constexpr, N: tl.constexpr
):
    """0 or 1: whether all columns of exp(scores / tau), except those of -inf, have sums within the tolerance."""
    total = tl.zeros((N,), dtype=tl.float64)
    largest = tl.full((N,), -float("inf"), dtype=tl.float64)
    for first in range(0, n, ROWS):
        s = _strip(scores_ptr, stride_B, stride_I, first, n, ROWS, N, -float("inf"))
        total += tl.sum(tl.exp(s * inv_tau), axis=0)
        largest = tl.maximum(largest, tl.max(s, axis=0))
    near = tl.abs(total * inv_columns - 1.0) <= tolerance * inv_columns
    return tl.min((near | (largest == -float("inf"))).to(tl.int32), axis=0)


@triton.jit
def _potentials(ptr, t, first, n, ROWS: tl.constexpr):
    """Pointers (ROWS) to the row potentials after iteration t, and their mask. ptr (B, 2, n) keeps the potentials of
    two iterations: those of t + 1 replace those of t - 1."""
    i = first + tl.arange(0, ROWS)
    return ptr + (tl.program_id(0).to(tl.int64) * 2 + t % 2) * n + i, i < n


@triton.jit
def _rows_near(potentials_ptr, inv_rows, f, t, first, n, inv_tau, tolerance, ROWS: tl.constexpr):
    """0 or 1: whether the sums of ROWS rows before iteration t are within the tolerance; rows of -inf alone are left
    out. The other sums are the prescribed ones times exp((f - before) / tau), where f and `before` are the row
    potentials after iterations t and t - 1."""
    ptrs, inside = _potentials(potentials_ptr, t + 1, first, n, ROWS)
    before = tl.load(ptrs, mask=inside & (t + tl.zeros((ROWS,), dtype=tl.int32) > 0), other=0.0)
    error = tl.abs(tl.exp((f - before) * inv_tau) - 1.0)
    return tl.min((error <= tolerance * inv_rows).to(tl.int32), axis=0)


@triton.jit
def _column_pointers(ptr, t, B, n, N: tl.constexpr):
    """(pointers (N) to the column anchors of iteration t, distance in elements from an anchor to its logarithm, mask).
    ptr: history_ptr of the kernels."""
    j = tl.arange(0, N)
    return ptr + ((t * 2).to(tl.int64) * B + tl.program_id(0)) * n + j, tl.cast(n, tl.int64) * B, j < n


@triton.jit(do_not_specialize=["iterations"])
def streamed_fwd(
    scores_ptr,  # (B, n, n)
    taus_ptr,  # (iterations)
    p_ptr,  # (B, n, n) contiguous; not written if HISTORY
    history_ptr,  # (iterations, 2, B, n) column anchors and logarithms; not written unless HISTORY
    rows_ptr,  # (B, n) prescribed sums; not read unless SUMS
    columns_ptr,  # (B, n) prescribed sums; not read unless SUMS
    counts_ptr,  # (B) int32: without SUMS 1 for a matrix to compute; with SUMS and HISTORY receives iteration counts
    stride_scores_B, stride_scores_I, B, n, iterations,
    tolerance: tl.float64,  # below 0 for none
    potentials_ptr,  # (B, 2, n): f of the last two iterations; not used unless SUMS
    ROWS: tl.constexpr, N: tl.constexpr, HISTORY: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    if not SUMS:
        if tl.load(counts_ptr + tl.program_id(0)) == 0:
            return
    broken = _broken_matrix(scores_ptr, stride_scores_B, stride_scores_I, n, ROWS, N) > 0
    before = tl.zeros((N,), dtype=tl.float64)
    g = tl.zeros((N,), dtype=tl.float64)
    anchor = tl.zeros((N,), dtype=tl.float64)
    log_sum = tl.zeros((N,), dtype=tl.float64)
    near = 0
    count = iterations
    if SUMS:
        if tolerance >= 0:
            inv_columns = _inverse(columns_ptr, 0, n, N, SUMS)
            inv_tau = 1.0 / tl.load(taus_ptr)
            near = _columns_near(
                scores_ptr, stride_scores_B, stride_scores_I, n, inv_columns, inv_tau, tolerance, ROWS, N
            )
        near = tl.where(broken, 0, near)
    t = 0
    while t < iterations:
        tau = tl.load(taus_ptr + t)
        inv_tau = 1.0 / tau
        before = g
        largest = tl.full((N,), -float("inf"), dtype=tl.float64)
        total = tl.zeros((N,), dtype=tl.float64)
        for first in range(0, n, ROWS):
            s = _strip(scores_ptr, stride_scores_B, stride_scores_I, first, n, ROWS, N, -float("inf"))
            inv_rows = _inverse(rows_ptr, first, n, ROWS, SUMS)
            row_anchor, row_log = log_sum_exp(s - before[None, :], inv_rows, inv_tau, 1, HISTORY)
            f = row_anchor + tau * row_log
            if SUMS:
                ptrs, inside = _potentials(potentials_ptr, t, first, n, ROWS)
                tl.store(ptrs, f, mask=inside)
                if tolerance >= 0:
                    near *= _rows_near(potentials_ptr, inv_rows, f, t, first, n, inv_tau, tolerance, ROWS)
            d = s - f[:, None]
            # The anchor of a column is its largest d so far. `total`, the sum of exp((d - anchor) / tau) so far, is
            # rescaled when the anchor grows.
            new_largest = tl.maximum(largest, tl.max(d, axis=0))
            anchor = tl.where(new_largest > -float("inf"), new_largest, 0.0)
            total = total * exponential((largest - anchor) * inv_tau, HISTORY)
            total += tl.sum(exponential((d - anchor[None, :]) * inv_tau, HISTORY), axis=0)
            largest = new_largest
        log_sum = log_of(total * _inverse(columns_ptr, 0, n, N, SUMS))
        if HISTORY:
            ptrs, step, inside = _column_pointers(history_ptr, t, B, n, N)
            tl.store(ptrs, anchor, mask=inside)
            tl.store(ptrs + step, log_sum, mask=inside)
        g = anchor + tau * log_sum
        t += 1
        if SUMS:
            if (near > 0) & (tolerance >= 0):
                if not HISTORY:  # the matrix met the tolerance before this iteration: p is from the previous f and g
                    anchor = before
                    log_sum = tl.zeros((N,), dtype=tl.float64)
                count = t - 1
                t = iterations
            near = 1
            tl.debug_barrier()  # the next iteration may load potentials that other threads have stored
    if SUMS and HISTORY:
        tl.store(counts_ptr + tl.program_id(0), count)
    if not HISTORY:
        tau = tl.load(taus_ptr + iterations - 1)
        inv_tau = 1.0 / tau
        for first in range(0, n, ROWS):
            s = _strip(scores_ptr, stride_scores_B, stride_scores_I, first, n, ROWS, N, -float("inf"))
            if SUMS:
                ptrs, inside = _potentials(potentials_ptr, count + 1, first, n, ROWS)
                f = tl.load(ptrs, mask=inside & (count + tl.zeros((ROWS,), dtype=tl.int32) > 0), other=0.0)
            else:
                row_anchor, row_log = log_sum_exp(s - before[None, :], 1.0, inv_tau, 1, False)
                f = row_anchor + tau * row_log
            p = exponential(((s - f[:, None]) - anchor[None, :]) * inv_tau - log_sum[None, :], False)
            _store_strip(p_ptr, tl.where(broken, float("nan"), p), first, n, ROWS, N)


@triton.jit
def _column_state(history_ptr, taus_ptr, t, B, n, N: tl.constexpr):
    """Column anchors and logarithms after iteration t, and the column potentials before iteration t."""
    ptrs, step, inside = _column_pointers(history_ptr, t, B, n, N)
    anchor = tl.load(ptrs, mask=inside, other=0.0)
    log_sum = tl.load(ptrs + step, mask=inside, other=0.0)
    earlier = inside & (t + tl.zeros((N,), dtype=tl.int32) > 0)  # before the first iteration g is 0
    tau = tl.load(taus_ptr + tl.maximum(t - 1, 0))
    before = tl.load(ptrs - 2 * step, mask=earlier, other=0.0) + tau * tl.load(ptrs - step, mask=earlier, other=0.0)
    return anchor, log_sum, before


@triton.jit
def _bwd_without_iterations(
    grad_ptr, stride_grad_B, stride_grad_I, dscores_ptr, scores_ptr, stride_B, stride_I, inv_tau, n,
    ROWS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of a matrix without iterations, P = exp(scores / tau)."""
    for first in range(0, n, ROWS):
        s = _strip(scores_ptr, stride_B, stride_I, first, n, ROWS, N, -float("inf"))
        grad = _strip(grad_ptr, stride_grad_B, stride_grad_I, first, n, ROWS, N, 0.0)
        _store_strip(dscores_ptr, tl.exp(s * inv_tau) * grad * inv_tau, first, n, ROWS, N)


@triton.jit(do_not_specialize=["iterations"])
def streamed_bwd(
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
    sums_ptr,  # (B, n, n) scratch memory: dscores * last_tau so far
    ROWS: tl.constexpr, N: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    if not SUMS:
        if tl.load(counts_ptr + tl.program_id(0)) == 0:
            return
    broken = _broken_matrix(scores_ptr, stride_scores_B, stride_scores_I, n, ROWS, N) > 0
    last = iterations - 1
    last_tau = tl.load(taus_ptr + last)
    dg = tl.zeros((N,), dtype=tl.float64)
    t = iterations
    if SUMS:
        # resident_fwd computes a matrix with NaN or +inf as if it were zeros, so its count may be 0. With t = 1 the
        # loop below stores NaN in all its entries.
        t = tl.maximum(tl.load(counts_ptr + tl.program_id(0)), broken.to(tl.int32))
        last = t - 1
        if t == 0:
            _bwd_without_iterations(
                grad_ptr, stride_grad_B, stride_grad_I, dscores_ptr, scores_ptr, stride_scores_B, stride_scores_I,
                1.0 / tl.load(taus_ptr), n, ROWS, N,
            )  # fmt: skip
            t -= 1
    while t >= 0:  # the first pass only sums the columns of P * dP; the second pass is the last iteration
        iteration = tl.minimum(t, last)
        tau = tl.load(taus_ptr + iteration)
        inv_tau = 1.0 / tau
        anchor, log_sum, before = _column_state(history_ptr, taus_ptr, iteration, B, n, N)
        if SUMS:
            dg *= _inverse(columns_ptr, 0, n, N, SUMS)
            _subtract(dcolumns_ptr, dg * (tau / last_tau), 0, n, N)
        next_dg = tl.zeros((N,), dtype=tl.float64)
        for first in range(0, n, ROWS):
            s = _strip(scores_ptr, stride_scores_B, stride_scores_I, first, n, ROWS, N, -float("inf"))
            d = s - before[None, :]
            inv_rows = _inverse(rows_ptr, first, n, ROWS, SUMS)
            row_anchor, row_log = log_sum_exp(d, inv_rows, inv_tau, 1, True)
            f = row_anchor + tau * row_log
            columns_normalised = tl.exp(((s - f[:, None]) - anchor[None, :]) * inv_tau - log_sum[None, :])
            i = first + tl.arange(0, ROWS)
            j = tl.arange(0, N)
            inside = (i < n)[:, None] & (j < n)[None, :]
            ptrs = sums_ptr + (tl.program_id(0).to(tl.int64) * n + i[:, None]) * n + j[None, :]
            if t >= last:
                grad = _strip(grad_ptr, stride_grad_B, stride_grad_I, first, n, ROWS, N, 0.0)
                weight = columns_normalised * grad
            else:
                weight = tl.load(ptrs, mask=inside, other=0.0)
            if t > last:
                next_dg -= tl.sum(weight, axis=0)
            else:
                column_change = columns_normalised * dg[None, :]
                df = -tl.sum(column_change, axis=1)
                if t == last:
                    df -= tl.sum(weight, axis=1)
                if SUMS:
                    df *= inv_rows
                    _subtract(drows_ptr, df * (tau / last_tau), first, n, ROWS)
                rows_normalised = tl.exp((d - row_anchor[:, None]) * inv_tau - row_log[:, None])
                row_change = rows_normalised * df[:, None]
                next_dg -= tl.sum(row_change, axis=0)
                weight = weight + column_change + row_change
                tl.store(ptrs, weight, mask=inside)
                if t == 0:
                    ds = tl.where(broken, float("nan"), weight / last_tau)
                    _store_strip(dscores_ptr, ds, first, n, ROWS, N)
        dg = next_dg
        tl.debug_barrier()  # the next pass may load values that other threads have stored
        t -= 1
    if SUMS:
        if broken:
            ptrs, inside = _vector(drows_ptr, 0, n, N)
            tl.store(ptrs, float("nan"), mask=inside)
            ptrs, inside = _vector(dcolumns_ptr, 0, n, N)
            tl.store(ptrs, float("nan"), mask=inside)
