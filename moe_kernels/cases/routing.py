"""What the calls of a routed layer share: T tokens of D features, of which a router sends each to K of E experts."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.cases.call import Inputs, Shape, Shapes, normal
from moe_kernels.ops import plan, topk_gate


def shapes(shape: Shape) -> Shapes:
    """Tokens x, their rows in the plan's order, and gate weights. R: number of rows; T K without it."""
    tokens, dim, k = (shape[name] for name in "TDK")
    return {"x": (tokens, dim), "rows": (shape.get("R", tokens * k), dim), "weights": (tokens, k)}


def shares(shape: Shape) -> Tensor:
    """Each expert's probability (E) up to a factor, by the shape's `routing`.

    zipf: that of expert i is proportional to (i + 1)^-1.2. adversarial: expert 0 has probability 1/2, the last quarter
    of the experts has 0. uniform: all are equal.
    """
    experts = shape["E"]
    share = torch.ones(experts)
    if shape["routing"] == "zipf":
        share = torch.arange(1, experts + 1) ** -1.2
    if shape["routing"] == "adversarial":
        share[experts - experts // 4 :] = 0
        share[0] = share[1:].sum()
    return share


def logits(shape: Shape, device: str) -> Tensor:
    """Logits (T, E): the K largest of a row are K draws without replacement from a distribution over the experts.

    The distribution is that of `shares`.
    """
    experts, share = shape["E"], shares(shape)
    noise = -torch.log(-torch.log(torch.rand(shape["T"], experts, device=device).clamp(1e-20, 1 - 1e-7)))
    return (share.to(device).log() + noise).clamp(min=-1e4)


def inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    """Inputs of topk_gate, make_plan, dispatch and combine. Each draws all of them, so that all have equal ones."""
    scores = logits(shape, device)
    weights, experts = topk_gate.topk_gate(scores, shape["K"], backend="reference")
    experts = experts.to(torch.int32)
    made = plan.make_plan(experts, shape["E"], backend="reference")
    sizes = shapes({**shape, "R": made.num_rows})
    drawn = normal({"x": sizes["x"], "rows": sizes["rows"], "grad": sizes["weights"]}, dtype, device)
    given = {"experts": experts, "num_experts": shape["E"], "plan": made, "k": shape["K"]}
    return {**drawn, **given, "weights": weights.to(dtype), "logits": scores.to(dtype)}


def inputs_without_rows(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    """`inputs` with D = 1, for gates and plans, which do not read the rows."""
    return inputs({**shape, "D": 1}, dtype, device)
