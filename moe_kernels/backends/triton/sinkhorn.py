"""Sinkhorn's iteration in Triton, in two forms. Without prescribed sums, a tolerance or a falling temperature, a
kernel that scales exp(scores / tau) runs first (_sinkhorn_scaled.py). It computes the matrices whose rows of
scores / tau have a small range; kernels in logarithms, with float64 potentials (ops/sinkhorn.py), then compute the
others.

Up to n = 64, or 32 in resident_bwd with prescribed sums or a tolerance, a program keeps one or more matrices in
registers in all iterations (logarithms: _sinkhorn_resident.py). For larger n a program reads its matrix again in every
iteration, a few rows at a time (logarithms: _sinkhorn_streamed.py).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from moe_kernels.backends.triton import launch, on_device, unsupported
from moe_kernels.backends.triton._sinkhorn_resident import resident_bwd, resident_fwd
from moe_kernels.backends.triton._sinkhorn_scaled import scaled_bwd, scaled_fwd
from moe_kernels.backends.triton._sinkhorn_scaled_few import scaled_few_bwd, scaled_few_fwd
from moe_kernels.backends.triton._sinkhorn_scaled_streamed import scaled_streamed_bwd, scaled_streamed_fwd
from moe_kernels.backends.triton._sinkhorn_streamed import streamed_bwd, streamed_fwd

FEW = 8  # largest n for which a program has many matrices
RESIDENT = 64  # largest n in registers; half of it in resident_bwd with prescribed sums or a tolerance
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _blocks(n: int, kernel: str, sums: bool) -> tuple[dict[str, int], int]:
    """(tile sizes, warps): a tile is M matrices of N x N, or ROWS rows of N columns of a streamed matrix.

    kernel: "fwd", "history" (the forward pass that a backward needs) or "bwd". sums: whether there are prescribed sums
    or a tolerance.
    """
    columns, backward = triton.next_power_of_2(n), kernel == "bwd"
    if n > (RESIDENT // 2 if backward and sums else RESIDENT):
        strip = 1024 if sums and kernel == "history" else 2048
        return {"ROWS": max(strip // columns, 1), "N": columns}, 8
    if backward and (sums or columns < 16):
        return {"M": max(256 // columns**2, 1), "N": columns}, 4
    return {"M": max(512 // columns**2, 1), "N": columns}, 8 if columns >= 32 else 4


def _scaled_blocks(n: int) -> tuple[dict[str, int], int]:
    """The same for kernels that scale: 16 elements of a tile for each thread, or 8 if N is 16."""
    columns = triton.next_power_of_2(n)
    if n <= FEW:
        lanes = 4 if columns > 4 else 1
        return {"M": 128 // lanes, "N": columns, "LANES": lanes}, 4
    if n <= RESIDENT:
        return {"N": columns}, max(columns**2 // 512, 1)
    return {"ROWS": 16 if columns <= 256 else 4096 // columns, "N": columns}, min(columns // 32, 8)


def sinkhorn_supports(device: str, dtype: torch.dtype) -> str | None:
    return unsupported(device, dtype, tuple(TYPES))


def sinkhorn_limits(target: str) -> dict[str, int]:
    return {"n": 1024}


@on_device
def sinkhorn_fwd(scores, taus, rows, columns, tolerance) -> Tensor:
    p, sums = scores.new_empty(scores.shape), () if rows is None else (rows, columns)
    scores, steps = _with_32_bit_offsets(scores), _temperatures(taus, scores.device)
    slow = None if sums else _flags(scores, taus)
    if slow is not None and taus[0] == taus[-1]:
        batch, n, _ = scores.shape
        blocks, warps = _scaled_blocks(n)
        given, strides = (scores, steps, p, slow), (scores.stride(0), scores.stride(1))
        if n <= FEW:
            programs = triton.cdiv(batch, blocks["M"])
            launch(scaled_few_fwd, (programs,), *given, *strides, batch, n, len(taus), **blocks, num_warps=warps)
        elif n <= RESIDENT:
            launch(scaled_fwd, (batch,), *given, *strides, n, len(taus), **blocks, num_warps=warps)
        else:
            work = [scores.new_empty(size, dtype=torch.float32) for size in (scores.shape, (batch, n))]
            launch(scaled_streamed_fwd, (batch,), *given, *work, *strides, n, len(taus), **blocks, num_warps=warps)
    _launch_logarithms(scores, steps, p, None, slow, sums, tolerance)
    return p


@on_device
def sinkhorn_bwd(grad, scores, taus, rows, columns, tolerance) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dscores, sums = scores.new_empty(scores.shape), () if rows is None else (rows, columns)
    drows, dcolumns = (None if x is None else torch.zeros_like(x) for x in (rows, columns))
    grad, scores, (batch, n, _) = _with_32_bit_offsets(grad), _with_32_bit_offsets(scores), scores.shape
    steps = _temperatures(taus, scores.device)
    history = steps.new_empty((len(taus), 2, batch, n))
    counts = steps.new_empty((batch,), dtype=torch.int32) if sums else _flags(scores, taus)
    work = steps.new_empty((batch, n, n)) if n > RESIDENT // 2 else steps
    if not sums and taus[0] == taus[-1]:
        blocks, warps = _scaled_blocks(n)
        given = grad, grad.stride(0), grad.stride(1), dscores, scores, steps, history, counts
        rest = scores.stride(0), scores.stride(1), batch, n, len(taus)
        if n <= FEW:
            launch(scaled_few_bwd, (triton.cdiv(batch, blocks["M"]),), *given, *rest, **blocks, num_warps=warps)
        elif n <= RESIDENT:
            launch(scaled_bwd, (batch,), *given, *rest, **blocks, num_warps=warps)
        else:
            short = scores.new_empty((2, batch, n, n), dtype=torch.float32)
            scratch = torch.empty_like(work), work, short[0], short[1]
            launch(scaled_streamed_bwd, (batch,), *given, *scratch, *rest, **blocks, num_warps=warps)
    _launch_logarithms(scores, steps, dscores, history, counts, sums, tolerance)
    blocks, warps = _blocks(n, "bwd", bool(sums))
    arguments = [
        grad, grad.stride(0), grad.stride(1), dscores, *((drows, dcolumns) if sums else (steps, steps)), scores, steps,
        history, *(sums or (steps, steps)), counts, scores.stride(0), scores.stride(1),
        batch, n, len(taus),
    ]  # fmt: skip
    kernel, programs = resident_bwd, triton.cdiv(batch, blocks.get("M", 1))
    if "ROWS" in blocks:
        kernel = streamed_bwd
        arguments.append(work)
    launch(kernel, (programs,), *arguments, **blocks, SUMS=bool(sums), num_warps=warps)
    return dscores, drows, dcolumns


def _with_32_bit_offsets(x: Tensor) -> Tensor:
    """x (B, n, n), copied if a row's number times the row stride may overflow int32 in the kernels."""
    return x if x.shape[1] * x.stride(1) < 2**31 else x.contiguous()


