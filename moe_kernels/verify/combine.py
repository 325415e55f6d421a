"""Combine, on the inputs of dispatch."""

from __future__ import annotations

import torch

from moe_kernels.ops import combine
from moe_kernels.verify.dispatch import moving_cases
from moe_kernels.verify.operation import Inputs, Operation, Outputs


def _run(inputs: Inputs, backend: str) -> Outputs:
    rows, weights = (inputs[name].detach().requires_grad_() for name in ("rows", "weights"))
    y = combine.combine(rows, inputs["plan"], weights, backend=backend)
    to_rows, to_weights = torch.autograd.grad(y, (rows, weights), inputs["x"])
    plain = combine.combine(rows.detach(), inputs["plan"], backend=backend)
    return {"y": y, "y without weights": plain, "gradient of rows": to_rows, "gradient of weights": to_weights}


# Dot products of 64 elements in two orders differ by 1.0 in the worst of 25 draws, once by 1.4.
OPERATION = Operation(moving_cases, _run, exact=frozenset(), floor=2.0)
