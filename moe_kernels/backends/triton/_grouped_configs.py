"""Tile sizes of the grouped GEMM's kernels, and the arguments that their launches share.

The tables are keyed by kernel and inner loop (80: cp.async and mma.sync, 90: descriptors and wgmma); an entry has the
tiles of each class of shapes. The sizes were computed as below and are not yet timed.

sm_80: in a clock an SM does 1024 multiply-adds and reads 128 bytes of shared memory. Warps with tiles of 64 x 64 read
64 bytes a clock, with tiles of 64 x 32 they would read 96. So four warps compute 128 x 128. Buffers of 48 KB leave room
for two blocks or more in the 163 KB of an A100.
sm_90: with wgmma 64 x 256 x 16 an SM reads 80 of the 128 bytes a clock, with 64 x 128 x 16 it would read 96. So two
warp groups compute 128 x 256 if there are more than 128 columns, with four stages of 48 KB.
float32 uses tiles of 64 rows (GENERAL): IEEE products run outside the tensor cores, and registers limit the tiles.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_kernels.backends import _addresses

GATES = {"swiglu": "silu", "geglu": "gelu"}  # gated activations, and the function of the first half of the columns

MAX_COLUMNS = 2**22  # offsets in a tile have 32 bits: 256 rows of 2 * 2**22 elements (if gated) are 2**31

MAX_BLOCK_E = 2048  # experts whose offsets a program loads at once; with 65536 the compiler takes 89 s

# Milliseconds measured with MOE_KERNELS_AUTOTUNE=1; key: kernel, device, dtype, K, columns, experts, bits of num_rows.
timed: dict[tuple[object, ...], dict[Tiles, float]] = {}


class Tiles(NamedTuple):
    """Rows (m) and columns (n) of a program's tile, depth (k) of a step of the inner loop, warps, pipeline stages."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


# By kernel and inner loop: tiles for few rows per expert, for few columns, and for the rest (`choose_tiles`). In gated
# products n counts the gates; the program also computes their linear parts.
TILES: dict[tuple[str, int], tuple[Tiles, Tiles, Tiles]] = {
    ("fwd", 80): (Tiles(64, 128, 32, 4, 4), Tiles(128, 128, 32, 4, 4), Tiles(128, 128, 32, 4, 4)),
    ("fwd", 90): (Tiles(64, 128, 64, 4, 4), Tiles(128, 128, 64, 8, 4), Tiles(128, 256, 64, 8, 4)),
    ("gated", 80): (Tiles(64, 64, 32, 4, 4), Tiles(128, 64, 32, 4, 4), Tiles(128, 64, 32, 4, 4)),
    ("gated", 90): (Tiles(64, 64, 64, 4, 4), Tiles(128, 64, 64, 8, 4), Tiles(128, 128, 64, 8, 4)),
    ("hidden", 80): (Tiles(64, 64, 32, 4, 4), Tiles(128, 64, 32, 4, 4), Tiles(128, 64, 32, 4, 4)),
    ("hidden", 90): (Tiles(64, 64, 64, 4, 4), Tiles(128, 64, 64, 8, 4), Tiles(128, 128, 64, 8, 4)),
    ("weight", 80): (Tiles(128, 128, 32, 4, 4), Tiles(128, 128, 32, 4, 4), Tiles(128, 128, 32, 4, 4)),
    ("weight", 90): (Tiles(128, 128, 64, 8, 4), Tiles(128, 128, 64, 8, 4), Tiles(128, 256, 64, 8, 4)),
}
# Tiles that MOE_KERNELS_AUTOTUNE=1 tries too. With smaller tiles or fewer stages more blocks share an SM. Larger tiles
# read fewer bytes from L2: 128 x 256 three quarters of the bytes of 128 x 128.
ALTERNATIVES: dict[tuple[str, int], tuple[Tiles, ...]] = {
    ("fwd", 80): (Tiles(128, 128, 32, 8, 4), Tiles(128, 128, 32, 4, 3), Tiles(128, 256, 32, 8, 3)),
    ("fwd", 90): (Tiles(128, 128, 64, 8, 3), Tiles(128, 128, 64, 4, 3), Tiles(256, 128, 64, 8, 4)),
    ("gated", 80): (Tiles(128, 64, 32, 8, 4), Tiles(128, 128, 32, 8, 3)),
    ("gated", 90): (Tiles(128, 64, 64, 8, 3), Tiles(128, 64, 64, 4, 3), Tiles(128, 128, 64, 8, 3)),
    ("hidden", 80): (Tiles(128, 128, 32, 8, 4), Tiles(128, 128, 32, 4, 3)),
    ("hidden", 90): (Tiles(128, 128, 64, 4, 3), Tiles(128, 256, 64, 8, 4), Tiles(256, 128, 64, 8, 4)),
    ("weight", 80): (Tiles(128, 128, 32, 8, 4), Tiles(128, 256, 32, 8, 3)),
    ("weight", 90): (Tiles(128, 128, 64, 8, 3), Tiles(128, 128, 64, 4, 3), Tiles(256, 128, 64, 8, 4)),
}
# For float32; and for sizes, strides or addresses that are not `_divisible`, where Triton reads elements one by one.
GENERAL = {
    "fwd": Tiles(64, 64, 32, 4, 3),
    "gated": Tiles(64, 32, 32, 4, 3),
    "hidden": Tiles(64, 32, 32, 4, 3),
    "weight": Tiles(64, 64, 32, 8, 3),
}


@functools.cache
def loop(device: torch.device) -> int:
    """The inner loop that a device runs: 80 or 90."""
    return 90 if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 else 80


