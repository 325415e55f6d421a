"""Helpers for kernels over rows: tile sizes, the unit of sizes and strides, zeros for unused rows of a routing plan."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.backends._addresses import aligned

TILE = 2048  # elements of a program's tile; 4096 for rows of 2049 to 4096 elements
LONGEST = 4096  # longest row that fits one tile

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def tile(dim: int) -> dict[str, int]:
    """Tile sizes and warps of a program for rows of `dim` elements."""
    block = min(max(triton.next_power_of_2(dim), 16), LONGEST if dim <= LONGEST else LONGEST // 2)
    tokens = max(TILE // block, 1)
    return {"BLOCK_T": tokens, "BLOCK_D": block, "num_warps": tokens * block // 512}


def unit(tensors: tuple[Tensor, ...], n: int, units: tuple[int, ...] = ()) -> int:
    """The first of `units` (in elements; by default 16 bytes) that divides n, all row strides and addresses, else 1.

    A kernel gets n and the strides divided by this unit and multiplies them by it, so the compiler knows a divisor. The
    unit is 1 if n or a stride is 2^31 or more: the kernel's product could overflow 32 bits.
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
    """Writes zeros to rows expert_offsets[E] to R - 1. The programs of the grid share this work."""
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
