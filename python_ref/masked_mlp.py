"""By definition: an MLP whose hidden neurons are masked, with a given mask for each sample.

Paper 000 (COMET), eqs. 7 and 8.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from python_ref.kwta import kwta_apply

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "mish": F.mish,
}


def masked_mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    bits: Sequence[Tensor],
    *,
    activation: str,
    apply: Callable[[Tensor, Tensor], Tensor] = kwta_apply,
) -> Tensor:
    """x (..., N_0) -> W_L x_{L-1} + b_L (..., N_L) with x_l = m_l * f(W_l x_{l-1} + b_l).

    A neuron that does not answer is +0 and hands no gradient on, whatever its pre-activation: that is masked too.
    """
    for weight, bias, mask in zip(weights, biases, bits, strict=False):
        x = ACTIVATIONS[activation](apply(F.linear(x, weight, bias), mask))
        if activation == "softplus":  # the only f with f(0) != 0
            x = apply(x, mask)
    return F.linear(x, weights[-1], biases[-1])
