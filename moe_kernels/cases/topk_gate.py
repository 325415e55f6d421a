"""The top-k gate: K of the E logits of T tokens."""

from __future__ import annotations

import torch

from moe_kernels.cases.call import Call, Shape
from moe_kernels.cases.routing import inputs_without_rows
from moe_kernels.ops import topk_gate


def _least_bytes(shape: Shape, dtype: torch.dtype, direction: str) -> int:
    """Forward: logits -> weights and experts. Backward: these and the weights' gradient -> the logits' gradient."""
    t, e, k = (shape[name] for name in "TEK")
    passes = [t * e + t * k] + [2 * t * k + t * e] * (direction == "training")
    return sum(elements * dtype.itemsize + 4 * t * k for elements in passes)


RESULTS = ("weights", "experts")
TOPK_GATE = Call(topk_gate.topk_gate, RESULTS, ("logits",), ("noise",), ("grad",), inputs_without_rows, _least_bytes)
