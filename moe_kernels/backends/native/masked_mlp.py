"""An MLP's masked layers in place, without their products (csrc/cpu/masked_mlp.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.backends import _native
from moe_kernels.backends.native.activation import ACTIVATIONS
from moe_kernels.library.masked_mlp import refuse_bad_samples


def fwd(native, values, bias, bits, samples, activation) -> None:
    """Adds the bias to a layer's values (T, N), activates, and zeroes the elements whose bit is not set."""
    refused = native.launch(
        "masked_mlp_fwd",
        values,
        _native.DTYPES[values.dtype],
        native.pointer("masked_mlp", values, values.dtype, 2),
        native.pointer("masked_mlp", bias, values.dtype, 1),
        native.pointer("masked_mlp", bits, torch.int32, 2),
        native.pointer("masked_mlp", samples, torch.int64, 1),
        bits.shape[0],
        ACTIVATIONS[activation],
        *values.shape,
    )
    if refused:
        refuse_bad_samples(samples, bits.shape[0])


def bwd(native, grad, value, bits, samples, activation) -> Tensor:
    """Turns the gradient of a layer's output into that of its pre-activations, and returns its sum over T.

    value: the output, if the activation is relu or tanh; without one the gradient is only masked.
    """
    dbias = grad.new_empty(grad.shape[1])
    refused = native.launch(
        "masked_mlp_bwd",
        grad,
        _native.DTYPES[grad.dtype],
        native.pointer("masked_mlp", grad, grad.dtype, 2),
        native.pointer("masked_mlp", value, grad.dtype, 2),
        native.pointer("masked_mlp", bits, torch.int32, 2),
        native.pointer("masked_mlp", samples, torch.int64, 1),
        bits.shape[0],
        ACTIVATIONS[activation],
        native.pointer("masked_mlp", dbias, grad.dtype, 1),
        *grad.shape,
    )
    if refused:
        refuse_bad_samples(samples, bits.shape[0])
    return dbias
