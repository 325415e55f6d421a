# ruff: noqa: RUF005 (Triton's language has no (*x, y), so tuples grow as x = x + (y,))
# mypy: disable-error-code="assignment"
"""The kernels of _sinkhorn_scaled.py for n <= 8: a thread has a whole matrix up to n = 4, above it 2 of 8 columns.

A program has M matrices, in tuples of tensors (M, LANES): one element of each tensor for each thread. So no layout that
a release of Triton may choose decides what a thread has, and products are added fused, which Triton's sums are not.
Thread (m, l) has columns l, l + LANES, ... of matrix m, C = N / LANES of them. Element (i, c) of a tuple of elements is
x[i * C + c]; other tuples have an entry for each row or each of these columns.
Neither kernel stops early, and backward is in float64 throughout: so few columns converge slowly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.backends.triton._sinkhorn_scaled import DOUBLE_RANGE, FLOAT_RANGE
from moe_kernels.backends.triton._sinkhorn_tiles import exponential, inverse_of, limit_for, to_double

# Compilation takes seconds, so all sizes and addresses share one: loads are of one element, so multiples of 16 gain
# nothing.
FORWARD_SIZES = ["stride_scores_B", "stride_scores_I", "B", "n", "iterations"]
ADDRESSES = ["grad_ptr", "dscores_ptr", "scores_ptr", "p_ptr"]


@triton.jit
def _matrix(M: tl.constexpr):
    return (tl.program_id(0).to(tl.int64) * M + tl.arange(0, M))[:, None]


@triton.jit
def _row(i):
    return tl.full((1, 1), i, dtype=tl.int32)


@triton.jit
def _column(c: tl.constexpr, LANES: tl.constexpr):
    return (c * LANES + tl.arange(0, LANES))[None, :]


@triton.jit
def _load(ptr, stride_B, stride_I, which, n, other, M: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr):
    """The matrices that the mask `which` (M, 1) selects, in float32."""
    start, x = ptr + _matrix(M) * stride_B, ()
    for i in tl.static_range(N):
        for c in tl.static_range(N // LANES):
            j = _column(c, LANES)
            one = tl.load(start + (i * stride_I + j), mask=which & (_row(i) < n) & (j < n), other=other)
            x = x + (one.to(tl.float32),)
    return x


@triton.jit
def _store(ptr, x, which, n, M: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr):
    C: tl.constexpr = N // LANES
    start = ptr + _matrix(M) * n * n
    for i in tl.static_range(N):
        for c in tl.static_range(C):
            j = _column(c, LANES)
            value = x[i * C + c].to(tl.float32).to(ptr.dtype.element_ty)
            tl.store(start + (i * n + j), value, mask=which & (_row(i) < n) & (j < n))


@triton.jit
def _of_u(history_ptr, t, i, B, n, M: tl.constexpr):
    """Pointers to element i of u of iteration t, and their mask: history_ptr[t, 0] is (n, B)."""
    matrix = _matrix(M)
    return history_ptr + ((tl.cast(t, tl.int64) * 2 * n + i) * B + matrix), (_row(i) < n) & (matrix < B)


@triton.jit
def _of_v(history_ptr, t, c: tl.constexpr, B, n, M: tl.constexpr, LANES: tl.constexpr):
    """The same for columns c of v: history_ptr[t, 1] is (n, B) or, if threads share a matrix, (B, n). Neighbouring
    threads then have neighbouring elements, or Triton would give them others and exchange them."""
    matrix, j = _matrix(M), _column(c, LANES)
    start = history_ptr + (tl.cast(t, tl.int64) * 2 + 1) * n * B
    ptrs = start + (j.to(tl.int64) * B + matrix if LANES == 1 else matrix * n + j)
    return ptrs, (j < n) & (matrix < B)


@triton.jit
def _store_vectors(history_ptr, t, u, v, B, n, M: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr):
    for i in tl.static_range(N):
        ptrs, inside = _of_u(history_ptr, t, i, B, n, M)
        tl.store(ptrs, u[i], mask=inside)
    for c in tl.static_range(N // LANES):
        ptrs, inside = _of_v(history_ptr, t, c, B, n, M, LANES)
        tl.store(ptrs, v[c], mask=inside)


@triton.jit
def _load_u(history_ptr, t, B, n, M: tl.constexpr, N: tl.constexpr):
    u = ()
    for i in tl.static_range(N):
        ptrs, inside = _of_u(history_ptr, t, i, B, n, M)
        u = u + (tl.load(ptrs, mask=inside, other=1.0),)
    return u


@triton.jit
def _load_v(history_ptr, t, B, n, M: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr):
    """v after iteration t; 1 for t = -1, before the first."""
    v = ()
    for c in tl.static_range(N // LANES):
        ptrs, inside = _of_v(history_ptr, tl.maximum(t, 0), c, B, n, M, LANES)
        v = v + (tl.load(ptrs, mask=inside & (_row(t) >= 0), other=1.0),)
    return v


@triton.jit
def _sums_of_rows(x, y, N: tl.constexpr, C: tl.constexpr):
    """sum_j x_ij y_j of each row: N tensors (M, 1)."""
    sums = ()
    for i in tl.static_range(N):
        total = x[i * C] * y[0]
        for c in tl.static_range(1, C):
            total = tl.fma(x[i * C + c], y[c], total)
        sums = sums + (tl.sum(total, axis=1)[:, None],)
    return sums


@triton.jit
def _sums_of_columns(x, y, N: tl.constexpr, C: tl.constexpr):
    """sum_i x_ij y_i of each of a thread's columns: C tensors (M, LANES)."""
    sums = ()
    for c in tl.static_range(C):
        total = x[c] * y[0]
        for i in tl.static_range(1, N):
            total = tl.fma(x[i * C + c], y[i], total)
        sums = sums + (total,)
    return sums


