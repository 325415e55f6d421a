"""Checks of operators' arguments, before a kernel gets their addresses.

Exported and compiled programs call operators without the public functions and their checks. `op` is the operator's name
and `name` the argument's, both as in its schema. `like` is a tensor whose device the argument must share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INT32_MAX = 2**31 - 1


def floating(op: str, name: str, tensor: Tensor, rank: int) -> torch.Size:
    """The shape of `tensor`; raises unless it has `rank` dimensions and a floating-point dtype that kernels take."""
    if tensor.dtype not in FLOATING:
        raise TypeError(f"{op}: {name} must be float32, bfloat16, float16 or float64; got {tensor.dtype}")
    return shape_of(op, name, tensor, rank)


def shape_of(op: str, name: str, tensor: Tensor, rank: int) -> torch.Size:
    """The shape of `tensor`; raises unless it has `rank` dimensions."""
    shape = tensor.shape
    if len(shape) != rank:
        raise ValueError(f"{op}: {name} must have {rank} dimensions, got shape {tuple(shape)}")
    return shape


def expect(op: str, name: str, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> None:
    """Raises unless `tensor` is None or has this shape and dtype and the device of `like`."""
    if tensor is None:
        return
    if tensor.dtype is not dtype:
        raise TypeError(f"{op}: {name} must be {dtype}, got {tensor.dtype}".replace("torch.", ""))
    if tensor.shape != shape or tensor.get_device() != like.get_device():  # a third of the time of .device
        raise ValueError(
            f"{op}: {name} must be {tuple(shape)} on {like.device}; got {tuple(tensor.shape)} on {tensor.device}"
        )


def integer(op: str, name: str, value: int, low: int, high: int = INT32_MAX) -> None:
    if not low <= value <= high:
        raise ValueError(f"{op}: {name} must be from {low} to {high}, got {value}")


def positive(op: str, name: str, value: float) -> None:
    if not 0 < value < inf:
        raise ValueError(f"{op}: {name} must be above 0 and finite, got {value}")


def one_of(op: str, name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def flags(op: str, name: str, values: Sequence[bool], count: int) -> None:
    if len(values) != count:
        raise ValueError(f"{op}: {name} must hold {count} bools, one for each gradient; got {len(values)}")


def absent(op: str, name: str, tensor: Tensor | None, other: str) -> None:
    """Raises unless `tensor` is None, as it must be where `other` says."""
    if tensor is not None:
        raise ValueError(f"{op}: {name} must be None {other}, got shape {tuple(tensor.shape)}")
