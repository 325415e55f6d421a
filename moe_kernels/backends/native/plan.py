"""Routing plans: make_plan on both C++ backends, plan_expert_choice and plan_priority only on the CPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_kernels.sizes import plan_rows, refuse_unknown_experts, words

COLUMNS = 16  # kColumns of csrc/cpu/plan.cpp: experts for which plan_expert_choice chooses tokens together
ENTRY = 16  # most bytes of a token that an expert holds and its score (Held of csrc/cpu/plan.cpp)


def make_plan(native, experts, num_experts, capacity, priority, order) -> tuple[Tensor, ...]:
    num_tokens, k = experts.shape
    num_rows = plan_rows(num_tokens, k, num_experts, capacity)
    arrays = _arrays(experts, num_tokens, k, num_experts, num_rows)
    visit = None if priority is None else torch.sort(priority, descending=True, stable=True).indices
    counts = native.plan_counts(experts, num_experts, order)
    out_of_range = native.call(
        "make_plan_fwd", experts, experts.element_size(), (experts, experts.dtype, 2), (visit, torch.int64, 1),
        (counts, torch.int32, counts.dim()), counts.shape[0], *_int32(arrays), num_tokens, k,
        num_experts, num_tokens * k if capacity is None else capacity, num_rows, order == "choice",
    )  # fmt: skip
    if out_of_range:
        refuse_unknown_experts(experts, num_experts)
    return arrays


def plan_expert_choice(native: ModuleType, scores: Tensor, capacity: int) -> tuple[Tensor, ...]:
    num_tokens, num_experts = scores.shape
    num_rows = plan_rows(num_tokens, num_experts, num_experts, capacity)
    arrays = _arrays(scores, num_tokens, num_experts, num_experts, num_rows)
    keys = scores.new_empty((native.chunks(scores.numel()), COLUMNS, 32 * words(num_tokens)))
    native.call(
        "plan_expert_choice_fwd", scores, scores.dtype, (scores, scores.dtype, 2), scores.stride(0),
        (keys, scores.dtype, 3), *_int32(arrays), num_tokens, num_experts, capacity,
        num_rows,
    )  # fmt: skip
    return arrays


def plan_priority(native: ModuleType, scores: Tensor, capacity: int) -> tuple[Tensor, ...]:
    num_tokens, num_experts = scores.shape
    capacity = min(capacity, num_tokens)
    experts = scores.new_empty((num_tokens, 1), dtype=torch.int32)
    requested = scores.new_empty(num_experts, dtype=torch.int32)
    kept = scores.new_empty(num_experts, dtype=torch.int32)
    held = scores.new_empty((num_experts * (1 + capacity), ENTRY), dtype=torch.uint8)
    native.call(
        "plan_priority_fwd", scores, scores.dtype, (scores, scores.dtype, 2), scores.stride(0),
        (held, torch.uint8, 2), (experts, torch.int32, 2), (requested, torch.int32, 1), (kept, torch.int32, 1),
        num_tokens, num_experts, capacity,
    )  # fmt: skip
    offsets, row_token, row_choice, slot_row, _, kept, _ = make_plan(
        native, experts, num_experts, capacity, None, "token"
    )
    return offsets, row_token, row_choice, slot_row, requested, kept, num_tokens - offsets[-1], experts


def _arrays(x: Tensor, num_tokens: int, k: int, num_experts: int, num_rows: int) -> tuple[Tensor, ...]:
    """Memory for expert_offsets, row_token, row_choice, slot_row, requested, kept and dropped."""
    shapes: tuple[Any, ...] = num_experts + 1, num_rows, num_rows, (num_tokens, k), num_experts, num_experts, ()
    return tuple(x.new_empty(shape, dtype=torch.int32) for shape in shapes)


def _int32(arrays: tuple[Tensor, ...]) -> list[tuple[Tensor, torch.dtype, int]]:
    return [(array, torch.int32, array.dim()) for array in arrays]
