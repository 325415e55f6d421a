"""Cases of plans from scores: expert choice and priority routing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from moe_kernels.ops import plan
from moe_kernels.verify.make_plan import PLAN, arrays_of
from moe_kernels.verify.operation import Case, Inputs, Operation, Outputs


def _cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    for tokens, num_experts, capacity in ((6, 3, 2),) if small else ((6, 3, 2), (200, 7, 30), (130, 64, 1)):
        scores, grad = (torch.randn(tokens, num_experts, generator=generator).to(dtype).to(device) for _ in range(2))
        inputs = {"scores": scores, "capacity": capacity, "grad": grad}
        yield Case(f"{tokens} x {num_experts}, C={capacity}", inputs)


def _operation(planned: Callable[..., Any]) -> Operation:
    def run(inputs: Inputs, backend: str) -> Outputs:
        scores = inputs["scores"].detach().requires_grad_()
        made, weights = planned(scores, inputs["capacity"], backend=backend)
        (gradient,) = torch.autograd.grad(weights, scores, inputs["grad"][:, : weights.shape[1]])
        return arrays_of(made) | {"weights": weights.detach(), "gradient": gradient}

    return Operation(_cases, run, exact=frozenset((*PLAN, "weights", "gradient")))


EXPERT_CHOICE = _operation(plan.plan_expert_choice)
PRIORITY = _operation(plan.plan_priority)
