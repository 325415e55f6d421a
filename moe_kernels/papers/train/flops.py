"""torch's counter of FLOPs, with formulas for what it does not know or counts by shapes alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count


def counter() -> FlopCounterMode:
    """A context manager that counts. Products of experts count the rows in use, combine all rows of its plan."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch has no formula for it
    experts = torch.ops.moe_kernels
    formulas = {experts.grouped_gemm_fwd: _grouped_gemm_flops, experts.expert_mlp_fwd: _expert_mlp_flops}
    return FlopCounterMode(display=False, custom_mapping={**formulas, attention: _attention_flops})


def _attention_flops(query: Any, key: Any, value: Any, *rest: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _grouped_gemm_flops(x: Tensor, weight: Tensor, expert_offsets: Tensor, *rest: Any, **kwargs: Any) -> int:
    """FLOPs for the rows in use. The operation's registered formula sees only shapes, so it counts all rows."""
    return 2 * int(expert_offsets[-1]) * weight.shape[1] * weight.shape[2]


def _expert_mlp_flops(
    x: Tensor,
    weights: Tensor | None,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
    expert_offsets: Tensor,
    row_token: Tensor,
    *rest: Any,
    **kwargs: Any,
) -> int:
    """FLOPs of the two products, as in _grouped_gemm_flops, and of combine."""
    products = sum(_grouped_gemm_flops(x, each, expert_offsets) for each in (w_in, w_out))
    return products + (1 if weights is None else 2) * row_token.shape[0] * w_out.shape[2]


# torch's counter then passes tensors, not shapes. mypy rejects an assignment.
setattr(_grouped_gemm_flops, "_get_raw", True)  # noqa: B010
setattr(_expert_mlp_flops, "_get_raw", True)  # noqa: B010
