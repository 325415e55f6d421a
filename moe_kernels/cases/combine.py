"""combine: the rows of a plan into T tokens of D features, weighted or, without weights, summed."""

from __future__ import annotations

import torch

from moe_kernels.cases.call import Call, Shape, streamed
from moe_kernels.cases.routing import inputs, shapes
from moe_kernels.ops import combine

LEAVES = ("rows", "weights")


def _least_bytes(shape: Shape, dtype: torch.dtype, direction: str) -> int:
    """Rows and weights -> tokens, with an index for each row in every pass."""
    indices = 4 * shape["T"] * shape["K"] * (2 if direction == "training" else 1)
    return streamed(shapes, LEAVES, ("x",), shape, dtype, direction) + indices


COMBINE = Call(combine.combine, ("y",), LEAVES, grads=("x",), inputs=inputs, least_bytes=_least_bytes)
