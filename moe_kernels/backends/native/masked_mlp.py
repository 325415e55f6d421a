"""Masks of an MLP's hidden layers in place: forward by csrc/cpu/kwta.cpp, back by csrc/cpu/masked_mlp.cpp."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moe_kernels.backends import _native
from moe_kernels.backends.native.activation import ACTIVATIONS


def keep_(native: ModuleType, values: Tensor, bits: Tensor) -> None:
    """Zeroes the elements of contiguous values (T, N) whose bit is not set: a kernel reads each before it writes it."""
    address, (tokens, n) = native.pointer("masked_mlp", values, values.dtype, 2), values.shape
    packed = native.pointer("masked_mlp", bits, torch.int32, 2)
    native.launch("kwta_bwd", values, values.element_size(), address, n, packed, address, tokens, n)


def bwd_(native: ModuleType, grad: Tensor, value: Tensor | None, bits: Tensor, activation: str) -> Tensor:
    """Turns the contiguous gradient of a hidden layer's output, (T, N), into that of its pre-activations, and sums it.

    value: the layer's output, where `activation` is relu or tanh; without an activation the gradient is masked.
    """
    dbias = grad.new_empty(grad.shape[1])
    native.launch(
        "masked_mlp_bwd",
        grad,
        _native.DTYPES[grad.dtype],
        native.pointer("masked_mlp", grad, grad.dtype, 2),
        native.pointer("masked_mlp", value, grad.dtype, 2),
        native.pointer("masked_mlp", bits, torch.int32, 2),
        ACTIVATIONS[activation],
        native.pointer("masked_mlp", dbias, grad.dtype, 1),
        *grad.shape,
    )
    return dbias