def _temperatures(taus: list[float], device: torch.device) -> Tensor:
    """taus, a geometric sequence, computed again on the device: to copy the list there would make the host wait."""
    first, last, steps = taus[0], taus[-1], max(len(taus) - 1, 1)
    if first == last:
        return torch.full((len(taus),), last, dtype=torch.float64, device=device)
    left = torch.arange(len(taus) - 1, -1, -1, dtype=torch.float64, device=device)
    return last * (first / last) ** (left / steps)


def _flags(scores: Tensor, taus: list[float]) -> Tensor:
    """(B,) int32: 1 for each matrix that needs logarithms, else 0.

    If the temperature falls, all matrices need logarithms. Otherwise the kernel that scales will write the flags.
    """
    make = torch.Tensor.new_empty if taus[0] == taus[-1] else torch.Tensor.new_ones
    return make(scores, (scores.shape[0],), dtype=torch.int32)


def _launch_logarithms(
    scores: Tensor,
    steps: Tensor,
    p: Tensor,
    history: Tensor | None,
    counts: Tensor | None,
    sums: tuple[Tensor, ...],
    tolerance: float,
) -> None:
    """Writes p or, if given, `history`. counts: without sums the flags of _flags; with sums it receives each matrix's
    number of iterations, if `history` is given."""
    batch, n, _ = scores.shape
    blocks, warps = _blocks(n, "fwd" if history is None else "history", bool(sums))
    arguments = [
        scores, steps, p, steps if history is None else history, *(sums or (steps, steps)),
        steps if counts is None else counts, scores.stride(0), scores.stride(1), batch, n, len(steps), tolerance,
    ]  # fmt: skip
    kernel, programs = resident_fwd, triton.cdiv(batch, blocks.get("M", 1))
    if "ROWS" in blocks:
        kernel = streamed_fwd
        arguments.append(steps.new_empty((batch, 2, n)) if sums else steps)
    options = {"HISTORY": history is not None, "SUMS": bool(sums)}
    launch(kernel, (programs,), *arguments, **blocks, **options, num_warps=warps)
