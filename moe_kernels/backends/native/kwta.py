"""k-winner-take-all on the C++ backends: csrc/cpu/kwta.cpp and csrc/cuda/kwta.cu."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moe_kernels.backends._seed import normal_quantile
from moe_kernels.sizes import words

TIES = {"index": 0, "strict": 1, "all": 2}


def kwta_fwd(native: ModuleType, x: Tensor, values: Tensor | None, k: int, ties: str, save_bits: bool):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    bits = x.new_empty((x.shape[0], words(x.shape[1]) if save_bits else 0), dtype=torch.int32)
    _run(native, x, values, k, ties, y=y, bits=bits if save_bits else None)
    return y, bits


def kwta_mask(native: ModuleType, x: Tensor, k: int, ties: str) -> Tensor:
    out = x.new_empty(x.shape, dtype=torch.bool)
    _run(native, x, None, k, ties, mask=out)
    return out


def kwta_bwd(native: ModuleType, grad: Tensor, bits: Tensor) -> Tensor:
    dx = torch.empty_like(grad, memory_format=torch.contiguous_format)
    native.call(
        "kwta_bwd", grad, grad.element_size(), (grad, grad.dtype), grad.stride(0), (bits, torch.int32),
        (dx, grad.dtype), *grad.shape,
    )  # fmt: skip
    return dx


def _run(native: ModuleType, x: Tensor, values: Tensor | None, k: int, ties: str, y=None, bits=None, mask=None):
    native.call(
        "kwta_fwd", x, x.dtype, (x, x.dtype), x.stride(0), (values, x.dtype),
        0 if values is None else values.stride(0), (y, x.dtype), (bits, torch.int32), (mask, torch.bool),
        *x.shape, k, TIES[ties], normal_quantile(k, x.shape[1]),
    )  # fmt: skip
