"""Helpers for torch.autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.amp import is_autocast_available

from moe_kernels.backends import constant


def autocast_on(device_type: str) -> bool:
    """Whether autocast is on for that device type; False if the type has no autocast, such as meta."""
    return _has_autocast(device_type) and torch.is_autocast_enabled(device_type)


@constant  # torch.compile of torch 2.11 cannot trace is_autocast_available
def _has_autocast(device_type: str) -> bool:
    return is_autocast_available(device_type)


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    return torch.autocast(device_type, enabled=False) if autocast_on(device_type) else nullcontext()


def as_autocast(x: Tensor, *parameters: Tensor | None) -> tuple[Any, ...]:
    """x and parameters, cast to the autocast dtype if autocast is on for the device of x; float64 and integers stay."""
    device_type = x.device.type
    if not autocast_on(device_type):
        return x, *parameters
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        each if each is None or not each.is_floating_point() or each.dtype == torch.float64 else each.to(dtype)
        for each in (x, *parameters)
    )