@triton.jit
def _full(value, like, COUNT: tl.constexpr, dtype: tl.constexpr):
    x = ()
    for _ in tl.static_range(COUNT):
        x = x + (tl.full(like.shape, value, dtype=dtype),)
    return x


@triton.jit
def _inverses(x, COUNT: tl.constexpr):
    y = ()
    for i in tl.static_range(COUNT):
        y = y + (inverse_of(x[i]),)
    return y


@triton.jit
def _begin(
    scores_ptr, stride_B, stride_I, taus_ptr, slow_ptr, B, n, limit,
    M: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """(which matrices are scaled, which hold NaN or +inf, the scores of those that are scaled, else -inf, the rows'
    maxima, 1 / tau). Writes the flags."""
    C: tl.constexpr = N // LANES
    matrix = _matrix(M)
    s = _load(scores_ptr, stride_B, stride_I, matrix < B, n, -float("inf"), M, N, LANES)
    broken = tl.zeros((M, LANES), dtype=tl.int32)
    span = tl.zeros((M, 1), dtype=tl.float32)
    largest = ()
    for i in tl.static_range(N):
        high, low = s[i * C], tl.full((M, LANES), float("inf"), tl.float32)
        for c in tl.static_range(C):
            x = s[i * C + c]
            broken |= (x < float("inf")).to(tl.int32) ^ 1
            high = tl.maximum(high, x)
            low = tl.minimum(low, tl.where(_column(c, LANES) < n, x, float("inf")))
        high, low = tl.max(high, axis=1)[:, None], tl.min(low, axis=1)[:, None]
        # A row with -inf has an infinite range. A row of -inf alone would give NaN, which the maximum would ignore.
        row = tl.where(low > -float("inf"), high - low, float("inf"))
        span = tl.maximum(span, tl.where(_row(i) < n, row, 0.0))
        largest = largest + (tl.where(high > -float("inf"), high, 0.0),)  # padding rows hold only -inf
    broken = tl.max(broken, axis=1)[:, None] > 0
    inv_tau = 1.0 / tl.load(taus_ptr)
    scaled = (span.to(tl.float64) * inv_tau < limit_for(inv_tau, limit)) & (broken == 0)
    tl.store(slow_ptr + matrix, (scaled | broken).to(tl.int32) ^ 1, mask=matrix < B)
    kept = ()
    for i in tl.static_range(N * C):
        kept = kept + (tl.where(scaled, s[i], -float("inf")),)
    return scaled, broken, kept, largest, inv_tau


@triton.jit(do_not_specialize=FORWARD_SIZES, do_not_specialize_on_alignment=ADDRESSES)
def scaled_few_fwd(
    scores_ptr,  # (B, n, n)
    taus_ptr,  # (iterations), all equal
    p_ptr,  # (B, n, n) contiguous
    slow_ptr,  # (B) int32, receives 1 if a matrix needs logarithms (its p is not written), else 0
    stride_scores_B, stride_scores_I, B, n, iterations,
    M: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = N // LANES
    scaled, broken, s, largest, inv_tau = _begin(
        scores_ptr, stride_scores_B, stride_scores_I, taus_ptr, slow_ptr, B, n, FLOAT_RANGE, M, N, LANES
    )
    k = ()
    for i in tl.static_range(N):
        for c in tl.static_range(C):
            k = k + (exponential(s[i * C + c] - largest[i], inv_tau),)
    u = _full(0.0, scaled, N, tl.float32)
    v = _full(1.0, s[0], C, tl.float32)
    for _ in range(iterations * tl.max(scaled.to(tl.int32))):
        u = _inverses(_sums_of_rows(k, v, N, C), N)
        v = _inverses(_sums_of_columns(k, u, N, C), C)
    p = ()
    for i in tl.static_range(N):
        for c in tl.static_range(C):
            p = p + (tl.where(broken, float("nan"), k[i * C + c] * u[i] * v[c]),)
    _store(p_ptr, p, (scaled | broken) & (_matrix(M) < B), n, M, N, LANES)


@triton.jit(
    do_not_specialize=[*FORWARD_SIZES, "stride_grad_B", "stride_grad_I"], do_not_specialize_on_alignment=ADDRESSES
)
def scaled_few_bwd(
    grad_ptr,  # (B, n, n)
    stride_grad_B, stride_grad_I,
    dscores_ptr,  # (B, n, n) contiguous
    scores_ptr,  # (B, n, n)
    taus_ptr,  # (iterations), all equal
    history_ptr,  # (iterations, 2, n * B), receives u and v: see _of_u and _of_v
    slow_ptr,  # (B) int32, receives 1 if a matrix needs logarithms (its dscores is not written), else 0
    stride_scores_B, stride_scores_I, B, n, iterations,
    M: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = N // LANES
    scaled, broken, s, largest, inv_tau = _begin(
        scores_ptr, stride_scores_B, stride_scores_I, taus_ptr, slow_ptr, B, n, DOUBLE_RANGE, M, N, LANES
    )
    k = ()
    for i in tl.static_range(N):
        for c in tl.static_range(C):
            k = k + (tl.exp((to_double(s[i * C + c]) - largest[i].to(tl.float64)) * inv_tau),)
    u = _full(0.0, scaled, N, tl.float64)
    v = _full(1.0, s[0], C, tl.float64)
    steps = iterations * tl.max(scaled.to(tl.int32))
    for t in range(steps):
        u = _inverses(_sums_of_rows(k, v, N, C), N)
        v = _inverses(_sums_of_columns(k, u, N, C), C)
        _store_vectors(history_ptr, t, u, v, B, n, M, N, LANES)
    tl.debug_barrier()  # threads read u that other threads have stored
    grad = _load(grad_ptr, stride_grad_B, stride_grad_I, scaled & (_matrix(M) < B), n, 0.0, M, N, LANES)
    h = ()  # as in scaled_bwd
    for i in tl.static_range(N):
        for c in tl.static_range(C):
            h = h + (u[i] * inv_tau * v[c] * grad[i * C + c].to(tl.float64),)
    weight = ()
    for i in tl.static_range(N * C):
        weight = weight + (k[i] * h[i],)
    df = _sums_of_rows(weight, _full(-1.0, s[0], C, tl.float64), N, C)
    dg = _sums_of_columns(weight, _full(-1.0, scaled, N, tl.float64), N, C)
    t = steps - 1
    while t >= 0:
        u = _load_u(history_ptr, t, B, n, M, N)
        y = ()
        for c in tl.static_range(C):
            y = y + (dg[c] * v[c],)
        v = _load_v(history_ptr, t - 1, B, n, M, N, LANES)
        sums, dx = _sums_of_rows(k, y, N, C), ()
        for i in tl.static_range(N):
            dx = dx + (u[i] * tl.fma(-u[i], sums[i], df[i]),)
        before, h = h, ()
        for i in tl.static_range(N):
            for c in tl.static_range(C):
                h = h + (tl.fma(u[i], y[c], tl.fma(dx[i], v[c], before[i * C + c])),)
        sums, dg = _sums_of_columns(k, dx, N, C), ()
        for c in tl.static_range(C):
            dg = dg + (-v[c] * sums[c],)
        df = _full(0.0, scaled, N, tl.float64)
        t -= 1
    ds = ()
    for i in tl.static_range(N * C):
        ds = ds + (tl.where(broken, float("nan"), k[i] * h[i]),)
    _store(dscores_ptr, ds, (scaled | broken) & (_matrix(M) < B), n, M, N, LANES)
