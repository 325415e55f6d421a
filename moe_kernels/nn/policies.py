"""Policies of the layer `MoE`: callables that make a RoutingPlan from a gate's output.

`policy(gate_output, training) -> (plan, weights)`, with one weight for each choice of the plan: (T, K).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from moe_kernels.nn._invariance import refuse_comparison
from moe_kernels.nn.gates import GateOutput
from moe_kernels.ops._checks import check_choice, check_factor, check_int
from moe_kernels.ops.plan import ORDERS, capacity_of, make_plan, plan_expert_choice, plan_priority
from moe_kernels.plan import RoutingPlan
from moe_kernels.sizes import smaller

Ratio = tuple[int, int]  # a factor as numerator and denominator
PRIORITIES = (None, "max", "sum")


@dataclass(frozen=True)
class TokenChoice:
    """Tokens choose their experts; an expert keeps the first `capacity` requests.

    Args:
        factor: in training capacity = expert_capacity(T, K, E, factor, multiple_of); None: nothing is dropped. With 0
            every request is dropped.
        factor_eval: the factor in evaluation; None: nothing is dropped; "as trained": `factor`.
        priority: None visits tokens by position. "max" and "sum" visit them in descending order of their largest or
            summed gate weight: Batch Prioritized Routing (V-MoE).
        order: "choice" visits the first choices of all tokens, then the second ones; "token" all choices of a token at
            a time. None is "choice" with a capacity, else "token".
        multiple_of: the capacity is rounded up to a multiple of this number; 4 in V-MoE's public code.
        group: number of consecutive tokens that compete for capacity. The capacity is computed with T = group, also
            for a smaller last group. None: all tokens compete.

    Example:
        >>> gate = TopKGate(16, 4, 1)(torch.randn(8, 16))
        >>> plan, weights = TokenChoice(factor=1.0)(gate, training=True)
        >>> plan.num_rows, bool((plan.kept <= 2).all())  # 8 tokens over 4 experts: room for 2 each
        (8, True)
    """

    factor: float | None = None
    factor_eval: float | str | None = "as trained"
    priority: str | None = None
    order: str | None = None
    multiple_of: int = 1
    group: int | None = None
    _ratios: ClassVar[tuple[Ratio | None, Ratio | None]]  # in evaluation, in training

    def __post_init__(self) -> None:
        check_choice("TokenChoice", "order", self.order, (None, *ORDERS))
        in_training = None if self.factor is None else check_factor("TokenChoice", "factor", self.factor)
        in_eval = in_training
        if self.factor_eval != "as trained":
            in_eval = None if self.factor_eval is None else check_factor("TokenChoice", "factor_eval", self.factor_eval)
        object.__setattr__(self, "_ratios", (in_eval, in_training))
        check_int("TokenChoice", "multiple_of", self.multiple_of, 1, 2**31 - 1, "rows")
        if self.priority not in PRIORITIES:
            raise ValueError(f"TokenChoice: priority must be one of {PRIORITIES}; got {self.priority!r}")
        if self.group is not None:
            check_int("TokenChoice", "group", self.group, 1, 2**31 - 1, "tokens of a group")

    def __call__(self, gate: GateOutput, training: bool) -> tuple[RoutingPlan, Tensor]:
        num_tokens, k = gate.experts.shape
        ratio = self._ratios[training]
        group = self.group or max(num_tokens, 1)
        capacity = None if ratio is None else capacity_of(group, k, gate.num_experts, ratio, self.multiple_of)
        if ratio is not None and ratio[0] * k < ratio[1] * gate.num_experts:  # else each expert has room for all tokens
            refuse_comparison("TokenChoice", f"a capacity of {ratio[0] / ratio[1]:g} T K / E")
        priority = None
        if self.priority is not None:
            weights = gate.weights.detach()
            priority = weights.amax(-1) if self.priority == "max" else weights.sum(-1)
        groups, experts = 1, gate.experts
        if self.group is not None:  # for tokens of group g, expert e is e * groups + g: each group has its own capacity
            groups = -(-max(num_tokens, 1) // group)
            token = torch.arange(num_tokens, dtype=experts.dtype, device=experts.device)[:, None]
            experts = torch.where(experts < 0, experts, experts * groups + token // group)
        order = self.order or ("token" if capacity is None else "choice")
        plan = make_plan(experts, gate.num_experts * groups, capacity=capacity, priority=priority, order=order)
        return (plan if self.group is None else _merge_groups(plan, gate.num_experts, groups)), gate.weights


@dataclass(frozen=True)
class NonzeroWeights:
    """A token goes to the experts whose weight is not exactly 0: dense-to-sparse training (COMET trees).

    For gates that at first give every expert a weight and later give most experts 0, such as TreeGate.

    Example:
        >>> gate = GateOutput.of_gates(torch.tensor([[0.7, 0.0, 0.3], [0.0, 1.0, 0.0]]))
        >>> plan, weights = NonzeroWeights()(gate, training=True)
        >>> plan.kept
        tensor([1, 1, 1], dtype=torch.int32)
    """

    def __call__(self, gate: GateOutput, training: bool) -> tuple[RoutingPlan, Tensor]:
        gates = gate.gates
        choices = nonzero_choices(gates.detach(), gate.experts.shape[1])
        return make_plan(choices, gate.num_experts, order="token"), gates.gather(1, choices.clamp(min=0).long())


@dataclass(frozen=True)
class ExpertChoice:
    """Expert e takes the tokens t with the highest gates_te. gates (T, E) are the gate's weights.

    Args:
        factor: an expert takes round(n factor / E) of the n tokens of a group (half to even), at most n.
        multiple_of: if given, an expert takes expert_capacity(n, 1, E, factor, multiple_of) tokens instead, at most n;
            V-MoE's public code rounds up to a multiple of 4.
        group: n, the number of consecutive tokens among which an expert chooses, such as those of an image; divides T.
            None: all T tokens are one group.

    Source: Zhou et al. 2022; the sparse ViT, section 4.

    Example:
        >>> gate = SoftmaxGate(16, 4)(torch.randn(8, 16))
        >>> plan, weights = ExpertChoice(factor=1.0)(gate, training=True)
        >>> plan.kept
        tensor([2, 2, 2, 2], dtype=torch.int32)
    """

    factor: float = 1.0
    multiple_of: int | None = None
    group: int | None = None
    _ratio: ClassVar[Ratio]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ratio", check_factor("ExpertChoice", "factor", self.factor))
        if self.multiple_of is not None:
            check_int("ExpertChoice", "multiple_of", self.multiple_of, 1, 2**31 - 1, "rows")
        if self.group is not None:
            check_int("ExpertChoice", "group", self.group, 1, 2**31 - 1, "tokens of a group")

    def __call__(self, gate: GateOutput, training: bool) -> tuple[RoutingPlan, Tensor]:
        scores, num_experts = gate.gates, gate.num_experts
        if self._ratio[0] < self._ratio[1] * num_experts:  # else each expert takes all tokens
            refuse_comparison("ExpertChoice", "an expert's choice")
        # Refuses torch.jit.trace, where T is a tensor: the trace would hold the capacity as a constant.
        check_int("ExpertChoice", "T", scores.shape[0], 0, 2**31 - 1, "tokens")
        group = self.group or max(scores.shape[0], 1)
        groups = scores.shape[0] // group
        if scores.shape[0] % group:
            raise ValueError(f"ExpertChoice: T must be a multiple of group = {group}, got {scores.shape[0]} tokens")
        capacity = smaller(self._rows(group, num_experts), group)
        if self.group is None or groups <= 1:
            return plan_expert_choice(scores, smaller(capacity, scores.shape[0]))
        # Column g E + e is expert e of group g: (T, E) becomes (group, groups * E).
        plan, weights = plan_expert_choice(scores.unflatten(0, (groups, group)).transpose(0, 1).flatten(1), capacity)
        kept, weights = (
            each.unflatten(1, (groups, num_experts)).transpose(0, 1).flatten(0, 1)
            for each in (plan.slot_row >= 0, weights)
        )
        experts = torch.where(kept, torch.arange(num_experts, dtype=torch.int32, device=scores.device), -1)
        return make_plan(experts, num_experts, capacity=groups * capacity), weights

    def _rows(self, group: int, num_experts: int) -> int:
        """Number of tokens that an expert takes from n = `group` tokens, before the limit n."""
        if self.multiple_of is not None:
            return capacity_of(group, 1, num_experts, self._ratio, self.multiple_of)
        part, whole = group * self._ratio[0], num_experts * self._ratio[1]
        # round(part / whole), half to even, without an `if`, for which torch.export would add a guard on T.
        return (2 * part + whole - 1 + part // whole % 2) // (2 * whole)


@dataclass(frozen=True)
class PriorityRouting:
    """Visits (token, expert) pairs in descending gate weight; assigns one if the token is free and the expert has room.

    See plan_priority. Source: the sparse ViT, section 4.

    Args:
        factor: an expert takes at most expert_capacity(T, 1, E, factor) tokens. If factor >= 1, no token is dropped; if
            factor = 1 and E divides T, every expert gets T / E tokens.

    Example:
        >>> gate = SoftmaxGate(16, 4)(torch.randn(8, 16))
        >>> plan, weights = PriorityRouting()(gate, training=True)
        >>> plan.kept
        tensor([2, 2, 2, 2], dtype=torch.int32)
    """

    factor: float = 1.0
    _ratio: ClassVar[Ratio]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ratio", check_factor("PriorityRouting", "factor", self.factor))

    def __call__(self, gate: GateOutput, training: bool) -> tuple[RoutingPlan, Tensor]:
        scores = gate.gates
        if self._ratio[0] < self._ratio[1] * gate.num_experts:  # else each token gets its first choice
            refuse_comparison("PriorityRouting", "the order of all gate weights")
        return plan_priority(scores, capacity_of(scores.shape[0], 1, gate.num_experts, self._ratio))


def _merge_groups(plan: RoutingPlan, num_experts: int, groups: int) -> RoutingPlan:
    """A plan over E experts from a plan over E * groups experts, in which expert e of group g is e * groups + g."""
    first = torch.arange(num_experts + 1, device=plan.row_token.device) * groups

    def merge(counts: Tensor) -> Tensor:
        # Differences of a cumsum, since a sum over a dimension of size `groups` would make torch.export guard on T.
        return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))[first].diff()

    return replace(
        plan,
        num_experts=num_experts,
        expert_offsets=plan.expert_offsets[first],
        requested=merge(plan.requested),
        kept=merge(plan.kept),
    )


def nonzero_choices(gates: Tensor, k: int) -> Tensor:
    """The experts whose gate is not exactly 0, as choices (T, min(k, E)) int32 for make_plan; -1 is no choice.

    k: an upper bound of a token's number of such experts.
    """
    experts = torch.arange(gates.shape[1], dtype=torch.int32, device=gates.device)
    choices = torch.where(gates != 0, experts, -1)
    return choices if k >= choices.shape[1] else choices.topk(k).values
