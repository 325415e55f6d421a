"""Triton backend: kernels, and functions that launch them; here what several of its files share.

Each file without a leading underscore serves one or more operations. Its functions *_supports return None if the
kernels take a device and dtype, else the reason why not; functions *_limits return the largest sizes that kernels take.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    if triton.knobs.runtime.interpret:
        import numpy  # noqa: F401 Triton's interpreter imports it at the first kernel
except ModuleNotFoundError as error:
    if error.name == "triton":
        raise  # backends.load has the message for this
    raise ImportError(f"Triton is installed, but needs the package {error.name}, which is not: install it") from error

from moe_kernels.sizes import aligned

# Device type of the tensors that kernels take. tests/ptx sets "cpu", since it executes compiled kernels on the host.
device_type = "cuda"

TILE = 2048  # elements of a program's tile; 4096 for rows of 2049 to 4096 elements
LONGEST = 4096  # longest row that fits one tile

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# INF (bit pattern of +inf) and FORMAT, as in _kwta_values.py.
FORMATS = {torch.float32: (0x7F800000, 0), torch.bfloat16: (0x7F80, 1), torch.float16: (0x7C00, 2)}


def unsupported(device: str, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """None if kernels that take `dtypes` can run on this device with this dtype, else the reason why not."""
    device = device.partition(":")[0]  # "cuda:8.0" -> "cuda"
    if device != device_type and not triton.knobs.runtime.interpret:
        return f"it runs on cuda tensors, not on {device} ones (TRITON_INTERPRET=1 interprets it there, slowly)"
    if triton.knobs.runtime.interpret and (reason := _interpreter_fails()) is not None:
        return reason
    if dtype not in dtypes:
        return f"it takes {', '.join(str(each).removeprefix('torch.') for each in dtypes)}, not {dtype}"
    return None


def _interpreter_fails() -> str | None:
    """Why Triton's interpreter fails, or None. Before 3.7 it uses arrays as loop bounds, which numpy 2.4 refuses."""
    import numpy  # only the interpreter needs it

    if _release(triton.__version__) >= (3, 7) or _release(numpy.__version__) < (2, 4):
        return None
    return f"the interpreter of Triton {triton.__version__} takes numpy below 2.4, not {numpy.__version__}"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
    """Launches a kernel that is compiled without fusing products and sums (tl.fma still fuses).

    LLVM would fuse a product with the first addition of a sum over lanes. Each lane would then add its own unrounded
    product and the rounded product of another lane, so lanes that share a sum would get different last bits.
    """
    kernel[grid](*arguments, enable_fp_fusion=False, **named)


def on_device(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: during a call the GPU of the first argument is current, since Triton launches on the current GPU."""

    @wraps(launcher)
    def wrapper(x: Tensor, *rest: Any) -> Any:
        if not x.is_cuda or x.get_device() == torch.cuda.current_device():
            return launcher(x, *rest)
        with torch.cuda.device(x.get_device()):
            return launcher(x, *rest)

    return wrapper


def patterns(x: Tensor) -> Tensor:
    """A view of x as integers of the same width."""
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)


def tile(dim: int) -> dict[str, int]:
    """Tile sizes and warps of a program for rows of `dim` elements."""
    block = min(max(triton.next_power_of_2(dim), 16), LONGEST if dim <= LONGEST else LONGEST // 2)
    tokens = max(TILE // block, 1)
    return {"BLOCK_T": tokens, "BLOCK_D": block, "num_warps": tokens * block // 512}


def common_unit(tensors: tuple[Tensor, ...], n: int, units: tuple[int, ...] = ()) -> int:
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
    first = tl.maximum(tl.load(expert_offsets_ptr + E), 0) + tl.program_id(0).to(tl.int64) * BLOCK_T
    zeros = tl.full((BLOCK_T, BLOCK_D), 0, rows_ptr.dtype.element_ty)
    while first < R:
        row = first + tl.arange(0, BLOCK_T)
        start = tl.program_id(1) * BLOCK_D
        while start < D:
            d = start + tl.arange(0, BLOCK_D)
            tl.store(rows_ptr + row[:, None] * D + d, zeros, mask=(row < R)[:, None] & (d < D))
            start += tl.num_programs(1) * BLOCK_D
        first += tl.num_programs(0).to(tl.int64) * BLOCK_T


@triton.jit
def keys_of(bits, INF: tl.constexpr):
    """The keys of bit patterns: 0 for -0 and +0, INF + 1 for every NaN."""
    SIGN: tl.constexpr = -0x80000000 if INF > 0xFFFF else -0x8000
    magnitude = bits & ~SIGN
    mirrored = tl.where(bits < 0, -magnitude, magnitude)
    return tl.where(magnitude > INF, INF + 1, mirrored)


@triton.jit
def _fours(row):
    """The first, second, third and last elements of all groups of four neighbours."""
    low, high = tl.split(tl.reshape(row, (row.shape[0], row.shape[1] // 4, 2, 2)))
    first, third = tl.split(low)
    second, last = tl.split(high)
    return first, second, third, last


@triton.jit
def _ordered(keys, e, next_keys, next_e, PACKED: tl.constexpr):
    """The larger key and its expert, then the smaller; equal keys stay in order. If PACKED, e and next_e stay."""
    if not PACKED:
        swap = next_keys > keys
        upper = tl.where(swap, next_e, e)
        next_e = tl.where(swap, e, next_e)
        e = upper
    return tl.maximum(keys, next_keys), e, tl.minimum(keys, next_keys), next_e


@triton.jit
def sorted_fours(keys, e, PACKED: tl.constexpr):
    """The largest to smallest keys of all groups of four neighbours, then their experts. Only neighbours are compared,
    so that equal keys stay ordered by expert."""
    keys0, keys1, keys2, keys3 = _fours(keys)
    e0, e1, e2, e3 = _fours(e)
    keys2, e2, keys3, e3 = _ordered(keys2, e2, keys3, e3, PACKED)
    keys1, e1, keys2, e2 = _ordered(keys1, e1, keys2, e2, PACKED)
    keys0, e0, keys1, e1 = _ordered(keys0, e0, keys1, e1, PACKED)
    keys2, e2, keys3, e3 = _ordered(keys2, e2, keys3, e3, PACKED)
    keys1, e1, keys2, e2 = _ordered(keys1, e1, keys2, e2, PACKED)
    keys2, e2, keys3, e3 = _ordered(keys2, e2, keys3, e3, PACKED)
    return keys0, keys1, keys2, keys3, e0, e1, e2, e3


@triton.jit
def move_up(is_chosen, keys0, keys1, keys2, keys3, e0, e1, e2, BLOCK_K: tl.constexpr):
    """Keys and experts of sorted_fours, without the first ones of groups where is_chosen. BLOCK_K bounds the choices:
    with 1 no choice follows; with 2 the second reads keys0 alone."""
    if BLOCK_K > 1:
        keys0 = tl.where(is_chosen, keys1, keys0)
        e0 = tl.where(is_chosen, e1, e0)
    if BLOCK_K > 2:
        keys1 = tl.where(is_chosen, keys2, keys1)
        keys2 = tl.where(is_chosen, keys3, keys2)
        keys3 = tl.where(is_chosen, -0x80000000, keys3)
        e1 = tl.where(is_chosen, e2, e1)
    return keys0, keys1, keys2, keys3, e0, e1
