"""Converts tensors to arguments of C++ functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# The same codes as in csrc/include/moe/common/dtypes.h.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}

# A hook for tests: `pointer` calls it with each tensor.
on_pointer: Callable[[Tensor], None] | None = None


def pointer(device_type: str, op: str, tensor: Tensor | None, dtype: torch.dtype) -> int:
    """A tensor's address, 0 for None. Checks dtype, device type, and that the last dimension is contiguous: operators
    have checked shapes (ops/_checks.py)."""
    if tensor is None:
        return 0
    on_device = tensor.is_cpu if device_type == "cpu" else tensor.is_cuda
    if tensor.dtype is not dtype or not on_device:
        raise TypeError(f"{op}: a kernel expected {dtype} on {device_type}, got {tensor.dtype} on {tensor.device}")
    if not tensor.is_contiguous() and tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel() > 0:
        raise TypeError(f"{op}: a kernel expected a contiguous last dimension, got strides {tensor.stride()}")
    if on_pointer is not None:
        on_pointer(tensor)
    return tensor.data_ptr()


def as_numbers(device_type: str, name: str, arguments: Iterable[Any]) -> list[int | float]:
    """The arguments of C++ function `name`: tuples (tensor, dtype) become addresses, and dtypes their codes."""
    return [
        pointer(device_type, name, *each) if isinstance(each, tuple) else DTYPES.get(each, each) for each in arguments
    ]


def unsupported(target: str, expected: str, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """None if kernels for device type `expected` and `dtypes` take tensors of `target` and `dtype`, else the reason."""
    device = target.partition(":")[0]
    if device != expected:
        return f"it runs on {expected} tensors, not on {device} ones"
    if dtype not in dtypes:
        return f"it takes {', '.join(str(each) for each in dtypes)}, not {dtype}".replace("torch.", "")
    return None
