"""How a grouped product is launched: its tiles, and the descriptors of its operands where the device takes them."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_kernels.backends import _native
from moe_kernels.backends.triton._grouped_configs import ALTERNATIVES, GENERAL, TILES, Tiles

GATES = {"swiglu": "silu", "geglu": "gelu"}  # the activation of a gated one's first half

MOST_COLUMNS = 2**22  # a tile has up to 256 rows and counts the two halves of gated ones in 32 bits

MOST_TOGETHER = 2048  # experts that a program looks at together; among 65536 the compiler takes 89 s

# Milliseconds that MOE_KERNELS_AUTOTUNE=1 found, by kernel, device, dtype, K, columns, experts and bits of the rows.
timed: dict[tuple[object, ...], dict[Tiles, float]] = {}


@functools.cache
def loop(device: torch.device) -> int:
    """80 or 90: which shape of inner loop a device runs. The first takes 48 KB, which any device has."""
    return 90 if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 else 80


def launch_tiles(
    kernel: str,
    x: Tensor,
    other: Tensor,
    rows: int,
    num_experts: int,
    columns: int,
    launch: Callable[[Tiles], None],
    training: bool = False,
) -> None:
    """launch(tiles) with the tiles for x (T or R, K) against another operand; with MOE_KERNELS_AUTOTUNE=1 those of the
    kernel's classes and alternatives that are fastest here, timed once a shape. That waits for the device, so a shape
    whose first call is captured in a CUDA graph keeps the tiles of its class."""
    if columns > MOST_COLUMNS:
        raise ValueError(f"grouped_gemm: the Triton kernel takes at most {MOST_COLUMNS} columns, got {columns}")
    which, even = loop(x.device), x.dtype != torch.float32 and _even(x, other, columns)
    tiles = choose(kernel, which, even, rows, num_experts, columns, training)
    if even and x.device.type == "cuda" and os.environ.get("MOE_KERNELS_AUTOTUNE") == "1":
        key = (kernel, x.device, x.dtype, x.shape[1], columns, num_experts, rows.bit_length())
        if key not in timed and not torch.cuda.is_current_stream_capturing():
            known = dict.fromkeys((*TILES[kernel, which], *ALTERNATIVES[kernel, which]))
            timed[key] = {each: _milliseconds(launch, each) for each in known}
        if key in timed:
            tiles = min(timed[key], key=timed[key].__getitem__)
    launch(tiles)


def _milliseconds(launch: Callable[[Tiles], None], tiles: Tiles) -> float:
    """Of a launch, its L2 cache cold; infinite where the device has no room for such tiles."""
    try:
        return triton.testing.do_bench(lambda: launch(tiles), return_mode="median")
    except triton.runtime.OutOfResources:
        return math.inf


def choose(
    kernel: str, which: int, even: bool, rows: int, num_experts: int, columns: int, training: bool = False
) -> Tiles:
    """The tiles of a class of shapes: few rows are up to 96 an expert, few columns up to half of the widest tile.

    In training rows are never few. They may differ from step to step, and each class is compiled for itself; one tile
    of 128 rows does 128 FLOPs a byte of weights, which on an A100 takes less time than to read these.
    """
    few, narrow, wide = TILES[kernel, which]
    if not even:
        return GENERAL[kernel]
    if rows <= 96 * num_experts and not training:
        return few
    return narrow if columns <= wide.n // 2 else wide


def _even(x: Tensor, other: Tensor, columns: int) -> bool:
    """Whether rows start at multiples of 16 bytes and, as Triton compiles for it, sizes are multiples of 16."""
    strides = [stride for each in (x, other) for stride in each.stride() if stride != 1]
    return not any(size % 16 for size in (x.shape[1], columns, *strides)) and all(
        _native.aligned(each, 16) for each in (x, other)
    )


def activation_of(name: str) -> dict[str, Any]:
    return {"ACTIVATION": GATES.get(name, name), "GATED": name in GATES}


def precision(dtype: torch.dtype) -> dict[str, Any]:
    """IEEE float32 unless torch allows TF32; the interpreter, which cannot multiply bfloat16, has 16 bits widened."""
    matmul = torch.backends.cuda.matmul
    # Older torch has allow_tf32 alone; newer torch refuses to read it once its successor was set.
    tf32 = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    wide = triton.knobs.runtime.interpret and dtype != torch.float32
    return {"PRECISION": "tf32" if tf32 and dtype == torch.float32 else "ieee", "WIDE": wide}


def blocks(tiles: Tiles) -> dict[str, int]:
    shape = {"BLOCK_M": tiles.m, "BLOCK_N": tiles.n, "BLOCK_K": tiles.k}
    return shape | {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}


def operands(x: Tensor, weight: Tensor, gather: bool, tiles: Tiles) -> dict[str, Any]:
    """The arguments of _grouped_tiles.product: x (T or R, K) and weight (E, K, N), either dimension contiguous."""
    transposed = weight.shape[2] > 1 and weight.stride(2) != 1
    stored = weight.transpose(1, 2) if transposed else weight
    w = _descriptor(stored, [1, tiles.n, tiles.k] if transposed else [1, tiles.k, tiles.n])
    rows = x if gather else _descriptor(x, [tiles.m, tiles.k])
    experts = triton.next_power_of_2(weight.shape[0] + 1)
    return precision(x.dtype) | blocks(tiles) | {
        "x": rows, "w": w, "stride_x": x.stride(0), "stride_w_E": stored.stride(0), "stride_w": stored.stride(1),
        "E": weight.shape[0], "K": weight.shape[1], "BLOCK_E": experts if experts <= MOST_TOGETHER else 0,
        "GATHER": gather, "TRANSPOSED": transposed, "X_TMA": rows is not x, "W_TMA": w is not stored,
    }  # fmt: skip


def _descriptor(x: Tensor, block: list[int]) -> Tensor | TensorDescriptor:
    """A descriptor of x for bulk copies of such blocks, or x where it or the device cannot have one."""
    *outer, last = x.stride()
    possible = loop(x.device) == 90 and x.element_size() == 2 and x.numel() > 0 and last == 1 and _native.aligned(x, 16)
    if not possible or any(stride <= 0 or stride % 8 for stride in outer):
        return x
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)
