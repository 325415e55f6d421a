"""dispatch: T tokens of D features into the rows of a plan."""

from __future__ import annotations

import torch

from moe_kernels.cases.call import Call, Shape
from moe_kernels.cases.routing import inputs
from moe_kernels.ops import dispatch


def _least_bytes(shape: Shape, dtype: torch.dtype, direction: str) -> int:
    """x and the rows, of which a pass reads one and writes the other, and an index for each row."""
    t, d, k = (shape[name] for name in "TDK")
    return ((t * d + t * k * d) * dtype.itemsize + 4 * t * k) * (2 if direction == "training" else 1)


DISPATCH = Call(dispatch.dispatch, ("rows",), ("x",), grads=("rows",), inputs=inputs, least_bytes=_least_bytes)
