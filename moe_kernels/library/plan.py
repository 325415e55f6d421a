"""The operators that compute the arrays of a RoutingPlan."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import backends
from moe_kernels.ops._define import define, define_check, no_flops
from moe_kernels.sizes import plan_rows, refuse_unknown_experts

define_check("refuse_unknown_experts(Tensor experts, SymInt num_experts)", refuse_unknown_experts)


def make_plan(experts, num_experts, capacity, priority, order, backend) -> tuple[Tensor, ...]:
    if backend != "cpu":  # the C++ kernel checks while it reads
        refuse_unknown_experts(experts, num_experts)
    return backends.load(backend, "plan").make_plan_fwd(experts, num_experts, capacity, priority, order)


def _plan_fake(x: Tensor, num_tokens: int, k: int, num_experts: int, num_rows: int) -> tuple[Tensor, ...]:
    shapes = ((num_experts + 1,), (num_rows,), (num_rows,), (num_tokens, k), (num_experts,), (num_experts,), ())
    return tuple(x.new_empty(shape, dtype=torch.int32) for shape in shapes)


def _make_plan_fake(experts: Tensor, num_experts: int, capacity: int | None, priority: Tensor | None, order, backend):
    num_tokens, k = experts.shape
    return _plan_fake(experts, num_tokens, k, num_experts, plan_rows(num_tokens, k, num_experts, capacity))


def _plan_expert_choice_fake(scores: Tensor, capacity: int, backend: str):
    num_tokens, num_experts = scores.shape
    num_rows = plan_rows(num_tokens, num_experts, num_experts, capacity)
    return _plan_fake(scores, num_tokens, num_experts, num_experts, num_rows)


def _plan_priority_fake(scores: Tensor, capacity: int, backend: str):
    num_tokens, num_experts = scores.shape
    arrays = _plan_fake(scores, num_tokens, 1, num_experts, plan_rows(num_tokens, 1, num_experts, capacity))
    return *arrays, scores.new_empty((num_tokens, 1), dtype=torch.int32)


_PLAN = ", ".join(["Tensor"] * 7)  # expert_offsets, row_token, row_choice, slot_row, requested, kept, dropped

define(
    "make_plan_fwd(Tensor experts, SymInt num_experts, SymInt? capacity, Tensor? priority, str order, str backend) -> "
    f"({_PLAN})",
    make_plan,
    _make_plan_fake,
    no_flops,
)
define(
    f"plan_expert_choice_fwd(Tensor scores, SymInt capacity, str backend) -> ({_PLAN})",
    lambda scores, capacity, backend: backends.load(backend, "plan").plan_expert_choice_fwd(scores, capacity),
    _plan_expert_choice_fake,
    no_flops,
)
define(
    f"plan_priority_fwd(Tensor scores, SymInt capacity, str backend) -> ({_PLAN}, Tensor)",
    lambda scores, capacity, backend: backends.load(backend, "plan").plan_priority_fwd(scores, capacity),
    _plan_priority_fake,
    no_flops,
)
