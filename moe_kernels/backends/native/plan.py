"""make_plan on the C++ backends: csrc/cpu/plan.cpp and csrc/cuda/plan.cu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels.sizes import plan_rows, refuse_unknown_experts


def make_plan_fwd(native, experts, num_experts, capacity, priority, order, limit=None) -> tuple[Tensor, ...]:
    num_tokens, k = experts.shape
    num_rows = plan_rows(num_tokens, k, num_experts, capacity)
    arrays = plan_arrays(experts, num_tokens, k, num_experts, num_rows)
    visit = None if priority is None else torch.sort(priority, descending=True, stable=True).indices
    counts = native.plan_counts(experts, num_experts, order)
    out_of_range = native.call(
        "make_plan_fwd", experts, experts.element_size(), (experts, experts.dtype), (visit, torch.int64),
        each_limit(limit, num_experts), (counts, torch.int32), counts.shape[0], *as_int32(arrays), num_tokens, k,
        num_experts, num_tokens * k if capacity is None else capacity, num_rows, order == "choice",
    )  # fmt: skip
    if out_of_range:
        refuse_unknown_experts(experts, num_experts)
    return arrays


def plan_arrays(x: Tensor, num_tokens: int, k: int, num_experts: int, num_rows: int) -> tuple[Tensor, ...]:
    """Memory for expert_offsets, row_token, row_choice, slot_row, requested, kept and dropped."""
    shapes: tuple[Any, ...] = num_experts + 1, num_rows, num_rows, (num_tokens, k), num_experts, num_experts, ()
    return tuple(x.new_empty(shape, dtype=torch.int32) for shape in shapes)


def each_limit(limit: Tensor | None, num_experts: int) -> tuple[Tensor | None, torch.dtype]:
    """`limit`, () or (E,), for every expert."""
    return None if limit is None else limit.expand(num_experts).contiguous(), torch.int32


def as_int32(arrays: tuple[Tensor, ...]) -> list[tuple[Tensor, torch.dtype]]:
    return [(array, torch.int32) for array in arrays]
