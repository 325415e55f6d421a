"""kWTA of R rows of N elements, of which the fraction p wins."""

from __future__ import annotations

import torch

from moe_kernels.cases.call import Call, Inputs, Shape, normal
from moe_kernels.ops import kwta
from moe_kernels.sizes import words


def _inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    size = shape["R"], shape["N"]
    return {**normal({"x": size, "grad": size}, dtype, device), "k": kwta.k_from_fraction(shape["p"], shape["N"])}


def _least_bytes(shape: Shape, dtype: torch.dtype, direction: str) -> int:
    rows, n = shape["R"], shape["N"]
    matrix, bits = rows * n * dtype.itemsize, rows * words(n) * 4
    forward, backward = 2 * matrix, 2 * matrix + bits  # x -> y; grad and bits -> dx
    return {"forward": forward, "backward": backward, "training": forward + bits + backward}[direction]


KWTA = Call(kwta.kwta, ("y",), ("x",), grads=("grad",), inputs=_inputs, least_bytes=_least_bytes)
