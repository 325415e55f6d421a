"""Masks: which tokens are real, for gates, policies, losses and layers. False marks padding.

A masked token has no expert, counts in no capacity, loss or statistic, and its values, even NaN, reach no result.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from moe_kernels.ops._checks import check_tensor


def check_mask(name: str, mask: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raises unless `mask` is a bool tensor of this shape on this device."""
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        raise TypeError(f"{name}: mask must have dtype bool, True for a real token; got {mask.dtype}: pass mask.bool()")
    check_tensor(name, "mask", mask, (torch.bool,))
    if tuple(mask.shape) != tuple(shape) or mask.device != device:
        raise ValueError(
            f"{name}: mask must be {tuple(shape)} on {device}, one for each token; "
            f"got {tuple(mask.shape)} on {mask.device}"
        )


def real_tokens(name: str, x: Tensor, ids: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x (T, D) and ids (T,) with zeros for masked tokens, so that what padding holds reaches no result or gradient."""
    if mask is None:
        return x, ids
    check_mask(name, mask, x.shape[:1], x.device)
    return real_rows(x, mask), None if ids is None or ids.shape != mask.shape else torch.where(mask, ids, 0)


def real_rows(x: Tensor, mask: Tensor | None) -> Tensor:
    """x with zeros where its leading dimensions, those of `mask`, are masked; x without a mask."""
    if mask is None:
        return x
    return torch.where(mask.view(*mask.shape, *(1,) * (x.dim() - mask.dim())), x, 0)


def mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the first dimension, over real tokens alone; zeros if there are none."""
    if mask is None:
        return x.mean(0) if x.shape[0] else x.sum(0)
    return real_rows(x, mask).sum(0) / count(mask, x.dtype)


def count(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """(): the number of real tokens as a divisor: 1 if there are none."""
    return mask.sum().clamp(min=1).to(dtype)


def call_with_mask(name: str, called: Any, *args: Any, mask: Tensor | None) -> Any:
    """called(*args), with mask=mask if there is a mask; TypeError if `called` does not take it."""
    if mask is None:
        return called(*args)
    if not is_compiling() and not _takes_mask(called):  # torch.compile cannot trace signatures; Python's error remains
        raise TypeError(
            f"{name}: {type(called).__name__} does not take a mask, expected a call with an argument `mask`, (T,) "
            "bool, True for a real token; give it one that leaves masked tokens with experts -1 and weights 0"
        )
    return called(*args, mask=mask)


def _is_module(called: Any) -> bool:
    return isinstance(called, torch.nn.Module)


def _takes_mask(called: Any) -> bool:
    parameters = inspect.signature(called.forward if _is_module(called) else called).parameters.values()
    return any(each.name == "mask" or each.kind is each.VAR_KEYWORD for each in parameters)


def scaled(number: Tensor, ratio: tuple[int, int], *, up: bool) -> Tensor:
    """number * ratio[0] / ratio[1], rounded up or down exactly, for an int64 tensor of numbers from 0 to 2^31 - 1.

    Results above 2^62 / 2^31 are cut to at least that. The products of int64 could overflow, as decimal factors have
    numerators up to 10^17, so the fraction is taken in digits of 31 bits. With an error below 2^-31 / ratio[1] of the
    fraction, in the direction of the rounding's opposite, no result is on the other side of an integer.
    """
    numerator, denominator = ratio
    whole, rest = divmod(numerator, denominator)
    digits = denominator.bit_length() // 31 + 2
    fraction = rest * 2 ** (31 * digits)
    fraction = fraction // denominator if up else -(-fraction // denominator)
    carry, remains = torch.zeros_like(number), torch.zeros_like(number, dtype=torch.bool)
    for place in range(digits):
        product = number * (fraction >> 31 * place & 2**31 - 1) + carry
        carry, remains = product >> 31, remains | ((product & 2**31 - 1) != 0)
    result = number * min(whole, 2**31 - 1) + carry
    return result + remains if up else result
