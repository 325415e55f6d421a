"""Sinkhorn's iteration on k = exp((scores - row maximum) / tau), computed once and scaled: P = diag(u) k diag(v).

For matrices whose rows have so small a range that k, u and v are normal floating-point numbers. The kernels write a
flag for each matrix: 1 if the matrix needs logarithms, else 0. The kernels of _sinkhorn_resident.py run next and
compute the matrices with flag 1.

From n = 9 on both kernels can stop early. The result of a matrix does not depend on the others of its program.
* Forward stops when an iteration leaves v of all the program's matrices unchanged: later iterations would too.
* Backward sets dg of a matrix to 0 when the remaining t iterations can add almost nothing, and stops when dg of all the
  program's matrices is 0. A and B of ops/sinkhorn.py are the matrix after an iteration's row step and after its column
  step. Rows of A and columns of B sum to one, so sum |dg| does not grow. Their entries are at most 1, so t iterations
  add at most 2 t sum |dg| to an entry of tau dS. The condition t sum |dg| <= 2^-45 sum |P * dP| keeps this below
  6e-14 sum |P * dP|.

Backward is in float64: near convergence the terms of an entry of the gradient can cancel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.backends.triton._sinkhorn_resident import _broken, _load, _scalars, _store, _vectors

# A matrix is scaled if each row of scores / tau has a range below FLOAT_RANGE (forward) or DOUBLE_RANGE (backward):
# k, u and v are then normal numbers of float32 or float64.
FLOAT_RANGE = tl.constexpr(60.0)
DOUBLE_RANGE = tl.constexpr(300.0)
EARLY = tl.constexpr(16)  # smallest N, n rounded up to a power of 2, with which kernels can stop early
NEGLIGIBLE = tl.constexpr(2.0**-45)
SMALL_SHARE = tl.constexpr(2.0**-22)  # share of sum |P * dP| below which backward continues in float32
LAST_BIT = tl.constexpr(2.0**-53)
SMALL_CHANGE = tl.constexpr(2.0**-26)  # relative change of v below which it does


@triton.jit
def _spans(scores, B, n, M: tl.constexpr, N: tl.constexpr):
    """(M): for each matrix, the largest range (maximum - minimum) of its rows."""
    matrix = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    i = tl.arange(0, N)
    low = tl.min(tl.where((i < n)[None, None, :], scores, float("inf")), axis=2)
    real = (matrix < B)[:, None] & (i < n)[None, :]
    # A row with -inf has an infinite range. A row of -inf alone would give NaN, which the maximum would ignore.
    span = tl.where(low > -float("inf"), tl.max(scores, axis=2) - low, float("inf"))
    return tl.max(tl.where(real, span, 0.0), axis=1)


@triton.jit
def _begin(
    scores_ptr, stride_scores_B, stride_scores_I, taus_ptr, slow_ptr, B, n, limit, M: tl.constexpr, N: tl.constexpr
):
    """(which matrices are scaled, which hold NaN or +inf, log(k), 1 / tau). Writes the flags."""
    scores = _load(scores_ptr, stride_scores_B, stride_scores_I, B, n, M, N, -float("inf"))
    broken = _broken(scores)
    scores = tl.where(broken[:, None, None], 0.0, scores)
    inv_tau = 1.0 / tl.load(taus_ptr)
    ptrs, real = _scalars(slow_ptr, B, M)
    scaled = (_spans(scores, B, n, M, N) * inv_tau < limit) & real
    tl.store(ptrs, (scaled | broken).to(tl.int32) ^ 1, mask=real)
    largest = tl.max(scores, axis=2)
    largest = tl.where(largest > -float("inf"), largest, 0.0)  # padding rows hold only -inf
    # A matrix that is not scaled gets k = 0, so that it stops changing within two iterations.
    x = tl.where(scaled[:, None, None], (scores - largest[:, :, None]) * inv_tau, -float("inf"))
    return scaled, broken, x, inv_tau


@triton.jit
def inverse_of(total):
    return tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)


@triton.jit
def differ(x, y):
    return tl.max(tl.max((x != y).to(tl.int32), axis=1), axis=0)


@triton.jit(do_not_specialize=["iterations"])
def scaled_fwd(
    scores_ptr,  # (B, n, n)
    taus_ptr,  # (iterations), all equal
    p_ptr,  # (B, n, n) contiguous
    slow_ptr,  # (B) int32, receives 1 if a matrix needs logarithms (its p is not written), else 0
    stride_scores_B, stride_scores_I, B, n, iterations,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    scaled, broken, x, _ = _begin(
        scores_ptr, stride_scores_B, stride_scores_I, taus_ptr, slow_ptr, B, n, FLOAT_RANGE, M, N
    )
    k = tl.exp(x.to(tl.float32))
    u = tl.zeros((M, N), dtype=tl.float32)
    v = tl.full((M, N), 1.0, dtype=tl.float32)
    steps = iterations * tl.max(scaled.to(tl.int32), axis=0)
    t = 0
    while t < steps:
        u = inverse_of(tl.sum(k * v[:, None, :], axis=2))
        before = v
        v = inverse_of(tl.sum(k * u[:, :, None], axis=1))
        t += 1
        if N >= EARLY:
            t = tl.where(differ(v, before) > 0, t, steps)
    p = tl.where(broken[:, None, None], float("nan"), k * u[:, :, None] * v[:, None, :])
    _store(p_ptr, p, scaled | broken, B, n, M, N)


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
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    scaled, broken, x, inv_tau = _begin(
        scores_ptr, stride_scores_B, stride_scores_I, taus_ptr, slow_ptr, B, n, DOUBLE_RANGE, M, N
    )
    k = tl.exp(x)
    u = tl.zeros((M, N), dtype=tl.float64)
    v = tl.full((M, N), 1.0, dtype=tl.float64)
    steps = iterations * tl.max(scaled.to(tl.int32), axis=0)
    last = steps - 1  # the last iteration that is computed; later iterations would have the same u and v
    t = 0
    while t <= last:
        u = inverse_of(tl.sum(k * v[:, None, :], axis=2))
        before = v
        v = inverse_of(tl.sum(k * u[:, :, None], axis=1))
        ptrs, inside = _vectors(history_ptr, 2 * t, B, n, M, N)
        tl.store(ptrs, u, mask=inside)
        ptrs, inside = _vectors(history_ptr, 2 * t + 1, B, n, M, N)
        tl.store(ptrs, v, mask=inside)
        if N >= EARLY:
            last = tl.where(differ(v, before) > 0, last, t)
        t += 1
    tl.debug_barrier()  # threads read u and v that other threads have stored
    # dscores = k * h / tau. k * h starts as w = P * dP.
    grad = _load(grad_ptr, stride_grad_B, stride_grad_I, B, n, M, N, 0.0)
    h = u[:, :, None] * v[:, None, :] * tl.where(scaled[:, None, None], grad, 0.0)
    df = -tl.sum(k * h, axis=2)
    dg = -tl.sum(k * h, axis=1)
    negligible = tl.sum(tl.sum(tl.abs(k * h), axis=2), axis=1) * NEGLIGIBLE
    t = steps - 1
    while t >= 0:
        ptrs, inside = _vectors(history_ptr, 2 * tl.minimum(t, last), B, n, M, N)
        u = tl.load(ptrs, mask=inside, other=0.0)
        y = dg * v
        ptrs, inside = _vectors(history_ptr, 2 * tl.maximum(tl.minimum(t - 1, last), 0) + 1, B, n, M, N)
        later = inside & (t + tl.zeros((M, N), dtype=tl.int32) > 0)  # before the first iteration v is 1
        v = tl.load(ptrs, mask=later, other=1.0)
        dx = u * (df - u * tl.sum(k * y[:, None, :], axis=2))
        h = tl.fma(u[:, :, None], y[:, None, :], tl.fma(dx[:, :, None], v[:, None, :], h))
        dg = -tl.sum(k * dx[:, :, None], axis=1) * v
        df = tl.zeros((M, N), dtype=tl.float64)
        if N >= EARLY:
            over = tl.sum(tl.abs(dg), axis=1) * t <= negligible
            dg = tl.where(over[:, None], 0.0, dg)
            t = tl.where(tl.min(over.to(tl.int32), axis=0) > 0, 0, t)
        t -= 1
    ds = tl.where(broken[:, None, None], float("nan"), k * h * inv_tau)
    _store(dscores_ptr, ds, scaled | broken, B, n, M, N)
