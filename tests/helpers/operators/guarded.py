"""Tensors between pages that can be neither read nor written: a kernel that leaves them crashes."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
MOST = 64 * 2**20  # bytes of a tensor; the calls here need far fewer

_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def _elements(count: int, dtype: torch.dtype, at_end: bool) -> Tensor:
    """(count,): ends right before such a page if at_end, else starts right after one."""
    size = count * dtype.itemsize
    if size == 0:
        return torch.zeros(0, dtype=dtype)
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    view = ctypes.c_char.from_buffer(memory)
    for page in (0, pages + 1):
        if _mprotect(ctypes.addressof(view) + page * PAGE, PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    del view
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=PAGE + (pages * PAGE - size if at_end else 0))


def _extent(x: Tensor) -> int:
    """The number of elements from the first to the last element of x in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def placed(x: Tensor, at_end: bool = True) -> Tensor:
    """A copy of x with its strides."""
    found = _elements(_extent(x), x.dtype, at_end)
    found.copy_(x.as_strided(found.shape, (1,)))
    return found.as_strided(x.shape, x.stride())


def _fill(x: Tensor, pattern: str) -> Tensor:
    if x.dtype == torch.bool:
        return x.fill_(pattern == "nan")
    if not x.dtype.is_floating_point:
        limit = torch.iinfo(x.dtype).max
        return x.fill_(limit if pattern == "nan" else 12345 % limit)
    return x.fill_(float(pattern))


@contextmanager
def allocations(at_end: bool, pattern: str) -> Iterator[None]:
    """In the block memory that torch.empty, torch.empty_like and Tensor.new_empty allocate is guarded too and holds a
    pattern, "nan" (the largest number for integers) or "12345". Tensors that PyTorch allocates in C++ are as always."""

    def guarded(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **named: Any) -> Tensor:
            given = args[0] if args and isinstance(args[0], Tensor) else None
            if torch.device(named.get("device") or (given.device if given is not None else "cpu")).type != "cpu":
                return make(*args, **named)
            like = make(*args, **named | {"device": "meta"})
            if like.numel() * like.itemsize > MOST:
                raise RuntimeError(f"would allocate {like.numel() * like.itemsize} bytes")
            return _fill(_elements(like.numel(), like.dtype, at_end), pattern).as_strided(like.shape, like.stride())

        return made

    with (
        patch.object(torch, "empty", guarded(torch.empty)),
        patch.object(torch, "empty_like", guarded(torch.empty_like)),
        patch.object(torch.Tensor, "new_empty", guarded(torch.Tensor.new_empty)),
    ):
        yield
