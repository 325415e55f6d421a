"""Tile sizes of the grouped GEMM's kernels, and the arguments that their launches share.

tiles.json has the sizes, by device, kernel and class of shapes: those of "sm_90" for GPUs of compute capability 9.x,
which run wgmma with tensor descriptors where possible, those of "sm_80" for all others, which run cp.async and
mma.sync, and those under the name of a GPU for this GPU. Kernels "fwd" and "gated" multiply rows by weights, "weight"
computes the weight's gradient, "hidden" the gradient of an expert MLP's hidden layer. No sizes in the package were
timed on a GPU; `python -m bench tiles` times them and writes such a file, which MOE_KERNELS_TILES names. Nothing is
timed at run time: sums depend on the tiles, so every rank and every run has to take the same.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_kernels.sizes import aligned, is_fixed

GATES = {"swiglu": "silu", "geglu": "gelu"}  # gated activations, and the activation of the first half of the columns

MAX_COLUMNS = 2**22  # offsets in a tile have 32 bits: 256 rows of 2 * 2**22 columns (if gated) have 2**31 elements

FEWEST = 16  # columns: of the tables' tiles, which have 64 or more, fewer would leave most without work

MAX_BLOCK_E = 2048  # most expert offsets that a program loads at once
MAX_SORTED = 256  # most experts whose weight gradients start in the order of their rows; a program compares all pairs

FILE = Path(__file__).with_name("tiles.json")
VARIABLE = "MOE_KERNELS_TILES"


class Tiles(NamedTuple):
    """Rows (m) and columns (n) of a program's tile, depth (k) of a step of the inner loop, warps, pipeline stages."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


# Of tiles.json: the kernels, and the classes of shapes (`choose_tiles`). In "gated" tiles n counts columns of gates;
# the program also computes n linear columns.
KERNELS = ("fwd", "gated", "hidden", "weight")
CLASSES = ("few rows", "few columns", "other")
Table = dict[str, dict[str, Tiles]]  # by kernel and class

# Tiles for float32, for arguments that are not `_divisible`, whose loads Triton may not vectorize, and for few columns.
GENERAL = {
    "fwd": Tiles(64, 64, 32, 4, 3),
    "gated": Tiles(64, 32, 32, 4, 3),
    "hidden": Tiles(64, 32, 32, 4, 3),
    "weight": Tiles(64, 64, 32, 8, 3),
}


@functools.cache
def loop(device: torch.device) -> int:
    """The inner loop that a device runs: 90 on compute capability 9.x, else 80."""
    return 90 if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 else 80


@functools.cache
def tables() -> dict[str, Table]:
    """Tables of tiles by device, of the package and, where MOE_KERNELS_TILES names a file, of that file before these.

    Raises:
        ValueError: the file that MOE_KERNELS_TILES names cannot be read, or has no such tiles.
    """
    found = _read(FILE)
    if path := os.environ.get(VARIABLE):
        try:
            found |= _read(Path(path))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"grouped_gemm: {VARIABLE} names {path}, which is no file of tiles ({error}); expected what "
                f"`python -m bench tiles` writes: {{device: {{kernel: {{class: [m, n, k, warps, stages]}}}}}}"
            ) from error
    return found


def _read(path: Path) -> dict[str, Table]:
    found = {}
    for device, kernels in json.loads(path.read_text()).items():
        found[device] = {
            kernel: {name: Tiles(*map(int, sizes)) for name, sizes in classes.items()}
            for kernel, classes in kernels.items()
        }
        for kernel in KERNELS:
            if set(found[device].get(kernel, {})) != set(CLASSES):
                raise ValueError(f"{device} needs tiles of {kernel} for {', '.join(CLASSES)}")
    return found


def table(device: torch.device) -> Table:
    """The tiles of a GPU: under its name, else those of the inner loop that it runs."""
    known = tables()
    return known.get(_name(device)) or known[f"sm_{loop(device)}"]


@functools.cache
def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


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
    """Calls run(tiles), which launches the kernel, with tiles that suit the product of x (T or R, K) and `other`.

    In the mode batch_invariant the number of rows decides only between tiles that add alike.
    """
    if columns > MAX_COLUMNS:
        raise ValueError(f"grouped_gemm: the Triton kernel takes at most {MAX_COLUMNS} columns, got {columns}")
    vectors = x.dtype != torch.float32 and columns >= FEWEST and _divisible(x, other, columns)
    known = table(x.device)[kernel] if vectors else None
    tiles = choose_tiles(kernel, known, num_rows, num_experts, columns, training or _keeps_tiles(x))
    if is_fixed() and tiles == GENERAL["fwd"]:  # a router's product often has few columns, its gradient few terms
        tiles = tiles._replace(n=_fitting(tiles.n, columns), k=_fitting(tiles.k, x.shape[1]))
    run(tiles)


def _keeps_tiles(x: Tensor) -> bool:
    """Whether the mode batch_invariant is on and tiles for few rows could add in another order than the others.

    On compute capability 8.x all tiles add by the same mma.sync, in the order of its steps over k. wgmma instructions
    differ in shape from tile to tile.
    """
    if not is_fixed():
        return False
    alike = x.device.type != "cuda" or torch.cuda.get_device_capability(x.device)[0] == 8
    return not (alike and loop(x.device) == 80)


def _fitting(size: int, needed: int) -> int:
    """The smallest size of a tile, from 16 to `size`, that covers `needed`; `size` if none does."""
    return min(size, max(16, triton.next_power_of_2(needed)))


