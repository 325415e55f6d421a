"""Plans: from the K experts of T tokens, or from the scores (T, E) that expert choice and priority routing read."""

from __future__ import annotations

import torch

from moe_kernels.cases.call import Call, Inputs, Shape
from moe_kernels.cases.routing import inputs_without_rows
from moe_kernels.ops import plan


def _least_bytes(shape: Shape, dtype: torch.dtype, direction: str) -> int:
    """Experts -> token, choice and slot of every row; and three numbers for each expert."""
    return 4 * (4 * shape["T"] * shape["K"] + 3 * shape["E"])


MAKE_PLAN = Call(plan.make_plan, ("plan",), inputs=inputs_without_rows, least_bytes=_least_bytes)


def _scores(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    scores = torch.randn(shape["T"], shape["E"], device=device).softmax(-1)
    return {"scores": scores, "capacity": shape["T"] // shape["E"]}


PLAN_EXPERT_CHOICE, PLAN_PRIORITY = (
    Call(planned, ("plan", "weights"), ("scores",), grads=("grad",), inputs=_scores)
    for planned in (plan.plan_expert_choice, plan.plan_priority)
)
