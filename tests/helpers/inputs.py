"""Copies of a tensor that reveal reads outside of its rows, assumed alignment and 32-bit indices; gradients of one
input at a time."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable

import torch

NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python names from 3.13 on
PROT_NONE = 0


def framed(x: torch.Tensor, fill: float = math.nan) -> torch.Tensor:
    """A copy of x inside a tensor that holds `fill` on all sides of x's last two dimensions. Rows of elements of 2, 4
    or 8 bytes start at multiples of 16 bytes, whatever the length of a row."""
    rows, columns = x.shape[-2:]
    whole = x.new_full((*x.shape[:-2], rows + 6, columns // 8 * 8 + 24), fill)
    view = whole[..., 3 : 3 + rows, 8 : 8 + columns]
    view.copy_(x)
    return view


def padded(x: torch.Tensor, fill: float = math.nan) -> torch.Tensor:
    """A copy of x with three elements `fill` after each row."""
    whole = x.new_full((*x.shape[:-1], x.shape[-1] + 3), fill)
    view = whole[..., : x.shape[-1]]
    view.copy_(x)
    return view


def shifted(x: torch.Tensor, fill: float = math.nan) -> torch.Tensor:
    """A copy of x, in which every row starts one element after a multiple of 16 bytes."""
    whole = x.new_full((*x.shape[:-1], x.shape[-1] // 8 * 8 + 16), fill)
    view = whole[..., 1 : x.shape[-1] + 1]
    view.copy_(x)
    return view


def behind_one(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of x that starts one element after a multiple of 16 bytes."""
    return torch.cat([x.new_full((1,), math.nan), x.flatten()])[1:].view(x.shape)


def gapped(x: torch.Tensor) -> torch.Tensor:
    """A copy of x with one NaN between x[i] and x[i + 1]; each x[i], a matrix or a row, is contiguous."""
    whole = x.new_full((x.shape[0], x[0].numel() + 1), math.nan)
    view = whole[:, :-1].unflatten(1, x.shape[1:])
    view.copy_(x)
    return view


def far_apart(x: torch.Tensor, strides: tuple[int, ...] | None = None) -> torch.Tensor:
    """A copy of x with rows 2^30 elements apart, or with `strides`. On a CPU only pages with elements of x take memory.
    At 2^30, a row's offset in elements exceeds int32 from row 2 on; in vectors of 8 elements, from row 16 on."""
    strides = strides or (2**30, 1)
    last = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    bytes_ = (last + 1) * x.element_size()
    if x.is_cuda:
        memory = torch.empty(bytes_, dtype=torch.uint8, device=x.device)
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        memory = torch.frombuffer(mmap.mmap(-1, bytes_, flags=flags), dtype=torch.uint8)
    view = memory.view(x.dtype).as_strided(x.shape, strides)
    view.copy_(x)
    return view


def at_the_end(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of x on the CPU. The page after its last byte can be neither read nor written."""
    page = mmap.PAGESIZE
    size = -(-x.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + size), page, PROT_NONE) == 0
    view = (
        torch.frombuffer(memory, dtype=torch.uint8, count=x.nbytes, offset=size - x.nbytes).view(x.dtype).view(x.shape)
    )
    return view.copy_(x)


def each_alone(
    call: Callable[..., torch.Tensor], leaves: dict[str, torch.Tensor], grad: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Gradients of call(**leaves) by the name of the input, each from a call in which only that input requires grad."""
    found = {}
    for name in leaves:
        given = {key: each.detach().requires_grad_(key == name) for key, each in leaves.items()}
        (found[name],) = torch.autograd.grad(call(**given), given[name], grad)
    return found
