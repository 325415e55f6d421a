"""The kernels of _sinkhorn_scaled.py for n <= 8: a program has M matrices, a thread a matrix or some of its columns.

Matrices are the last dimension of a tile, (N, N, M), so that sums of rows and columns need no shuffles. Triton keeps
neighbouring elements in one thread where it knows that a stride is 1, so the kernels get this stride as a variable.
Triton 3.6 then gives each element of a matrix a thread, and takes four times as many instructions for n = 4.
Neither kernel stops early, and backward is in float64 throughout: so few columns converge slowly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.backends.triton._sinkhorn_scaled import DOUBLE_RANGE, FLOAT_RANGE
from moe_kernels.backends.triton._sinkhorn_tiles import exponential, inverse_of, limit_for


@triton.jit
def _tile(ptr, stride_B, stride_I, one, B, n, M: tl.constexpr, N: tl.constexpr):
    """Pointers (N, N, M) to the program's matrices, and their mask."""
    matrix = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    i = tl.arange(0, N)
    inside = (matrix < B)[None, None, :] & (i < n)[:, None, None] & (i < n)[None, :, None]
    return ptr + (matrix * stride_B)[None, None, :] + (i * stride_I)[:, None, None] + (i * one)[None, :, None], inside


@triton.jit
def _of_iteration(history_ptr, t, which, B, n, M: tl.constexpr, N: tl.constexpr):
    """Pointers (N, M) to u (0) or v (1) of iteration t in history_ptr (iterations, 2, n, B), and their mask."""
    matrix = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    i = tl.arange(0, N)
    row = (tl.cast(t, tl.int64) * 2 + which) * n + i
    return history_ptr + (row * B)[:, None] + matrix[None, :], (i < n)[:, None] & (matrix < B)[None, :]


@triton.jit
def _store_vectors(history_ptr, t, u, v, B, n, M: tl.constexpr, N: tl.constexpr):
    ptrs, inside = _of_iteration(history_ptr, t, 0, B, n, M, N)
    tl.store(ptrs, u, mask=inside)
    ptrs, _ = _of_iteration(history_ptr, t, 1, B, n, M, N)
    tl.store(ptrs, v, mask=inside)


@triton.jit
def _load_vector(history_ptr, t, which, B, n, M: tl.constexpr, N: tl.constexpr):
    """u (0) or v (1) of iteration t; 1 before the first iteration."""
    ptrs, inside = _of_iteration(history_ptr, tl.maximum(t, 0), which, B, n, M, N)
    return tl.load(ptrs, mask=inside & (t + tl.zeros((N, M), dtype=tl.int32) >= 0), other=1.0)


