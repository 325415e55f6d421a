"""k-winner-take-all as three operators: masked values and packed mask, the gradient, and the mask alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import backends
from moe_kernels.ops._define import define, no_flops, operators
from moe_kernels.sizes import contiguous_rows, words


def _fwd(x: Tensor, values: Tensor | None, k: int, ties: str, save_bits: bool, backend: str) -> tuple[Tensor, Tensor]:
    values = None if values is None else contiguous_rows(values)
    return backends.load(backend, "kwta").kwta_fwd(contiguous_rows(x), values, k, ties, save_bits)


def _fwd_fake(x: Tensor, values: Tensor | None, k: int, ties: str, save_bits: bool, backend: str):
    bits = x.new_empty((x.shape[0], words(x.shape[1]) if save_bits else 0), dtype=torch.int32)
    return x.new_empty(x.shape), bits


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, values, ctx.k, ctx.ties, saved, ctx.backend = inputs
    ctx.through_values = values is not None
    ctx.save_for_backward(output[1] if saved else None, None if saved else x)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    bits, x = ctx.saved_tensors
    if bits is None:
        _, bits = operators.kwta_fwd(x.detach(), None, ctx.k, ctx.ties, True, ctx.backend)
    masked = operators.kwta_bwd(grad, bits, ctx.backend)
    return (None, masked, *[None] * 4) if ctx.through_values else (masked, *[None] * 5)


def _bwd(grad: Tensor, bits: Tensor, backend: str) -> Tensor:
    return backends.load(backend, "kwta").kwta_bwd(contiguous_rows(grad), bits.contiguous())


def _save_bits(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bits, ctx.backend = inputs
    ctx.save_for_backward(bits)


def _masked(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """kwta_bwd multiplies grad by the mask, and so does its gradient."""
    (bits,) = ctx.saved_tensors
    return operators.kwta_bwd(grad, bits, ctx.backend), None, None


def _mask(x: Tensor, k: int, ties: str, backend: str) -> Tensor:
    return backends.load(backend, "kwta").kwta_mask(contiguous_rows(x), k, ties)


def _one_per_element(x_shape, *args, out_shape=None, **kwargs) -> int:
    return x_shape[0] * x_shape[1]


define(
    "kwta_fwd(Tensor x, Tensor? values, SymInt k, str ties, bool save_bits, str backend) -> (Tensor, Tensor)",
    _fwd,
    _fwd_fake,
    _one_per_element,
    save=_save,
    backward=_backward,
    batched=(0, 1),
)
define(
    "kwta_bwd(Tensor grad, Tensor bits, str backend) -> Tensor",
    _bwd,
    lambda grad, bits, backend: grad.new_empty(grad.shape),
    _one_per_element,
    save=_save_bits,
    backward=_masked,
    batched=(0, 1),
)
define(
    "kwta_mask(Tensor x, SymInt k, str ties, str backend) -> Tensor",
    _mask,
    lambda x, k, ties, backend: x.new_empty(x.shape, dtype=torch.bool),
    no_flops,
    batched=(0,),
)
