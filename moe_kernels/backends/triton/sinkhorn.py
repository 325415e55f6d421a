"""Sinkhorn's iteration in Triton: a program per few matrices, which stay in registers for the whole solve, or, above
RESIDENT, a program per matrix that is read again in every iteration, a few rows at a time.

Where it holds a matrix whose range allows it, the forward scales exp(S / tau) by vectors, in float32. Else potentials
are in units of scores and in float64, each an anchor (the largest of what is summed) and the logarithm of the sum after
it, so that exp sees small differences at any temperature: in float32 forward, in float64 backward.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from moe_kernels.backends.triton import launch, on_device, unsupported
from moe_kernels.backends.triton._sinkhorn_resident import resident_bwd, resident_fwd
from moe_kernels.backends.triton._sinkhorn_streamed import streamed_bwd, streamed_fwd

RESIDENT = 64  # n of a matrix that a program holds
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _blocks(n: int, way: str, sums: bool) -> tuple[dict[str, int], int]:
    """Matrices of a program and columns of its tile, as large as compiles without spills, or rows and columns of a
    strip of a matrix that is read again; and warps. `way`: "fwd", "history" (the backward's forward) or "bwd"."""
    columns, backward = triton.next_power_of_2(n), way == "bwd"
    if n > (RESIDENT // 2 if backward and sums else RESIDENT):
        strip = 1024 if sums and way == "history" else 2048
        return {"ROWS": max(strip // columns, 1), "N": columns}, 8
    if backward and sums:
        return {"M": max(256 // columns**2, 1), "N": columns}, 4
    tile = 512 if backward or sums or columns >= 16 else 1024
    return {"M": max(tile // columns**2, 1), "N": columns}, 8 if columns >= 32 else 4


def sinkhorn_supports(device: str, dtype: torch.dtype) -> str | None:
    return unsupported(device, dtype, tuple(TYPES))


def sinkhorn_limits(place: str) -> dict[str, int]:
    return {"n": 1024}


@on_device
def sinkhorn_fwd(scores: Tensor, taus: list[float]) -> Tensor:
    p = scores.new_empty(scores.shape)
    _launch_fwd(scores, _temperatures(taus, scores.device), p)
    return p


@on_device
def sinkhorn_bwd(grad: Tensor, scores: Tensor, taus: list[float]) -> Tensor:
    dscores = scores.new_empty(scores.shape)
    _launch_bwd(grad, scores, _temperatures(taus, scores.device), dscores)
    return dscores


@on_device
def sinkhorn_sums_fwd(scores: Tensor, taus: list[float], rows: Tensor, columns: Tensor, tolerance: float) -> Tensor:
    p = scores.new_empty(scores.shape)
    _launch_fwd(scores, _temperatures(taus, scores.device), p, sums=(rows, columns), tolerance=tolerance)
    return p


@on_device
def sinkhorn_sums_bwd(
    grad: Tensor, scores: Tensor, taus: list[float], rows: Tensor, columns: Tensor, tolerance: float
) -> tuple[Tensor, Tensor, Tensor]:
    dscores = scores.new_empty(scores.shape)
    drows, dcolumns = torch.zeros_like(rows), torch.zeros_like(columns)
    steps = _temperatures(taus, scores.device)
    _launch_bwd(grad, scores, steps, dscores, (rows, columns), tolerance, (drows, dcolumns))
    return dscores, drows, dcolumns


def _within_reach(x: Tensor) -> Tensor:
    """x (B, n, n), copied if an element of a matrix is 2^31 or more elements from the first: resident kernels count
    those in 32 bits, as an address of 64 bits for each row costs registers."""
    return x if x.shape[1] * x.stride(1) < 2**31 else x.contiguous()


def _temperatures(taus: list[float], device: torch.device) -> Tensor:
    """taus, which fall geometrically, made on the device: to copy a list there would wait for it."""
    first, last, steps = taus[0], taus[-1], max(len(taus) - 1, 1)
    if first == last:
        return torch.full((len(taus),), last, dtype=torch.float64, device=device)
    left = torch.arange(len(taus) - 1, -1, -1, dtype=torch.float64, device=device)
    return last * (first / last) ** (left / steps)


def _launch_fwd(
    scores: Tensor,
    steps: Tensor,
    p: Tensor,
    history: Tensor | None = None,
    counts: Tensor | None = None,
    sums: tuple[Tensor, ...] = (),
    tolerance: float = -1.0,
) -> None:
    """p; or, where there is a history, that and the counts alone."""
    scores, (batch, n, _) = _within_reach(scores), scores.shape
    if scores.numel() == 0:
        return
    blocks, warps = _blocks(n, "fwd" if history is None else "history", bool(sums))
    arguments = [
        scores, steps, p, steps if history is None else history, *(sums or (steps, steps)),
        steps if counts is None else counts, scores.stride(0), scores.stride(1), batch, n, len(steps), tolerance,
    ]  # fmt: skip
    kernel, programs = resident_fwd, triton.cdiv(batch, blocks.get("M", 1))
    if "ROWS" in blocks:
        kernel = streamed_fwd
        arguments.append(steps.new_empty((batch, 2, n)) if sums else steps)
    how = {"HISTORY": history is not None, "SUMS": bool(sums)}
    launch(kernel, (programs,), *arguments, **blocks, **how, num_warps=warps)


def _launch_bwd(
    grad: Tensor,
    scores: Tensor,
    steps: Tensor,
    dscores: Tensor,
    sums: tuple[Tensor, ...] = (),
    tolerance: float = -1.0,
    dsums: tuple[Tensor, ...] = (),
) -> None:
    grad, scores, (batch, n, _) = _within_reach(grad), _within_reach(scores), scores.shape
    if scores.numel() == 0:
        return
    history = steps.new_empty((len(steps), 2, batch, n))
    counts = steps.new_empty((batch,), dtype=torch.int32) if sums else steps
    _launch_fwd(scores, steps, dscores, history, counts, sums, tolerance)
    blocks, warps = _blocks(n, "bwd", bool(sums))
    arguments = [
        grad, grad.stride(0), grad.stride(1), dscores, *(dsums or (steps, steps)), scores, steps, history,
        *(sums or (steps, steps)), counts, scores.stride(0), scores.stride(1), batch, n, len(steps),
    ]  # fmt: skip
    kernel, programs = resident_bwd, triton.cdiv(batch, blocks.get("M", 1))
    if "ROWS" in blocks:
        kernel = streamed_bwd
        arguments.append(steps.new_empty(scores.shape))
    launch(kernel, (programs,), *arguments, **blocks, SUMS=bool(sums), num_warps=warps)