def run_with_tiles(
    kernel: str,
    x: Tensor,
    other: Tensor,
    num_rows: int,
    num_experts: int,
    columns: int,
    run: Callable[[Tiles], None],
    training: bool = False,
) -> None:
    """Calls run(tiles), which launches the kernel, with the tiles for the product of x (T or R, K) and `other`.

    With MOE_KERNELS_AUTOTUNE=1 these are the fastest of the kernel's TILES and ALTERNATIVES, timed once for each key of
    `timed`. Timing waits for the device, so nothing is timed while a CUDA graph is captured.
    """
    if columns > MAX_COLUMNS:
        raise ValueError(f"grouped_gemm: the Triton kernel takes at most {MAX_COLUMNS} columns, got {columns}")
    inner_loop, divisible = loop(x.device), x.dtype != torch.float32 and _divisible(x, other, columns)
    tiles = choose_tiles(kernel, inner_loop, divisible, num_rows, num_experts, columns, training)
    if divisible and x.device.type == "cuda" and os.environ.get("MOE_KERNELS_AUTOTUNE") == "1":
        key = (kernel, x.device, x.dtype, x.shape[1], columns, num_experts, num_rows.bit_length())
        if key not in timed and not torch.cuda.is_current_stream_capturing():
            candidates = dict.fromkeys((*TILES[kernel, inner_loop], *ALTERNATIVES[kernel, inner_loop]))
            timed[key] = {each: _milliseconds(run, each) for each in candidates}
        if key in timed:
            tiles = min(timed[key], key=timed[key].__getitem__)
    run(tiles)


def _milliseconds(run: Callable[[Tiles], None], tiles: Tiles) -> float:
    """Milliseconds of a launch with a cold L2 cache; infinite if the device has no room for such tiles."""
    try:
        return triton.testing.do_bench(lambda: run(tiles), return_mode="median")
    except triton.runtime.OutOfResources:
        return math.inf


def choose_tiles(
    kernel: str, inner_loop: int, divisible: bool, num_rows: int, num_experts: int, columns: int, training: bool = False
) -> Tiles:
    """The tiles of a class of shapes: few rows are up to 96 per expert, few columns up to half of the widest tile.

    Training does not use the class for few rows: the number of rows may change from step to step, and each class is
    compiled separately. A tile of 128 rows takes 128 FLOPs per byte of weights; an A100 takes longer to read the byte.
    """
    few_rows, few_columns, largest = TILES[kernel, inner_loop]
    if not divisible:
        return GENERAL[kernel]
    if num_rows <= 96 * num_experts and not training:
        return few_rows
    return few_columns if columns <= largest.n // 2 else largest


def _divisible(x: Tensor, other: Tensor, columns: int) -> bool:
    """Whether both tensors start at multiples of 16 bytes and all sizes and strides are multiples of 16 elements: for
    such arguments Triton compiles vector loads."""
    strides = [stride for each in (x, other) for stride in each.stride() if stride != 1]
    return not any(size % 16 for size in (x.shape[1], columns, *strides)) and all(
        _addresses.aligned(each, 16) for each in (x, other)
    )


def activation_of(name: str) -> dict[str, Any]:
    return {"ACTIVATION": GATES.get(name, name), "GATED": name in GATES}


def precision(dtype: torch.dtype) -> dict[str, Any]:
    """PRECISION: IEEE float32 unless torch allows TF32. WIDEN: the interpreter, which cannot multiply bfloat16,
    multiplies 16-bit operands as float32."""
    matmul = torch.backends.cuda.matmul
    # Older torch has only allow_tf32; newer torch refuses to read it after fp32_precision was set.
    tf32 = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    widen = triton.knobs.runtime.interpret and dtype != torch.float32
    return {"PRECISION": "tf32" if tf32 and dtype == torch.float32 else "ieee", "WIDEN": widen}


def blocks(tiles: Tiles) -> dict[str, int]:
    shape = {"BLOCK_M": tiles.m, "BLOCK_N": tiles.n, "BLOCK_K": tiles.k}
    return shape | {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}


def operands(x: Tensor, weight: Tensor, gather: bool, tiles: Tiles) -> dict[str, Any]:
    """Arguments of _grouped_tiles.multiply_tile: x (T or R, K) and weight (E, K, N), whose K or N is contiguous."""
    transposed = weight.shape[2] > 1 and weight.stride(2) != 1
    if not transposed and tiles.k * weight.stride(1) >= 2**31:
        weight = weight.contiguous()  # the kernel's distance between steps of the inner loop has 32 bits
    stored = weight.transpose(1, 2) if transposed else weight
    w = _descriptor(stored, [1, tiles.n, tiles.k] if transposed else [1, tiles.k, tiles.n])
    rows = x if gather else _descriptor(x, [tiles.m, tiles.k])
    experts = triton.next_power_of_2(weight.shape[0] + 1)
    return precision(x.dtype) | blocks(tiles) | {
        "x": rows, "w": w, "stride_x": x.stride(0), "stride_w_E": stored.stride(0), "stride_w": stored.stride(1),
        "E": weight.shape[0], "K": weight.shape[1], "BLOCK_E": experts if experts <= MAX_BLOCK_E else 0,
        "GATHER": gather, "TRANSPOSED": transposed, "X_TMA": rows is not x, "W_TMA": w is not stored,
    }  # fmt: skip


def _descriptor(x: Tensor, block: list[int]) -> Tensor | TensorDescriptor:
    """A descriptor of x for bulk copies (TMA) of blocks of shape `block`, or x itself if its layout or the device does
    not allow a descriptor."""
    *outer, last = x.stride()
    possible = (
        loop(x.device) == 90 and x.element_size() == 2 and x.numel() > 0 and last == 1 and _addresses.aligned(x, 16)
    )
    if not possible or any(stride <= 0 or stride % 8 for stride in outer):
        return x
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)
