"""Sinkhorn's iteration on the C++ backends (csrc/cpu/sinkhorn.cpp)."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moe_kernels.backends import _native

PACKED = 16  # the largest n whose matrices lie across vector lanes


def fwd(native: ModuleType, scores: Tensor, taus: list[float]) -> Tensor:
    p = scores.new_empty(scores.shape)
    _launch(native, "sinkhorn_fwd", scores, taus, p, matrices=3, vectors=12)
    return p


def bwd(native: ModuleType, grad: Tensor, scores: Tensor, taus: list[float]) -> Tensor:
    dscores = scores.new_empty(scores.shape)
    # Every iteration keeps its potentials: in logarithms three vectors of rows and three of columns.
    _launch(native, "sinkhorn_bwd", scores, taus, dscores, grad, matrices=5, vectors=12 + 6 * len(taus))
    return dscores


def scratch_bytes(n: int, matrices: int, vectors: int) -> int:
    """What a thread needs at most: in vectors of 64 bytes for each element, or in rows of doubles padded to 16."""
    vector = 64 * n if n <= PACKED else 8 * -(-n // 16) * 16
    return (matrices * n + vectors) * vector


def _launch(native, name, scores, taus, out, *grad, matrices: int, vectors: int) -> None:
    batch, n, _ = scores.shape
    stride = scratch_bytes(n, matrices, vectors)
    scratch = scores.new_empty((native.chunks(scores), stride), dtype=torch.uint8)
    steps = torch.tensor(taus, dtype=torch.float64)
    native.launch(
        name,
        scores,
        _native.DTYPES[scores.dtype],
        *(argument for x in (*grad, scores) for argument in _matrices(native, x)),
        native.pointer("sinkhorn", steps, torch.float64, 1),
        len(taus),
        native.pointer("sinkhorn", out, scores.dtype, 3),
        native.pointer("sinkhorn", scratch, torch.uint8, 2),
        stride,
        batch,
        n,
    )


def _matrices(native: ModuleType, x: Tensor) -> tuple[int, int, int]:
    """Address and strides of (batch, n, n)."""
    return native.pointer("sinkhorn", x, x.dtype, 3), x.stride(0), x.stride(1)
