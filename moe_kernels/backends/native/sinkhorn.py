"""Sinkhorn's iteration on the C++ backends (csrc/cpu/sinkhorn.cpp, csrc/cuda/sinkhorn.cu)."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moe_kernels.backends import _native


def fwd(native: ModuleType, scores: Tensor, taus: list[float]) -> Tensor:
    p = scores.new_empty(scores.shape)
    _launch(native, "sinkhorn_fwd", scores, taus, p)
    return p


def bwd(native: ModuleType, grad: Tensor, scores: Tensor, taus: list[float]) -> Tensor:
    dscores = scores.new_empty(scores.shape)
    _launch(native, "sinkhorn_bwd", scores, taus, dscores, grad)
    return dscores


def _launch(native: ModuleType, name: str, scores: Tensor, taus: list[float], out: Tensor, *grad: Tensor) -> None:
    batch, n, _ = scores.shape
    scratch = native.sinkhorn_scratch(scores, len(taus), backward=bool(grad))
    native.launch(
        name,
        scores,
        _native.DTYPES[scores.dtype],
        *(argument for x in (*grad, scores) for argument in _matrices(native, x)),
        taus[0],
        taus[-1],
        len(taus),
        native.pointer("sinkhorn", out, scores.dtype, 3),
        native.pointer("sinkhorn", scratch, torch.uint8, 2),
        scratch.shape[1],
        batch,
        n,
    )


def _matrices(native: ModuleType, x: Tensor) -> tuple[int, int, int]:
    """Address and strides of (batch, n, n)."""
    return native.pointer("sinkhorn", x, x.dtype, 3), x.stride(0), x.stride(1)
