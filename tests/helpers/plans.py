"""Plans of several kinds, and their one-hot form."""

from __future__ import annotations

import torch

import moe_kernels as mk


def plans(device: str = "cpu") -> dict[str, mk.RoutingPlan]:
    experts = torch.randint(-1, 5, (23, 3), device=device)
    scores = torch.rand(23, 5, device=device)
    seldom = torch.where((scores[:, :3] < 0.3) & (experts != 2), experts, -1)
    on = {"backend": "reference"}
    return {
        "everything": mk.make_plan(experts.clamp(min=0), 5, **on),
        "dropped": mk.make_plan(experts, 5, capacity=4, priority=scores[:, 0], **on),
        "unused rows": mk.make_plan(seldom, 5, capacity=20, **on),
        "one expert": mk.make_plan(torch.full_like(experts[:, :1], 3), 5, capacity=6, **on),
        "expert choice": mk.plan_expert_choice(scores, 6, **on)[0],
        "no room": mk.make_plan(experts, 5, capacity=0, **on),
        "no tokens": mk.make_plan(experts[:0], 5, **on),
        "no choices": mk.make_plan(experts[:, :0], 5, **on),
    }


def dense(plan: mk.RoutingPlan) -> torch.Tensor:
    """float64 (R, T, K) on the CPU: element [r, t, k] is 1 if row r belongs to choice k of token t, else 0."""
    hot = torch.zeros(plan.num_rows, plan.num_tokens, plan.num_choices, dtype=torch.float64)
    used = int(plan.expert_offsets[-1])
    hot[torch.arange(used), plan.row_token[:used].long().cpu(), plan.row_choice[:used].long().cpu()] = 1
    return hot
