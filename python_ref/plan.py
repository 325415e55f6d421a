"""Routing plans, by definition: requests are sorted by expert, stably; each expert keeps its first `capacity` requests.

A request is a choice of a token that names an expert. `make_plan` is the routing of GShard, Switch and V-MoE; with a
priority it is V-MoE's Batch Prioritized Routing. `plan_expert_choice` and `plan_priority` are routings of the sparse
ViT.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Plan(NamedTuple):
    """The fields of moe_kernels.RoutingPlan, whose docstring explains them. All tensors are int32."""

    num_tokens: int
    num_experts: int
    expert_offsets: Tensor  # (E + 1)
    row_token: Tensor  # (R), -1 from expert_offsets[E] on
    row_choice: Tensor  # (R), -1 from expert_offsets[E] on
    slot_row: Tensor  # (T, K), -1 where dropped or no request
    requested: Tensor  # (E)
    kept: Tensor  # (E)
    dropped: Tensor  # ()


def make_plan(
    experts: Tensor,
    num_experts: int,
    *,
    capacity: int | None = None,
    priority: Tensor | None = None,
    order: str = "choice",
    limit: Tensor | None = None,
) -> Plan:
    """The plan of the requests in experts (T, K); any id outside [0, E) is no request.

    Tokens are visited by position, or by descending priority (T,), tokens of equal priority by position; NaN is the
    highest priority. order "choice": all first choices, then all second choices, and so on; "token": every choice of a
    token before the next token. A request's slot is the number of earlier requests to its expert, dropped ones
    included. A request is dropped if its slot is not below the capacity, or not below `limit`: a tensor, () or (E).
    """
    num_tokens, k = experts.shape
    device = experts.device
    if priority is None:
        visit = torch.arange(num_tokens, device=device)
    else:
        visit = torch.sort(priority.detach(), descending=True, stable=True).indices
    token = visit[:, None].expand(-1, k)
    choice = torch.arange(k, device=device).expand(num_tokens, -1)
    if order == "choice":
        token, choice = token.T, choice.T
    elif order != "token":
        raise ValueError(f"make_plan: order must be 'choice' or 'token', got {order!r}")
    token, choice = token.flatten(), choice.flatten()

    expert = experts.long()[token, choice]
    expert = torch.where((expert >= 0) & (expert < num_experts), expert, num_experts)  # id E: no request, sorted last
    expert, arrival = torch.sort(expert, stable=True)
    token, choice = token[arrival], choice[arrival]
    start = torch.searchsorted(expert, torch.arange(num_experts + 1, device=device))
    slot = torch.arange(expert.numel(), device=device) - start[expert]

    requested = start.diff()
    kept = requested if capacity is None else requested.clamp(max=capacity)
    if limit is not None:
        kept = torch.minimum(kept, limit.clamp(min=0))
    expert_offsets = torch.cat([kept.new_zeros(1), kept.cumsum(0)])
    keep = slot < torch.cat([kept, kept.new_zeros(1)])[expert]
    row = expert_offsets[expert] + slot

    bound = num_tokens * k if capacity is None else min(num_tokens * k, num_experts * capacity)
    target = torch.where(keep, row, bound)  # choices without a row write to an extra row at the end
    row_token = row.new_full((bound + 1,), -1).scatter_(0, target, torch.where(keep, token, -1))[:bound]
    row_choice = row.new_full((bound + 1,), -1).scatter_(0, target, torch.where(keep, choice, -1))[:bound]
    slot_row = row.new_full((num_tokens, k), -1)
    slot_row[token, choice] = torch.where(keep, row, -1)
    arrays = (expert_offsets, row_token, row_choice, slot_row, requested, kept, requested.sum() - kept.sum())
    return Plan(num_tokens, num_experts, *(array.to(torch.int32) for array in arrays))


def plan_expert_choice(scores: Tensor, capacity: int, limit: Tensor | None = None) -> tuple[Plan, Tensor]:
    """scores (T, E): every expert takes the min(capacity, limit, T) tokens of highest score in its column.

    limit: a tensor, () or (E); None: no limit.
    Of equal scores the earlier token wins. Column e of slot_row and of the weights (T, E) belongs to expert e; an
    expert's rows are in token order. The weight of a token is its score where the expert took it, else 0.
    """
    num_tokens, num_experts = scores.shape
    best = torch.sort(scores.detach(), dim=0, descending=True, stable=True).indices
    room = capacity if limit is None else limit.clamp(max=capacity)
    among_best = (torch.arange(num_tokens, device=scores.device)[:, None] < room).expand_as(best)
    chosen = torch.zeros_like(among_best).scatter(0, best, among_best)
    experts = torch.where(chosen, torch.arange(num_experts, device=scores.device), -1)
    return make_plan(experts, num_experts, capacity=min(capacity, num_tokens)), torch.where(chosen, scores, 0)


def plan_priority(scores: Tensor, capacity: int, limit: Tensor | None = None) -> tuple[Plan, Tensor]:
    """scores (T, E): visits (token, expert) pairs in descending score, pairs of equal score by token, then by expert.

    A pair is assigned if its token has no expert yet and its expert has fewer than `capacity` tokens, and fewer than
    `limit`, a tensor, () or (E). weights (T, 1): the token's score for its expert, 0 for a token without an expert.
    requested[e] counts the tokens whose highest score is for e (of equal scores, the lower expert). An expert's rows
    are in token order.
    """
    num_tokens, num_experts = scores.shape
    flat = scores.detach().flatten()
    room = [capacity] * num_experts if limit is None else limit.clamp(max=capacity).expand(num_experts).tolist()
    chosen = [-1] * num_tokens
    for pair in torch.sort(flat, descending=True, stable=True).indices.tolist():
        token, expert = divmod(pair, num_experts)
        if chosen[token] < 0 and room[expert] > 0:
            chosen[token] = expert
            room[expert] -= 1
    experts = torch.tensor(chosen, device=scores.device, dtype=torch.int64)[:, None]
    first = torch.sort(scores.detach(), dim=1, descending=True, stable=True).indices[:, :1]
    requested = make_plan(first, num_experts).requested
    plan = make_plan(experts, num_experts, capacity=capacity)
    plan = plan._replace(requested=requested, dropped=(requested.sum() - plan.kept.sum()).to(torch.int32))
    return plan, torch.where(experts < 0, 0, scores.gather(1, experts.clamp(min=0)))
