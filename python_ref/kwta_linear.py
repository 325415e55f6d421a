"""A linear layer of which each row keeps some outputs, by definition: all outputs, then the mask.

COMET fixed routing, eqs. 7 and 8: the masks come from the routing network, so they are known before the product.
"""

import torch
from torch import Tensor

from python_ref.kwta import kwta_apply


def kwta_linear(x: Tensor, weight: Tensor, bits: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., D), W (N, D), packed mask (..., ceil(N / 32)), b (N) -> x W^T + b (..., N), +0 outside the mask."""
    return kwta_apply(torch.nn.functional.linear(x, weight, bias), bits)