def choose_tiles(
    kernel: str,
    known: dict[str, Tiles] | None,
    num_rows: int,
    num_experts: int,
    columns: int,
    training: bool = False,
) -> Tiles:
    """Of the tiles `known` by class those for few rows, for few columns or for all other sizes; GENERAL if None.

    Training does not use the tiles for few rows: the number of rows may change from step to step, and a change of tiles
    would compile another kernel.
    """
    if known is None:
        return GENERAL[kernel]
    if num_rows <= 96 * num_experts and not training:
        return known["few rows"]
    return known["few columns" if columns <= known["other"].n // 2 else "other"]


def _divisible(x: Tensor, other: Tensor, columns: int) -> bool:
    """Whether both tensors start at multiples of 16 bytes, and the width of x, columns and all strides other than 1 are
    multiples of 16 bytes: of all of them (`in_units`) Triton compiles vector loads."""
    strides = [stride for each in (x, other) for stride in each.stride() if stride != 1]
    count = 16 // x.element_size()
    return not any(size % count for size in (x.shape[1], columns, *strides)) and all(
        aligned(each, 16) for each in (x, other)
    )


def in_units(x: Tensor, *sizes: int) -> tuple[list[int], dict[str, int]]:
    """Sizes and strides for a kernel that does not specialize them, and its constants UNIT and WHOLE (see `scaled`).

    UNIT is 16 elements if all sizes are multiples of it (a loop then needs fewer masks), else 16 bytes of x. Sizes that
    are multiples of it become their number of units, and their bits of WHOLE, in order, are 1. A size of 2^31 or more
    does not: the kernel's product could overflow 32 bits. Triton by itself compiles a kernel for each pattern of sizes
    that are 1 or multiples of 16.
    """
    unit = 16 // x.element_size() if any(size % 16 for size in sizes) else 16
    whole = [size % unit == 0 and size < 2**31 for size in sizes]
    passed = [size // unit if each else size for size, each in zip(sizes, whole, strict=True)]
    return passed, {"UNIT": unit, "WHOLE": sum(each << i for i, each in enumerate(whole))}


def block_of(count: int, least: int = 8) -> int:
    """The power of two, at least `least`, that covers so many experts or offsets: few experts share a compilation."""
    return max(least, triton.next_power_of_2(count))


def row_tiles(num_rows: int, num_experts: int, tiles: Tiles) -> int:
    """Row tiles of a launch, for any offsets: see _grouped_tiles.py."""
    if block_of(num_experts + 1) > MAX_BLOCK_E:
        return num_rows // tiles.m + num_experts + 1
    return min(num_rows, num_rows // tiles.m + num_experts) + 1


def activation_of(name: str) -> dict[str, Any]:
    return {"ACTIVATION": GATES.get(name, name), "GATED": name in GATES}


FEW_TERMS = 16  # float32 sums of fewer terms are exacter without tensor cores


def precision(x: Tensor, terms: int | None = None) -> dict[str, Any]:
    """PRECISION of `product`: for float32 one TF32 product where torch allows TF32, else three; none for few terms.

    terms: of each sum; None if they depend on data. WIDEN: Triton's interpreter cannot multiply bfloat16, so 16-bit
    operands become float32.
    """
    dtype = x.dtype
    matmul = torch.backends.cuda.matmul
    # Older torch has only allow_tf32; newer torch may raise if allow_tf32 is read after fp32_precision was set.
    tf32 = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    widen = triton.knobs.runtime.interpret and dtype != torch.float32
    float32 = "tf32" if tf32 else "three" if terms is None or terms >= FEW_TERMS else "ieee"
    return {"PRECISION": float32 if dtype == torch.float32 else "ieee", "WIDEN": widen}


def blocks(tiles: Tiles) -> dict[str, int]:
    shape = {"BLOCK_M": tiles.m, "BLOCK_N": tiles.n, "BLOCK_K": tiles.k}
    return shape | {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}


def operands(x: Tensor, weight: Tensor, columns: int, gather: bool, tiles: Tiles) -> dict[str, Any]:
    """Arguments of kernels that call multiply_tile on x (T or R, K) and weight (E, K, M), K or M contiguous.

    columns: N, M / 2 if gated, else M.
    """
    transposed = weight.shape[2] > 1 and weight.stride(2) != 1
    if not transposed and tiles.k * weight.stride(1) >= 2**31:
        weight = weight.contiguous()  # the kernel computes BLOCK_K * stride_w in 32 bits
    stored = weight.transpose(1, 2) if transposed else weight
    w = _descriptor(stored, [1, tiles.n, tiles.k] if transposed else [1, tiles.k, tiles.n])
    rows = x if gather else _descriptor(x, [tiles.m, tiles.k])
    experts = block_of(weight.shape[0] + 1)
    sizes, units = in_units(x, x.stride(0), stored.stride(0), stored.stride(1), weight.shape[1], columns)
    return precision(x, weight.shape[1]) | blocks(tiles) | units | {
        **dict(zip(("stride_x", "stride_w_E", "stride_w", "K", "N"), sizes, strict=True)),
        "x": rows, "w": w, "E": weight.shape[0], "BLOCK_E": experts if experts <= MAX_BLOCK_E else 0, "GATHER": gather,
        "TRANSPOSED": transposed, "X_TMA": rows is not x, "W_TMA": w is not stored,
    }  # fmt: skip


def _descriptor(x: Tensor, block: list[int]) -> Tensor | TensorDescriptor:
    """A descriptor of x for bulk copies (TMA) of blocks of shape `block`; or x itself if none is possible."""
    *outer, last = x.stride()
    possible = loop(x.device) == 90 and x.element_size() == 2 and x.numel() > 0 and last == 1 and aligned(x, 16)
    if not possible or any(stride <= 0 or stride % 8 for stride in outer):
        return x
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)
