"""Who decides where a token goes, once a gate has said how much it wants to: policies for the layer `MoE`.

`policy(gate_output, training) -> (plan, weights)`: the RoutingPlan, and the weights (T, K) that fit its slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.nn.gates import GateOutput
from moe_kernels.ops._checks import check_choice
from moe_kernels.ops.plan import ORDERS, expert_capacity, make_plan, plan_expert_choice, plan_priority
from moe_kernels.plan import RoutingPlan

PRIORITIES = (None, "max", "sum")


@dataclass(frozen=True)
class TokenChoice:
    """Tokens choose; an expert keeps the first `capacity` of those that ask for it.

    factor: capacity = expert_capacity(T, K, E, factor, multiple_of); None: nothing is dropped.
    factor_eval: the same in evaluation, where V-MoE may lower it after training; "as trained": no difference.
    priority: None visits tokens by position; "max" or "sum" by the largest or the summed gate weight of a token,
        Batch Prioritized Routing (paper 003, section 4; its published code has "max" alone).
    order: of make_plan. multiple_of: V-MoE's published code rounds up to 4.
    """

    factor: float | None = None
    factor_eval: float | str | None = "as trained"
    priority: str | None = None
    order: str = "choice"
    multiple_of: int = 1

    def __post_init__(self) -> None:
        check_choice("TokenChoice", "order", self.order, ORDERS)
        if self.priority not in PRIORITIES:
            raise ValueError(f"TokenChoice: priority must be one of {PRIORITIES}; got {self.priority!r}")

    def __call__(self, gate: GateOutput, training: bool) -> tuple[RoutingPlan, Tensor]:
        num_tokens, k = gate.experts.shape
        factor = self.factor if training or self.factor_eval == "as trained" else self.factor_eval
        capacity = (
            None if factor is None else expert_capacity(num_tokens, k, gate.num_experts, factor, self.multiple_of)
        )
        priority = None
        if self.priority is not None:
            weights = gate.weights.detach()
            priority = weights.amax(-1) if self.priority == "max" else weights.sum(-1)
        plan = make_plan(gate.experts, gate.num_experts, capacity=capacity, priority=priority, order=self.order)
        return plan, gate.weights


@dataclass(frozen=True)
class ExpertChoice:
    """Every expert takes the tokens that score highest with it: the gate's `gates` (T, E) are the scores.

    Source: paper 002, section 3; Zhou et al. 2022. multiple_of: V-MoE's published code rounds up to 4.
    """

    factor: float = 1.0
    multiple_of: int = 1

    def __call__(self, gate: GateOutput, training: bool) -> tuple[RoutingPlan, Tensor]:
        scores = gate.gates
        capacity = expert_capacity(scores.shape[0], 1, gate.num_experts, self.factor, self.multiple_of)
        return plan_expert_choice(scores, min(capacity, scores.shape[0]))


@dataclass(frozen=True)
class PriorityRouting:
    """Every token gets one expert; a full expert passes it on to its next best: loads are even (paper 002)."""

    factor: float = 1.0

    def __call__(self, gate: GateOutput, training: bool) -> tuple[RoutingPlan, Tensor]:
        scores = gate.gates
        return plan_priority(scores, expert_capacity(scores.shape[0], 1, gate.num_experts, self.factor))


def nonzero_choices(gates: Tensor, k: int) -> Tensor:
    """The experts (T, min(k, E)) int32 of gates (T, E) that are not exactly 0: those that have to be evaluated.

    k: as many as a token has at most. -1 where it has fewer.
    """
    experts = torch.arange(gates.shape[1], dtype=torch.int32, device=gates.device)
    choices = torch.where(gates != 0, experts, -1)
    return choices if k >= choices.shape[1] else choices.topk(k).values
