"""Policies of the layer `MoE`: callables that make a RoutingPlan from a gate's output.

`policy(gate_output, training, mask=None) -> (plan, weights)`, with one weight for each choice of the plan: (T, K).
mask (T,) bool is True for real tokens. With a mask, capacities are those of the real tokens (of each group): R is
computed from all T, which the host knows, and `limit` of the plan from the mask, for which the host does not wait. So
real tokens get the experts that they would get in a batch without the masked ones. A policy of your own needs `mask`
only in layers that are called with one.

NonzeroWeights and TokenChoice without a capacity are causal: a token's experts do not depend on later tokens. With a
capacity and order "token", TokenChoice is causal but for the capacity itself, which grows with T; with order "choice"
first choices of later tokens come before second choices of earlier ones. ExpertChoice, PriorityRouting and TokenChoice
with a priority are not causal. A language model that trains with a policy that is not causal behaves otherwise when it
generates token by token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from moe_kernels import sizes
from moe_kernels.nn._invariance import refuse_comparison
from moe_kernels.nn._mask import check_mask, scaled
from moe_kernels.nn.gates import GateOutput
from moe_kernels.ops._checks import check_choice, check_factor, check_int
from moe_kernels.ops.plan import ORDERS, capacity_of, make_plan, plan_expert_choice, plan_priority
from moe_kernels.plan import RoutingPlan
from moe_kernels.sizes import larger, smaller

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
            summed gate weight: Batch Prioritized Routing (V-MoE). Not causal.
        order: "choice" visits the first choices of all tokens, then the second ones; "token" all choices of a token at
            a time. None is "choice" with a capacity, else "token".
        multiple_of: the capacity is rounded up to a multiple of this number; 4 in V-MoE's public code.
        group: number of consecutive tokens that compete for capacity. The capacity is computed with T = group, also
            for a smaller last group. None: all tokens compete.

    With a mask the capacity is computed without the masked tokens of the group.

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

    def __call__(self, gate: GateOutput, training: bool, mask: Tensor | None = None) -> tuple[RoutingPlan, Tensor]:
        _check("TokenChoice", gate, mask)
        num_tokens, k = gate.experts.shape
        in_eval, in_training = self._ratios  # torch 2.11 compiles no index by a bool
        ratio = in_training if training else in_eval
        group = self.group or max(num_tokens, 1)
        capacity = None if ratio is None else capacity_of(group, k, gate.num_experts, ratio, self.multiple_of)
        if ratio is not None and ratio[0] * k < ratio[1] * gate.num_experts:  # else each expert has room for all tokens
            refuse_comparison("TokenChoice", f"a capacity of {ratio[0] / ratio[1]:g} T K / E")
        priority = None
        if self.priority is not None:
            weights = gate.weights.detach()
            priority = weights.amax(-1) if self.priority == "max" else weights.sum(-1)
        groups, experts, limit = 1, gate.experts, None
        if self.group is not None:  # for tokens of group g, expert e is e * groups + g: each group has its own capacity
            groups = -(-max(num_tokens, 1) // group)
            token = torch.arange(num_tokens, dtype=experts.dtype, device=experts.device)[:, None]
            experts = torch.where(experts < 0, experts, experts * groups + token // group)
        if mask is not None and ratio is not None:  # masked tokens have experts -1; here they leave the capacity too
            real = group - _masked(mask, group, groups)
            rows = scaled(real * k, (ratio[0], ratio[1] * gate.num_experts), up=True)
            limit = _limit(rows + -rows % self.multiple_of).repeat(gate.num_experts)
        order = self.order or ("token" if capacity is None else "choice")
        plan = make_plan(
            experts, gate.num_experts * groups, capacity=capacity, priority=priority, order=order, limit=limit
        )
        return (plan if self.group is None else _merge_groups(plan, gate.num_experts, groups)), gate.weights


@dataclass(frozen=True)
class NonzeroWeights:
    """A token goes to the experts whose weight is not exactly 0: dense-to-sparse training (COMET trees).

    For gates that at first give every expert a weight and later give most experts 0, such as TreeGate. Causal. In eager
    mode on the CPU the plan has only the rows in use, elsewhere R = T K.

    Example:
        >>> gate = GateOutput.of_gates(torch.tensor([[0.7, 0.0, 0.3], [0.0, 1.0, 0.0]]))
        >>> plan, weights = NonzeroWeights()(gate, training=True)
        >>> plan.kept
        tensor([1, 1, 1], dtype=torch.int32)
    """

    def __call__(self, gate: GateOutput, training: bool, mask: Tensor | None = None) -> tuple[RoutingPlan, Tensor]:
        _check("NonzeroWeights", gate, mask)
        gates = gate.gates
        choices = nonzero_choices(gates.detach(), gate.experts.shape[1])
        plan = rows_in_use(make_plan(choices, gate.num_experts, order="token"))
        return plan, gates.gather(1, choices.clamp(min=0).long())


@dataclass(frozen=True)
class ExpertChoice:
    """Expert e takes the tokens t with the highest gates_te. gates (T, E) are the gate's weights.

    Not causal: later tokens can take the place of earlier ones.

    Args:
        factor: an expert takes max(1, round(n factor / E)) of the n tokens of a group (half to even), at most n; with
            factor 0 none.
        multiple_of: if given, an expert takes expert_capacity(n, 1, E, factor, multiple_of) tokens instead, at most n;
            V-MoE's public code rounds up to a multiple of 4.
        group: n, the number of consecutive tokens among which an expert chooses, such as those of an image; divides T.
            None: all T tokens are one group.

    With a mask n is the number of real tokens of the group, and no expert takes a masked token.

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

    def __call__(self, gate: GateOutput, training: bool, mask: Tensor | None = None) -> tuple[RoutingPlan, Tensor]:
        _check("ExpertChoice", gate, mask)
        gates, num_experts = gate.gates, gate.num_experts
        if self._ratio[0] < self._ratio[1] * num_experts:  # else each expert takes all tokens
            refuse_comparison("ExpertChoice", "an expert's choice")
        scores = _keys(gates, mask)
        # Refuses torch.jit.trace, where T is a tensor: the trace would hold the capacity as a constant.
        check_int("ExpertChoice", "T", scores.shape[0], 0, 2**31 - 1, "tokens")
        group = self.group or max(scores.shape[0], 1)
        groups = scores.shape[0] // group
        if scores.shape[0] % group:
            raise ValueError(f"ExpertChoice: T must be a multiple of group = {group}, got {scores.shape[0]} tokens")
        capacity, limit = smaller(self._rows(group, num_experts), group), None
        if mask is not None:
            real = group - _masked(mask, group, larger(groups, 1))
            limit = _limit(torch.minimum(self._real_rows(real, num_experts), real)).repeat_interleave(num_experts)
        if self.group is None or groups <= 1:
            plan, weights = plan_expert_choice(scores, smaller(capacity, scores.shape[0]), limit=limit)
            return plan, weights if mask is None else torch.where(plan.slot_row >= 0, gates, 0)
        # Column g E + e is expert e of group g: (T, E) becomes (group, groups * E).
        by_group = scores.unflatten(0, (groups, group)).transpose(0, 1).flatten(1)
        plan, weights = plan_expert_choice(by_group, capacity, limit=limit)
        kept, weights = (
            each.unflatten(1, (groups, num_experts)).transpose(0, 1).flatten(0, 1)
            for each in (plan.slot_row >= 0, weights)
        )
        experts = torch.where(kept, torch.arange(num_experts, dtype=torch.int32, device=scores.device), -1)
        weights = weights if mask is None else torch.where(kept, gates, 0)
        return make_plan(experts, num_experts, capacity=groups * capacity), weights

    def _rows(self, group: int, num_experts: int) -> int:
        """Number of tokens that an expert takes from n = `group` tokens, before the limit n."""
        if self.multiple_of is not None:
            return capacity_of(group, 1, num_experts, self._ratio, self.multiple_of)
        part, whole = group * self._ratio[0], num_experts * self._ratio[1]
        # round(part / whole), half to even, without an `if`, for which torch.export would add a guard on T.
        return larger((2 * part + whole - 1 + part // whole % 2) // (2 * whole), self._fewest)

    def _real_rows(self, real: Tensor, num_experts: int) -> Tensor:
        """_rows for a tensor of numbers of tokens."""
        if self.multiple_of is not None:
            rows = scaled(real, (self._ratio[0], self._ratio[1] * num_experts), up=True)
            return rows + -rows % self.multiple_of
        twice = 2 * self._ratio[0], num_experts * self._ratio[1]
        halves, above = scaled(real, twice, up=False), scaled(real, twice, up=True)
        # An odd whole number of halves is a tie, which goes to the even neighbour.
        tie = (halves == above) & (halves % 2 == 1)
        return torch.where(tie, halves // 2 + halves // 2 % 2, (halves + 1) // 2).clamp(min=self._fewest)

    @property
    def _fewest(self) -> int:
        return 1 if self._ratio[0] else 0


@dataclass(frozen=True)
class PriorityRouting:
    """Visits (token, expert) pairs in descending gate weight; assigns one if the token is free and the expert has room.

    See plan_priority. Not causal: later tokens can take the place of earlier ones. Source: the sparse ViT, section 4.

    Args:
        factor: an expert takes at most expert_capacity(T, 1, E, factor) tokens. If factor >= 1, no token is dropped; if
            factor = 1 and E divides T, every expert gets T / E tokens. With a mask T is the number of real tokens.

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

    def __call__(self, gate: GateOutput, training: bool, mask: Tensor | None = None) -> tuple[RoutingPlan, Tensor]:
        _check("PriorityRouting", gate, mask)
        gates, num_experts = gate.gates, gate.num_experts
        if self._ratio[0] < self._ratio[1] * num_experts:  # else each token gets its first choice
            refuse_comparison("PriorityRouting", "the order of all gate weights")
        num_tokens = gates.shape[0]
        capacity = capacity_of(num_tokens, 1, num_experts, self._ratio)
        if mask is None:
            return plan_priority(gates, capacity)
        real = num_tokens - _masked(mask, larger(num_tokens, 1), 1)
        limit = _limit(scaled(real, (self._ratio[0], self._ratio[1] * num_experts), up=True))[0]
        plan, _ = plan_priority(_keys(gates, mask), capacity, limit=limit)
        # Masked tokens came last, after all pairs of real tokens: without them the others keep their experts.
        experts = torch.where(mask[:, None], plan.slot_expert, -1)
        kept = make_plan(experts, num_experts, capacity=capacity, order="token")
        # Expert 0 is the first of the equal highest scores of a masked token.
        unmasked = torch.arange(num_experts, device=mask.device) > 0
        requested = torch.where(unmasked, plan.requested, plan.requested - (~mask).sum(dtype=torch.int32))
        dropped = requested.sum(dtype=torch.int32) - kept.expert_offsets[-1]
        weights = torch.where(experts < 0, 0, gates.gather(1, experts.clamp(min=0).long()))
        return replace(kept, requested=requested, dropped=dropped), weights


def _check(name: str, gate: GateOutput, mask: Tensor | None) -> None:
    if mask is not None:
        check_mask(name, mask, gate.weights.shape[:1], gate.weights.device)


def _masked(mask: Tensor, group: int, groups: int) -> Tensor:
    """(groups,) int64: the number of masked tokens in each group of consecutive tokens."""
    of_token = torch.arange(mask.shape[0], device=mask.device) // group
    return torch.zeros(groups, dtype=torch.int64, device=mask.device).index_add(0, of_token, (~mask).long())


def _limit(rows: Tensor) -> Tensor:
    return rows.clamp(max=2**31 - 1).to(torch.int32)


def _keys(gates: Tensor, mask: Tensor | None) -> Tensor:
    """The gates (T, E) for a choice that takes masked tokens last: -inf for them, above it for all others."""
    if mask is None:
        return gates
    return torch.where(mask[:, None], gates.detach().clamp(min=torch.finfo(gates.dtype).min), -torch.inf)


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


def rows_in_use(plan: RoutingPlan) -> RoutingPlan:
    """The plan with R the number of rows in use, in eager mode on the CPU; elsewhere `plan` itself.

    A GPU's host would wait for the number, and a graph would keep it. Rows in use are first, so their values and
    gradients stay as they were, and no operation runs over the others: with 16 experts, of which a token uses 4, over a
    quarter of the rows.
    """
    if not sizes.has_values(plan.expert_offsets):
        return plan
    rows = int(plan.expert_offsets[-1])
    return replace(plan, row_token=plan.row_token[:rows], row_choice=plan.row_choice[:rows])
