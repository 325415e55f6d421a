"""Activations of the grouped GEMM on the C++ backends: their codes, and the gradient to pre-activations."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from moe_kernels.sizes import GATED

# The codes of csrc/include/moe/cpu/activations.h and activation.cuh.
ACTIVATIONS = {name: code for code, name in enumerate(("", "relu", "gelu", "silu", "tanh", *GATED))}


def activation_bwd(native: ModuleType, grad: Tensor, pre: Tensor, activation: str) -> Tensor:
    dpre = pre.new_empty(pre.shape)
    native.call(
        "activation_bwd", pre, pre.dtype, (grad, pre.dtype), grad.stride(0), (pre, pre.dtype),
        ACTIVATIONS[activation], (dpre, pre.dtype), *grad.shape,
    )  # fmt: skip
    return dpre
