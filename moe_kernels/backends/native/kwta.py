"""k-winner-take-all on the C++ backends: csrc/cpu/kwta.cpp and csrc/cuda/kwta.cu take the same arguments."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moe_kernels.backends import _native
from moe_kernels.backends._seed import normal_quantile
from moe_kernels.library import words

TIES = {"index": 0, "strict": 1, "all": 2}


def fwd(native: ModuleType, x: Tensor, values: Tensor | None, k: int, ties: str, save_bits: bool):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    bits = x.new_empty((x.shape[0], words(x.shape[1]) if save_bits else 0), dtype=torch.int32)
    _launch(native, x, values, k, ties, y=y, bits=bits if save_bits else None)
    return y, bits


def mask(native: ModuleType, x: Tensor, k: int, ties: str) -> Tensor:
    out = x.new_empty(x.shape, dtype=torch.bool)
    _launch(native, x, None, k, ties, mask=out)
    return out


def bwd(native: ModuleType, grad: Tensor, bits: Tensor) -> Tensor:
    dx = torch.empty_like(grad, memory_format=torch.contiguous_format)
    native.launch(
        "kwta_bwd",
        grad,
        grad.element_size(),
        native.pointer("kwta", grad, grad.dtype, 2),
        grad.stride(0),
        native.pointer("kwta", bits, torch.int32, 2),
        native.pointer("kwta", dx, grad.dtype, 2),
        *grad.shape,
    )
    return dx


def _launch(native: ModuleType, x: Tensor, values: Tensor | None, k: int, ties: str, y=None, bits=None, mask=None):
    native.launch(
        "kwta_fwd",
        x,
        _native.DTYPES[x.dtype],
        native.pointer("kwta", x, x.dtype, 2),
        x.stride(0),
        native.pointer("kwta", values, x.dtype, 2),
        0 if values is None else values.stride(0),
        native.pointer("kwta", y, x.dtype, 2),
        native.pointer("kwta", bits, torch.int32, 2),
        native.pointer("kwta", mask, torch.bool, 2),
        *x.shape,
        k,
        TIES[ties],
        normal_quantile(k, x.shape[1]),
    )