@triton.jit
def _any(x):
    """(M): whether any element of a matrix is True."""
    return tl.max(tl.max(x.to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def _begin(scores_ptr, stride_B, stride_I, one, taus_ptr, slow_ptr, B, n, limit, M: tl.constexpr, N: tl.constexpr):
    """(which matrices are scaled, which hold NaN or +inf, the scores of those that are scaled, else -inf, the rows'
    maxima, 1 / tau). Writes the flags."""
    ptrs, inside = _tile(scores_ptr, stride_B, stride_I, one, B, n, M, N)
    s = tl.load(ptrs, mask=inside, other=-float("inf")).to(tl.float32)
    broken = _any((s < float("inf")) == 0)
    largest = tl.max(s, axis=1)
    low = tl.min(tl.where(inside, s, float("inf")), axis=1)
    # A row with -inf has an infinite range. A row of -inf alone would give NaN, which the maximum would ignore.
    span = tl.where(low > -float("inf"), largest - low, float("inf"))
    span = tl.where((tl.arange(0, N) < n)[:, None], span, 0.0)
    inv_tau = 1.0 / tl.load(taus_ptr)
    scaled = (tl.max(span, axis=0).to(tl.float64) * inv_tau < limit_for(inv_tau, limit)) & (broken == 0)
    matrix = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    tl.store(slow_ptr + matrix, (scaled | broken).to(tl.int32) ^ 1, mask=matrix < B)
    largest = tl.where(largest > -float("inf"), largest, 0.0)  # padding rows hold only -inf
    return scaled, broken, tl.where(scaled[None, None, :], s, -float("inf")), largest[:, None, :], inv_tau


@triton.jit
def _write(ptr, x, which, one, B, n, M: tl.constexpr, N: tl.constexpr):
    """Stores the matrices of x that the mask `which` (M) selects."""
    ptrs, inside = _tile(ptr, n * n, n, one, B, n, M, N)
    tl.store(ptrs, x.to(tl.float32).to(ptr.dtype.element_ty), mask=inside & which[None, None, :])


@triton.jit(do_not_specialize=["iterations", "one"])
def scaled_few_fwd(
    scores_ptr,  # (B, n, n)
    taus_ptr,  # (iterations), all equal
    p_ptr,  # (B, n, n) contiguous
    slow_ptr,  # (B) int32, receives 1 if a matrix needs logarithms (its p is not written), else 0
    stride_scores_B, stride_scores_I, one, B, n, iterations,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    scaled, broken, s, largest, inv_tau = _begin(
        scores_ptr, stride_scores_B, stride_scores_I, one, taus_ptr, slow_ptr, B, n, FLOAT_RANGE, M, N
    )
    k = exponential(s - largest, inv_tau)
    u = tl.zeros((N, M), dtype=tl.float32)
    v = tl.full((N, M), 1.0, dtype=tl.float32)
    for _ in range(iterations * tl.max(scaled.to(tl.int32), axis=0)):
        u = inverse_of(tl.sum(k * v[None, :, :], axis=1))
        v = inverse_of(tl.sum(k * u[:, None, :], axis=0))
    p = tl.where(broken[None, None, :], float("nan"), k * u[:, None, :] * v[None, :, :])
    _write(p_ptr, p, scaled | broken, one, B, n, M, N)


@triton.jit(do_not_specialize=["iterations", "one"])
def scaled_few_bwd(
    grad_ptr,  # (B, n, n)
    stride_grad_B, stride_grad_I,
    dscores_ptr,  # (B, n, n) contiguous
    scores_ptr,  # (B, n, n)
    taus_ptr,  # (iterations), all equal
    history_ptr,  # (iterations, 2, n, B), receives u and v
    slow_ptr,  # (B) int32, receives 1 if a matrix needs logarithms (its dscores is not written), else 0
    stride_scores_B, stride_scores_I, one, B, n, iterations,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    scaled, broken, s, largest, inv_tau = _begin(
        scores_ptr, stride_scores_B, stride_scores_I, one, taus_ptr, slow_ptr, B, n, DOUBLE_RANGE, M, N
    )
    k = tl.exp((s.to(tl.float64) - largest.to(tl.float64)) * inv_tau)
    u = tl.zeros((N, M), dtype=tl.float64)
    v = tl.full((N, M), 1.0, dtype=tl.float64)
    steps = iterations * tl.max(scaled.to(tl.int32), axis=0)
    for t in range(steps):
        u = inverse_of(tl.sum(k * v[None, :, :], axis=1))
        v = inverse_of(tl.sum(k * u[:, None, :], axis=0))
        _store_vectors(history_ptr, t, u, v, B, n, M, N)
    tl.debug_barrier()  # threads read u and v that other threads have stored
    ptrs, inside = _tile(grad_ptr, stride_grad_B, stride_grad_I, one, B, n, M, N)
    grad = tl.load(ptrs, mask=inside & scaled[None, None, :], other=0.0).to(tl.float32).to(tl.float64)
    h = u[:, None, :] * v[None, :, :] * grad  # as in scaled_bwd
    df = -tl.sum(k * h, axis=1)
    dg = -tl.sum(k * h, axis=0)
    t = steps - 1
    while t >= 0:
        u = _load_vector(history_ptr, t, 0, B, n, M, N)
        y = dg * v
        v = _load_vector(history_ptr, t - 1, 1, B, n, M, N)
        dx = u * tl.fma(-u, tl.sum(k * y[None, :, :], axis=1), df)
        h = tl.fma(u[:, None, :], y[None, :, :], tl.fma(dx[:, None, :], v[None, :, :], h))
        dg = -v * tl.sum(k * dx[:, None, :], axis=0)
        df = tl.zeros((N, M), dtype=tl.float64)
        t -= 1
    ds = tl.where(broken[None, None, :], float("nan"), k * h * inv_tau)
    _write(dscores_ptr, ds, scaled | broken, one, B, n, M, N)
