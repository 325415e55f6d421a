"""Shared by kernels over rows: their tile, the unit of their sizes, and zeros in the unused rows of a plan."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.backends._addresses import aligned

TILE = 2048  # elements of a program, 16 a thread
LONGEST = 4096  # longest row that a program reads at once

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def tile(dim: int) -> dict[str, int]:
    """Tokens and elements of a program, and its warps."""
    # A row above LONGEST is read LONGEST / 2 elements at a time: with more, combine's backward would spill registers.
    block = min(max(triton.next_power_of_2(dim), 16), LONGEST if dim <= LONGEST else LONGEST // 2)
    tokens = max(TILE // block, 1)
    return {"BLOCK_T": tokens, "BLOCK_D": block, "num_warps": tokens * block // 512}


def unit(tensors: tuple[Tensor, ...], n: int, units: tuple[int, ...] = ()) -> int:
    """The first of `units`, in elements, that divides n and every row's start in these tensors, else 1. Default: the
    elements of 16 bytes.

    Kernels get their sizes in units. Of a size in elements Triton would only know whether it is a multiple of 16: it
    would read a row of 1000 bfloat16 two bytes at a time. A stride that fits 32 bits in units alone would overflow in
    elements, so its unit is 1.
    """
    size, strides = tensors[0].element_size(), [each.stride(0) for each in tensors]
    for count in units or (16 // size,):
        divides = all(each % count == 0 and each < 2**31 for each in (n, *strides))
        if divides and all(aligned(each, count * size) for each in tensors):
            return count
    return 1


@triton.jit
def clear_rows(
    rows_ptr,  # (R, D) contiguous
    expert_offsets_ptr,  # (E + 1)
    E, R, D,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes zeros from row expert_offsets[E] on, divided among all programs of the launch."""
    first = tl.load(expert_offsets_ptr + E) + tl.program_id(0).to(tl.int64) * BLOCK_T
    zeros = tl.full((BLOCK_T, BLOCK_D), 0, rows_ptr.dtype.element_ty)
    while first < R:
        row = first + tl.arange(0, BLOCK_T)
        start = tl.program_id(1) * BLOCK_D
        while start < D:
            d = start + tl.arange(0, BLOCK_D)
            tl.store(rows_ptr + row[:, None] * D + d, zeros, mask=(row < R)[:, None] & (d < D))
            start += tl.num_programs(1) * BLOCK_D
        first += tl.num_programs(0).to(tl.int64) * BLOCK_T
