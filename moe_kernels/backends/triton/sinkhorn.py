"""Sinkhorn's iteration in Triton: a program per few matrices, which stay in registers for the whole solve, or, above
RESIDENT, a program per matrix that is read again in every iteration, a few rows at a time.

Potentials are in units of scores and in float64, each an anchor (the largest of what is summed) and the logarithm of
the sum after it, so that exp sees small differences at any temperature: in float32 forward, in float64 backward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.backends.triton import Configuration, unsupported

SINKHORN_LARGEST = 1024  # n
RESIDENT = 64  # n of a matrix that a program holds
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def configurations() -> list[Configuration]:
    """Every dtype, sizes held and read again, forward with and without history, and the backward."""
    pointers = {"scores_ptr": "", "taus_ptr": "*fp64", "p_ptr": "", "history_ptr": "*fp64"}
    sizes = {"stride_scores_B": "i64", "stride_scores_I": "i64", "B": "i32", "n": "i32", "iterations": "i32"}
    grads = {"grad_ptr": "", "stride_grad_B": "i64", "stride_grad_I": "i64", "dscores_ptr": ""}
    found = []
    for short in TYPES.values():
        for n in (4, 16, 64):
            constants, warps = _blocks(n, backward=False)
            fwd = {name: kind or f"*{short}" for name, kind in (pointers | sizes).items()}
            bwd = {name: kind or f"*{short}" for name, kind in (grads | pointers | sizes).items() if name != "p_ptr"}
            for history in (False, True):
                name = f"sinkhorn_fwd {short} {n}{' history' * history}"
                found.append(Configuration(name, _sinkhorn_fwd, fwd, constants | {"HISTORY": history}, warps))
            constants, warps = _blocks(n, backward=True)
            found.append(Configuration(f"sinkhorn_bwd {short} {n}", _sinkhorn_bwd, bwd, constants, warps))
        for n in (128, 1024):
            constants, warps = _strips(n)
            for history in (False, True):
                name = f"sinkhorn_streamed_fwd {short} {n}{' history' * history}"
                found.append(Configuration(name, _streamed_fwd, fwd, constants | {"HISTORY": history}, warps))
            types = bwd | {"sums_ptr": "*fp64"}
            found.append(Configuration(f"sinkhorn_streamed_bwd {short} {n}", _streamed_bwd, types, constants, warps))
    return found


def _blocks(n: int, backward: bool) -> tuple[dict[str, int], int]:
    """Matrices of a program and columns of its tile, and warps: as large as compiles without spills."""
    columns = triton.next_power_of_2(n)
    tile = 512 if backward or columns >= 16 else 1024
    return {"M": max(tile // columns**2, 1), "N": columns}, 8 if columns >= 32 else 4


def _strips(n: int) -> tuple[dict[str, int], int]:
    """Rows and columns of a strip of a matrix that is read again, and warps."""
    columns = triton.next_power_of_2(n)
    return {"ROWS": max(2048 // columns, 1), "N": columns}, 8


@triton.jit
def _load(ptr, stride_B, stride_I, B, n, M: tl.constexpr, N: tl.constexpr, other):
    """(M, N, N) in float64; `other` where there is no element."""
    matrix = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    i = tl.arange(0, N)
    inside = (matrix < B)[:, None, None] & (i < n)[None, :, None] & (i < n)[None, None, :]
    offsets = matrix[:, None, None] * stride_B + i[None, :, None] * stride_I + i[None, None, :]
    return tl.load(ptr + offsets, mask=inside, other=other).to(tl.float32).to(tl.float64)


@triton.jit
def _store(ptr, x, B, n, M: tl.constexpr, N: tl.constexpr):
    matrix = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    i = tl.arange(0, N)
    inside = (matrix < B)[:, None, None] & (i < n)[None, :, None] & (i < n)[None, None, :]
    offsets = (matrix[:, None, None] * n + i[None, :, None]) * n + i[None, None, :]
    tl.store(ptr + offsets, x.to(tl.float32).to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _history(ptr, t, which, B, n, M: tl.constexpr, N: tl.constexpr):
    """Addresses of the anchors (0) or logarithms (1) of the columns after iteration t: ptr is (iterations, 2, B, n)."""
    matrix = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    j = tl.arange(0, N)
    offsets = ((t * 2 + which).to(tl.int64) * B + matrix[:, None]) * n + j[None, :]
    return ptr + offsets, (matrix < B)[:, None] & (j < n)[None, :]


@triton.jit
def _exp(x, WIDE: tl.constexpr):
    if WIDE:
        y = tl.exp(x)
    else:
        y = tl.exp(x.to(tl.float32)).to(tl.float64)
    return y


@triton.jit
def _log_sum(d, inv_tau, AXIS: tl.constexpr, WIDE: tl.constexpr):
    """The largest of d along an axis, and log sum exp of what is above it times inv_tau; 0 and 0 of nothing."""
    most = tl.max(d, axis=AXIS)
    anchor = tl.where(most > -float("inf"), most, 0.0)
    total = tl.sum(_exp((d - tl.expand_dims(anchor, AXIS)) * inv_tau, WIDE), axis=AXIS)
    return anchor, tl.where(total > 0, tl.log(tl.where(total > 0, total, 1.0)), 0.0)


@triton.jit
def _broken(scores):
    """(M): matrices that hold NaN or +inf."""
    return tl.max(tl.max((scores < float("inf")).to(tl.int32) ^ 1, axis=2), axis=1) > 0


@triton.jit
def _sinkhorn_fwd(
    scores_ptr,  # (B, n, n)
    taus_ptr,  # (iterations)
    p_ptr,  # (B, n, n) contiguous
    history_ptr,  # (iterations, 2, B, n)
    stride_scores_B,
    stride_scores_I,
    B,
    n,
    iterations,
    M: tl.constexpr,
    N: tl.constexpr,
    HISTORY: tl.constexpr,
):
    scores = _load(scores_ptr, stride_scores_B, stride_scores_I, B, n, M, N, -float("inf"))
    broken = _broken(scores)
    scores = tl.where(broken[:, None, None], 0.0, scores)
    g = tl.zeros((M, N), dtype=tl.float64)
    x = scores
    t = 0
    while t < iterations:
        tau = tl.load(taus_ptr + t)
        inv_tau = 1.0 / tau
        anchor, log_sum = _log_sum(scores - g[:, None, :], inv_tau, 2, HISTORY)
        d = scores - (anchor + tau * log_sum)[:, :, None]
        anchor, log_sum = _log_sum(d, inv_tau, 1, HISTORY)
        if HISTORY:
            at, inside = _history(history_ptr, t, 0, B, n, M, N)
            tl.store(at, anchor, mask=inside)
            at, inside = _history(history_ptr, t, 1, B, n, M, N)
            tl.store(at, log_sum, mask=inside)
        else:
            x = (d - anchor[:, None, :]) * inv_tau - log_sum[:, None, :]
        g = anchor + tau * log_sum
        t += 1
    if not HISTORY:
        p = tl.where(broken[:, None, None], float("nan"), _exp(x, False))
        _store(p_ptr, p, B, n, M, N)


@triton.jit
def _sinkhorn_bwd(
    grad_ptr,  # (B, n, n)
    stride_grad_B,
    stride_grad_I,
    dscores_ptr,  # (B, n, n) contiguous
    scores_ptr,  # (B, n, n)
    taus_ptr,  # (iterations)
    history_ptr,  # (iterations, 2, B, n)
    stride_scores_B,
    stride_scores_I,
    B,
    n,
    iterations,
    M: tl.constexpr,
    N: tl.constexpr,
):
    scores = _load(scores_ptr, stride_scores_B, stride_scores_I, B, n, M, N, -float("inf"))
    broken = _broken(scores)
    scores = tl.where(broken[:, None, None], 0.0, scores)
    ds = _load(grad_ptr, stride_grad_B, stride_grad_I, B, n, M, N, 0.0)  # dP until the first step
    df = tl.zeros((M, N), dtype=tl.float64)
    dg = tl.zeros((M, N), dtype=tl.float64)
    t = iterations - 1
    while t >= 0:
        tau = tl.load(taus_ptr + t)
        inv_tau = 1.0 / tau
        before = tl.maximum(t - 1, 0)
        at, inside = _history(history_ptr, before, 0, B, n, M, N)
        later = inside & (t + tl.zeros((M, N), dtype=tl.int32) > 0)  # before the first iteration g is 0
        g = tl.load(at, mask=later, other=0.0)
        at, _ = _history(history_ptr, before, 1, B, n, M, N)
        g += tl.load(taus_ptr + before) * tl.load(at, mask=later, other=0.0)
        d = scores - g[:, None, :]
        row_anchor, row_log = _log_sum(d, inv_tau, 2, True)
        f = row_anchor + tau * row_log
        rows_normal = tl.exp((d - row_anchor[:, :, None]) * inv_tau - row_log[:, :, None])
        at, inside = _history(history_ptr, t, 0, B, n, M, N)
        anchor = tl.load(at, mask=inside, other=0.0)
        at, inside = _history(history_ptr, t, 1, B, n, M, N)
        log_sum = tl.load(at, mask=inside, other=0.0)
        columns_normal = tl.exp(((scores - f[:, :, None]) - anchor[:, None, :]) * inv_tau - log_sum[:, None, :])
        if t == iterations - 1:
            ds = columns_normal * ds
            df = -tl.sum(ds, axis=2)
            dg = -tl.sum(ds, axis=1)
        change = columns_normal * dg[:, None, :]
        ds += change
        df -= tl.sum(change, axis=2)
        change = rows_normal * df[:, :, None]
        ds += change
        dg = -tl.sum(change, axis=1)
        df = tl.zeros((M, N), dtype=tl.float64)
        t -= 1
    ds = ds / tl.load(taus_ptr + iterations - 1)
    _store(dscores_ptr, tl.where(broken[:, None, None], float("nan"), ds), B, n, M, N)


@triton.jit
def _strip(ptr, stride_B, stride_I, first, n, ROWS: tl.constexpr, N: tl.constexpr, other):
    """(ROWS, N) in float64, rows from `first` on; `other` where there is no element."""
    i = first + tl.arange(0, ROWS)
    j = tl.arange(0, N)
    offsets = tl.program_id(0).to(tl.int64) * stride_B + i.to(tl.int64)[:, None] * stride_I + j[None, :]
    x = tl.load(ptr + offsets, mask=(i < n)[:, None] & (j < n)[None, :], other=other)
    return x.to(tl.float32).to(tl.float64)


@triton.jit
def _store_strip(ptr, x, first, n, ROWS: tl.constexpr, N: tl.constexpr):
    i = first + tl.arange(0, ROWS)
    j = tl.arange(0, N)
    offsets = (tl.program_id(0).to(tl.int64) * n + i[:, None]) * n + j[None, :]
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
def _column_places(ptr, t, B, n, N: tl.constexpr):
    """Addresses of the anchors after iteration t, how far behind them the logarithms are, and which there are: ptr is
    (iterations, 2, B, n)."""
    j = tl.arange(0, N)
    return ptr + ((t * 2).to(tl.int64) * B + tl.program_id(0)) * n + j, n.to(tl.int64) * B, j < n


@triton.jit
def _streamed_fwd(
    scores_ptr,  # (B, n, n)
    taus_ptr,  # (iterations)
    p_ptr,  # (B, n, n) contiguous
    history_ptr,  # (iterations, 2, B, n)
    stride_scores_B,
    stride_scores_I,
    B,
    n,
    iterations,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    HISTORY: tl.constexpr,
):
    broken = _broken_matrix(scores_ptr, stride_scores_B, stride_scores_I, n, ROWS, N) > 0
    before = tl.zeros((N,), dtype=tl.float64)
    g = tl.zeros((N,), dtype=tl.float64)
    anchor = tl.zeros((N,), dtype=tl.float64)
    log_sum = tl.zeros((N,), dtype=tl.float64)
    t = 0
    while t < iterations:
        tau = tl.load(taus_ptr + t)
        inv_tau = 1.0 / tau
        before = g
        most = tl.full((N,), -float("inf"), dtype=tl.float64)
        total = tl.zeros((N,), dtype=tl.float64)
        for first in range(0, n, ROWS):
            s = _strip(scores_ptr, stride_scores_B, stride_scores_I, first, n, ROWS, N, -float("inf"))
            row_anchor, row_log = _log_sum(s - before[None, :], inv_tau, 1, HISTORY)
            d = s - (row_anchor + tau * row_log)[:, None]
            # The largest so far is the anchor so far, and what was summed on an earlier one is scaled to it.
            risen = tl.maximum(most, tl.max(d, axis=0))
            anchor = tl.where(risen > -float("inf"), risen, 0.0)
            total = total * _exp((most - anchor) * inv_tau, HISTORY)
            total += tl.sum(_exp((d - anchor[None, :]) * inv_tau, HISTORY), axis=0)
            most = risen
        log_sum = tl.where(total > 0, tl.log(tl.where(total > 0, total, 1.0)), 0.0)
        if HISTORY:
            at, step, inside = _column_places(history_ptr, t, B, n, N)
            tl.store(at, anchor, mask=inside)
            tl.store(at + step, log_sum, mask=inside)
        g = anchor + tau * log_sum
        t += 1
    if not HISTORY:
        tau = tl.load(taus_ptr + iterations - 1)
        inv_tau = 1.0 / tau
        for first in range(0, n, ROWS):
            s = _strip(scores_ptr, stride_scores_B, stride_scores_I, first, n, ROWS, N, -float("inf"))
            row_anchor, row_log = _log_sum(s - before[None, :], inv_tau, 1, False)
            d = s - (row_anchor + tau * row_log)[:, None]
            p = _exp((d - anchor[None, :]) * inv_tau - log_sum[None, :], False)
            _store_strip(p_ptr, tl.where(broken, float("nan"), p), first, n, ROWS, N)


@triton.jit
def _column_state(history_ptr, taus_ptr, t, B, n, N: tl.constexpr):
    """Anchors and logarithms of the columns after iteration t, and the potential before it."""
    at, step, inside = _column_places(history_ptr, t, B, n, N)
    anchor = tl.load(at, mask=inside, other=0.0)
    log_sum = tl.load(at + step, mask=inside, other=0.0)
    earlier = inside & (t + tl.zeros((N,), dtype=tl.int32) > 0)  # before the first iteration g is 0
    tau = tl.load(taus_ptr + tl.maximum(t - 1, 0))
    before = tl.load(at - 2 * step, mask=earlier, other=0.0) + tau * tl.load(at - step, mask=earlier, other=0.0)
    return anchor, log_sum, before


@triton.jit
def _streamed_bwd(
    grad_ptr,  # (B, n, n)
    stride_grad_B,
    stride_grad_I,
    dscores_ptr,  # (B, n, n) contiguous
    scores_ptr,  # (B, n, n)
    taus_ptr,  # (iterations)
    history_ptr,  # (iterations, 2, B, n)
    stride_scores_B,
    stride_scores_I,
    B,
    n,
    iterations,
    sums_ptr,  # (B, n, n): what dS has come to
    ROWS: tl.constexpr,
    N: tl.constexpr,
):
    broken = _broken_matrix(scores_ptr, stride_scores_B, stride_scores_I, n, ROWS, N) > 0
    last = iterations - 1
    dg = tl.zeros((N,), dtype=tl.float64)
    t = iterations
    while t >= 0:  # the first turn only sums dP over columns, the next one is of the last iteration
        now = tl.minimum(t, last)
        tau = tl.load(taus_ptr + now)
        inv_tau = 1.0 / tau
        anchor, log_sum, before = _column_state(history_ptr, taus_ptr, now, B, n, N)
        following = tl.zeros((N,), dtype=tl.float64)
        for first in range(0, n, ROWS):
            s = _strip(scores_ptr, stride_scores_B, stride_scores_I, first, n, ROWS, N, -float("inf"))
            d = s - before[None, :]
            row_anchor, row_log = _log_sum(d, inv_tau, 1, True)
            f = row_anchor + tau * row_log
            columns_normal = tl.exp(((s - f[:, None]) - anchor[None, :]) * inv_tau - log_sum[None, :])
            i = first + tl.arange(0, ROWS)
            j = tl.arange(0, N)
            inside = (i < n)[:, None] & (j < n)[None, :]
            at = sums_ptr + (tl.program_id(0).to(tl.int64) * n + i[:, None]) * n + j[None, :]
            if t >= last:
                grad = _strip(grad_ptr, stride_grad_B, stride_grad_I, first, n, ROWS, N, 0.0)
                weight = columns_normal * grad
            else:
                weight = tl.load(at, mask=inside, other=0.0)
            if t > last:
                following -= tl.sum(weight, axis=0)
            else:
                change = columns_normal * dg[None, :]
                df = -tl.sum(change, axis=1)
                if t == last:
                    df -= tl.sum(weight, axis=1)
                rows_normal = tl.exp((d - row_anchor[:, None]) * inv_tau - row_log[:, None])
                back = rows_normal * df[:, None]
                following -= tl.sum(back, axis=0)
                weight = weight + change + back
                tl.store(at, weight, mask=inside)
                if t == 0:
                    ds = tl.where(broken, float("nan"), weight / tl.load(taus_ptr + last))
                    _store_strip(dscores_ptr, ds, first, n, ROWS, N)
        dg = following
        tl.debug_barrier()  # the next turn may read the sums from other threads
        t -= 1


def sinkhorn_supports(device: str, dtype: torch.dtype) -> str | None:
    return unsupported(device, dtype, tuple(TYPES))


def sinkhorn_fwd(scores: Tensor, taus: list[float]) -> Tensor:
    p = scores.new_empty(scores.shape)
    _launch_fwd(scores, _temperatures(taus, scores.device), p, history=None)
    return p


def sinkhorn_bwd(grad: Tensor, scores: Tensor, taus: list[float]) -> Tensor:
    dscores = scores.new_empty(scores.shape)
    batch, n, _ = scores.shape
    if scores.numel() == 0:
        return dscores
    steps = _temperatures(taus, scores.device)
    history = scores.new_empty((len(taus), 2, batch, n), dtype=torch.float64)
    _launch_fwd(scores, steps, dscores, history)
    tensors = (
        grad, grad.stride(0), grad.stride(1), dscores, scores, steps, history, scores.stride(0), scores.stride(1),
        batch, n, len(taus),
    )  # fmt: skip
    if n <= RESIDENT:
        blocks, warps = _blocks(n, backward=True)
        _sinkhorn_bwd[(triton.cdiv(batch, blocks["M"]),)](*tensors, **blocks, num_warps=warps)
    else:
        strips, warps = _strips(n)
        sums = scores.new_empty(scores.shape, dtype=torch.float64)
        _streamed_bwd[(batch,)](*tensors, sums, **strips, num_warps=warps)
    return dscores


def _temperatures(taus: list[float], device: torch.device) -> Tensor:
    """taus, which fall geometrically, made on the device: to copy a list there would wait for it."""
    first, last, steps = taus[0], taus[-1], max(len(taus) - 1, 1)
    if first == last:
        return torch.full((len(taus),), last, dtype=torch.float64, device=device)
    left = torch.arange(len(taus) - 1, -1, -1, dtype=torch.float64, device=device)
    return last * (first / last) ** (left / steps)


def _launch_fwd(scores: Tensor, steps: Tensor, p: Tensor, history: Tensor | None) -> None:
    batch, n, _ = scores.shape
    if scores.numel() == 0:
        return
    resident = n <= RESIDENT
    blocks, warps = _blocks(n, backward=False) if resident else _strips(n)
    kernel, programs = (_sinkhorn_fwd, triton.cdiv(batch, blocks["M"])) if resident else (_streamed_fwd, batch)
    kernel[(programs,)](
        scores, steps, p, steps if history is None else history, scores.stride(0), scores.stride(1), batch, n,
        steps.shape[0], **blocks, HISTORY=history is not None, num_warps=warps,
    )  # fmt: skip
