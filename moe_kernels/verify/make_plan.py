"""Cases of make_plan, expert choice and priority routing; choices of experts that cases of other operations use too."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_kernels.cases.call import Call, normal
from moe_kernels.cases.plan import MAKE_PLAN, PLAN_EXPERT_CHOICE, PLAN_PRIORITY
from moe_kernels.ops import plan
from moe_kernels.plan import RoutingPlan
from moe_kernels.verify.operation import Case, Inputs, Operation, Outputs


def routings(small: bool) -> Iterator[tuple[str, Tensor, int, int | None]]:
    """(name, experts (T, K), E, capacity): random experts, one expert for all, some choices -1 (none), no tokens."""
    generator = torch.Generator().manual_seed(0)
    for tokens, k, num_experts in ((7, 2, 5),) if small else ((7, 2, 5), (100, 1, 1), (513, 8, 128), (40, 3, 1000)):
        uniform = torch.randint(0, num_experts, (tokens, k), generator=generator)
        for capacity in (None, 0, 3):
            yield f"uniform {tokens} x {k}, E={num_experts}, C={capacity}", uniform, num_experts, capacity
        yield f"one expert {tokens} x {k}, E={num_experts}", uniform * 0 + num_experts - 1, num_experts, 9
        partial = uniform.masked_fill(torch.rand(tokens, k, generator=generator) < 0.4, -1)
        yield f"some chose no expert {tokens} x {k}, E={num_experts}", partial, num_experts, None
    yield "no tokens", torch.zeros(0, 2, dtype=torch.int64), 3, 2


def _cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for index, (name, experts, num_experts, capacity) in enumerate(routings(small)):
        priority = (
            torch.randint(0, 5, (experts.shape[0],), generator=generator).to(dtype).to(device) if index % 2 else None
        )
        order = plan.ORDERS[index // 2 % 2]
        chosen = experts.to(torch.int32 if index % 3 else torch.int64).to(device)
        inputs = {"experts": chosen, "num_experts": num_experts, "capacity": capacity, "priority": priority}
        yield Case(f"{name}, {order}{', priority' * (priority is not None)}", inputs | {"order": order})


PLAN = ("expert_offsets", "row_token", "row_choice", "slot_row", "requested", "kept", "dropped")


def arrays_of(made: RoutingPlan) -> Outputs:
    return {name: getattr(made, name) for name in PLAN}


def _run(inputs: Inputs, backend: str) -> Outputs:
    return arrays_of(MAKE_PLAN.run(inputs, backend))


OPERATION = Operation(_cases, _run, exact=frozenset(PLAN))


def _scores_cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    for tokens, num_experts, capacity in ((6, 3, 2),) if small else ((6, 3, 2), (200, 7, 30), (130, 64, 1)):
        sizes = dict.fromkeys(("scores", "grad"), (tokens, num_experts))
        inputs = {**normal(sizes, dtype, device, generator), "capacity": capacity}
        yield Case(f"{tokens} x {num_experts}, C={capacity}", inputs)


def _of_scores(call: Call) -> Operation:
    def run(inputs: Inputs, backend: str) -> Outputs:
        scores = inputs["scores"].detach().requires_grad_()
        made, weights = call.run({**inputs, "scores": scores}, backend)
        (gradient,) = torch.autograd.grad(weights, scores, inputs["grad"][:, : weights.shape[1]])
        return arrays_of(made) | {"weights": weights.detach(), "gradient": gradient}

    return Operation(_scores_cases, run, exact=frozenset((*PLAN, "weights", "gradient")))


EXPERT_CHOICE = _of_scores(PLAN_EXPERT_CHOICE)
PRIORITY = _of_scores(PLAN_PRIORITY)
