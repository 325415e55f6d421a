"""Sinkhorn's iteration on the C++ backends (csrc/cpu/sinkhorn.cpp, csrc/cuda/sinkhorn.cu)."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moe_kernels.backends import _native


def fwd(native, scores, taus, rows, columns, tolerance) -> Tensor:
    p = scores.new_empty(scores.shape)
    _launch(native, "sinkhorn_fwd", scores, taus, p, sums=(*_vectors(native, rows, columns), tolerance))
    return p


def bwd(native, grad, scores, taus, rows, columns, tolerance) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dscores = scores.new_empty(scores.shape)
    drows, dcolumns = (None if x is None else x.new_empty(x.shape) for x in (rows, columns))
    sums = (*_vectors(native, rows, columns), tolerance, *_vectors(native, drows, dcolumns))
    _launch(native, "sinkhorn_bwd", scores, taus, dscores, grad, sums=sums)
    return dscores, drows, dcolumns


def _launch(native, name, scores, taus, out, *grad, sums) -> None:
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
        *sums,
        passes=max(len(taus), 1),
    )


def _matrices(native: ModuleType, x: Tensor) -> tuple[int, int, int]:
    """Address and strides of (batch, n, n)."""
    return native.pointer("sinkhorn", x, x.dtype, 3), x.stride(0), x.stride(1)


def _vectors(native: ModuleType, *vectors: Tensor | None) -> list[int]:
    """Addresses of (batch, n) float64, 0 for None."""
    return [native.pointer("sinkhorn", x, torch.float64, 2) for x in vectors]
