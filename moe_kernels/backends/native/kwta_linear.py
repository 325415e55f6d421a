"""The linear layer of winners alone in C++: csrc/cpu/kwta_linear.cpp."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor


def kwta_linear_fwd(native: ModuleType, x: Tensor, weight: Tensor, bias: Tensor | None, bits: Tensor, k: int) -> Tensor:
    (tokens, dim), width = x.shape, weight.shape[0]
    y = x.new_empty((tokens, width))
    # A vector of 16 products takes as long as an element of other operations.
    native.call(
        "kwta_linear_fwd", max(tokens * k * dim // 16, y.numel()), x.dtype, (x, x.dtype), x.stride(0),
        (weight, x.dtype), weight.stride(0), (bias, x.dtype), (bits, torch.int32), (y, x.dtype), tokens, dim, width,
    )  # fmt: skip
    return y
