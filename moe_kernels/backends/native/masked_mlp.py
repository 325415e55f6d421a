"""An MLP's masked layers in place, but for their products (csrc/cpu/masked_mlp.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from moe_kernels.backends import _native
from moe_kernels.backends.native.activation import ACTIVATIONS
from moe_kernels.library.kwta import refuse_bad_samples


def ready(
    native: ModuleType, dtype: torch.dtype, tokens: int, num_samples: int, widths: list[int], activation: str
) -> tuple[Callable[..., None], Callable[..., Tensor]]:
    """fwd_ and bwd_ of hidden layers (T, N_l), contiguous and of that dtype, and the bits of S samples, or of T.

    What does not change from step to step is found here, once: in a batch of 32 a layer takes 10 us.
    """
    code, activated, isa = _native.DTYPES[dtype], ACTIVATIONS[activation], native.isa
    layers = [(n, native.chunks(tokens * n)) for n in widths]
    fwd, bwd = native.module.masked_mlp_fwd, native.module.masked_mlp_bwd

    def fwd_(values: Tensor, bias: Tensor | None, bits: Tensor, samples: Tensor | None, layer: int) -> None:
        """Adds the bias, activates, and zeroes the elements whose bit is not set."""
        if fwd(isa, code, values, bias, bits, samples, num_samples, activated, tokens, *layers[layer]):
            refuse_bad_samples(samples, num_samples)

    def bwd_(grad: Tensor, value: Tensor | None, bits: Tensor, samples: Tensor | None, layer: int) -> Tensor:
        """Turns the gradient of a layer's output into that of its pre-activations, and returns its sum over T.

        value: the output, where the activation is relu or tanh; without one the gradient is only masked.
        """
        n, threads = layers[layer]
        dbias = grad.new_empty(n)
        if bwd(isa, code, grad, value, bits, samples, num_samples, activated, dbias, tokens, n, threads):
            refuse_bad_samples(samples, num_samples)
        return dbias

    return fwd_, bwd_
