"""Sinkhorn's iteration on the C++ backends: csrc/cpu/sinkhorn.cpp and csrc/cuda/sinkhorn.cu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sinkhorn_fwd(native, scores, taus, rows, columns, tolerance) -> Tensor:
    p = scores.new_empty(scores.shape)
    _run(native, "sinkhorn_fwd", scores, taus, p, sums=(*_vectors(rows, columns), tolerance))
    return p


def sinkhorn_bwd(native, grad, scores, taus, rows, columns, tolerance) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dscores = scores.new_empty(scores.shape)
    drows, dcolumns = (None if x is None else x.new_empty(x.shape) for x in (rows, columns))
    sums = (*_vectors(rows, columns), tolerance, *_vectors(drows, dcolumns))
    _run(native, "sinkhorn_bwd", scores, taus, dscores, grad, sums=sums)
    return dscores, drows, dcolumns


def _run(native, name, scores, taus, out, *grad, sums) -> None:
    batch, n, _ = scores.shape
    scratch = native.sinkhorn_scratch(scores, len(taus), backward=bool(grad))
    native.call(
        name, scores, scores.dtype,
        *(argument for x in (*grad, scores) for argument in _matrix(x)), taus[0], taus[-1], len(taus),
        (out, scores.dtype), (scratch, torch.uint8), scratch.shape[1], batch, n, *sums, passes=max(len(taus), 1),
    )  # fmt: skip


def _matrix(x: Tensor) -> tuple[Any, int, int]:
    """Arguments of native.call for x (batch, n, n): tensor, dtype, and the first two strides."""
    return (x, x.dtype), x.stride(0), x.stride(1)


def _vectors(*vectors: Tensor | None) -> list[tuple[Tensor | None, torch.dtype]]:
    """Arguments of native.call for float64 tensors (batch, n) or None: each as tensor and dtype."""
    return [(x, torch.float64) for x in vectors]
