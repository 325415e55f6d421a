"""Initialisation and dtype of the layers' parameters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class RouterLinear(nn.Linear):
    """An nn.Linear with the initial distribution of a gate.

    bound: weight ~ U(-bound, bound); None: as in nn.Linear. zero_bias: the bias starts at 0, not as in nn.Linear.
    """

    def __init__(
        self,
        dim: int,
        out: int,
        *,
        bias: bool = True,
        bound: float | None = None,
        zero_bias: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.bound, self.zero_bias = bound, zero_bias
        super().__init__(dim, out, bias=bias, device=device, dtype=dtype)
        if generator is not None:
            self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        if generator is None:
            super().reset_parameters()
        else:
            bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
            uniform_(self.weight, bound, generator)
            uniform_(self.bias, bound, generator)
        if self.bound is not None:
            uniform_(self.weight, self.bound, generator)
        if self.zero_bias and self.bias is not None:
            nn.init.zeros_(self.bias)


def router_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """`dtype`, the argument of a gate's constructor. For None it is float32 if torch's default dtype is 16-bit, as in
    torch.set_default_dtype(torch.bfloat16) and Fabric's "bf16-true": a 16-bit router would choose other experts."""
    if dtype is None and torch.get_default_dtype() in (torch.bfloat16, torch.float16):
        return torch.float32
    return dtype


class KeepsFloat32(nn.Module):
    """float32 tensors stay float32 where `.half()` or `.to()` would make them 16-bit, if keep_float32 (see Gate)."""

    keep_float32 = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(partial(_keep_float32, fn) if self.keep_float32 else fn, recurse)


def _keep_float32(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """fn(tensor); a float32 tensor that fn would make bfloat16 or float16 only moves to the device of the result."""
    result = fn(tensor)
    narrowed = tensor.dtype == torch.float32 and result.dtype in (torch.bfloat16, torch.float16)
    return tensor.to(result.device) if narrowed else result


def reset(module: nn.Module, generator: torch.Generator | None) -> None:
    """Calls reset_parameters of the nearest descendants that have it, with the generator if the method takes one."""
    for child in module.children():
        method: Any = getattr(child, "reset_parameters", None)
        if method is None:
            reset(child, generator)
        elif "generator" in inspect.signature(method).parameters:
            method(generator)
        else:
            method()


def uniform_(parameter: Tensor | None, bound: float, generator: torch.Generator | None) -> None:
    """Draws a parameter from U(-bound, bound) in place; does nothing if it is None."""
    if parameter is not None:
        with torch.no_grad():
            parameter.uniform_(-bound, bound, generator=generator)


def empty_parameter(*shape: int, **options: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, **options))


def linear_init_(parameter: Tensor | None, fan_in: int, generator: torch.Generator | None) -> None:
    """Draws weights or biases of linear layers with `fan_in` inputs, as nn.Linear does; does nothing for None."""
    uniform_(parameter, 1 / math.sqrt(fan_in) if fan_in else 0.0, generator)


def orthogonal_init_(weight: Tensor, gain: float, generator: torch.Generator | None = None) -> None:
    """torch.nn.init.orthogonal_. 16-bit weights are drawn in float32, since torch has no 16-bit QR decomposition."""
    narrow = weight.dtype in (torch.bfloat16, torch.float16)
    drawn = torch.empty_like(weight, dtype=torch.float32) if narrow else weight
    torch.nn.init.orthogonal_(drawn, gain=gain, generator=generator)
    if narrow:
        with torch.no_grad():
            weight.copy_(drawn)
