"""Plans by expert choice and by priority, on the CPU alone: csrc/cpu/plan.cpp."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moe_kernels.backends.native.plan import as_int32, each_limit, make_plan_fwd, plan_arrays
from moe_kernels.sizes import plan_rows, words

COLUMNS = 16  # kColumns of csrc/cpu/plan.cpp: experts for which plan_expert_choice chooses tokens together
ENTRY = 16  # most bytes of a token that an expert holds and its score (Held of csrc/cpu/plan.cpp)


def plan_expert_choice_fwd(
    native: ModuleType, scores: Tensor, capacity: int, limit: Tensor | None = None
) -> tuple[Tensor, ...]:
    num_tokens, num_experts = scores.shape
    num_rows = plan_rows(num_tokens, num_experts, num_experts, capacity)
    arrays = plan_arrays(scores, num_tokens, num_experts, num_experts, num_rows)
    keys = scores.new_empty((native.chunks(scores.numel()), COLUMNS, 32 * words(num_tokens)))
    native.call(
        "plan_expert_choice_fwd", scores, scores.dtype, (scores, scores.dtype), scores.stride(0),
        (keys, scores.dtype), *as_int32(arrays), num_tokens, num_experts, capacity,
        each_limit(limit, num_experts), num_rows,
    )  # fmt: skip
    return arrays


def plan_priority_fwd(
    native: ModuleType, scores: Tensor, capacity: int, limit: Tensor | None = None
) -> tuple[Tensor, ...]:
    num_tokens, num_experts = scores.shape
    capacity = min(capacity, num_tokens)
    experts = scores.new_empty((num_tokens, 1), dtype=torch.int32)
    requested = scores.new_empty(num_experts, dtype=torch.int32)
    kept = scores.new_empty(num_experts, dtype=torch.int32)
    held = scores.new_empty((num_experts * (1 + capacity), ENTRY), dtype=torch.uint8)
    native.call(
        "plan_priority_fwd", scores, scores.dtype, (scores, scores.dtype), scores.stride(0),
        (held, torch.uint8), (experts, torch.int32), (requested, torch.int32), (kept, torch.int32),
        num_tokens, num_experts, capacity, each_limit(limit, num_experts),
    )  # fmt: skip
    offsets, row_token, row_choice, slot_row, _, kept, _ = make_plan_fwd(
        native, experts, num_experts, capacity, None, "token"
    )
    return offsets, row_token, row_choice, slot_row, requested, kept, num_tokens - offsets[-1], experts
