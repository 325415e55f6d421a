"""The expert MLP, on the inputs of the grouped GEMM."""

from __future__ import annotations

from typing import Any

from moe_kernels.ops import expert_mlp
from moe_kernels.verify.grouped_gemm import FLOOR, expert_cases, leaves_of, named_gradients
from moe_kernels.verify.operation import Inputs, Operation, Outputs


def _run(inputs: Inputs, backend: str) -> Outputs:
    leaves: Any = leaves_of(inputs, "x", "w_in", "w_out", "weights", "b_in", "b_out")
    y = expert_mlp.expert_mlp(plan=inputs["plan"], activation=inputs["activation"], backend=backend, **leaves)
    return {"y": y, **named_gradients(y, leaves, inputs["grad"])}


OPERATION = Operation(expert_cases, _run, exact=frozenset(), floor=FLOOR)
