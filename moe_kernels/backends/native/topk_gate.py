"""The top-k gate on the C++ backends: csrc/cpu/topk_gate.cpp and csrc/cuda/topk_gate.cu."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moe_kernels.sizes import compute_dtype, refuse_bad_choices, refuse_bad_forced

RULES = ("topk_softmax", "softmax_topk", "sigmoid")  # as Rule in csrc


def topk_gate_fwd(
    native: ModuleType, logits: Tensor, k: int, order: str, bias: Tensor | None, num_groups: int, kept_groups: int,
    renormalise: bool, scale: float, forced: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_tokens, num_experts = logits.shape
    weights = logits.new_empty((num_tokens, k), dtype=compute_dtype(logits.dtype))
    experts = logits.new_empty((num_tokens, k), dtype=torch.int32)
    if bias is not None:
        bias = bias.to(weights.dtype)  # exact
    scored = order == "sigmoid" or bias is not None or num_groups > 0 or renormalise or scale != 1 or forced is not None
    scratch, stride = native.gate_scratch(logits, scored, num_groups)
    refused = native.call(
        "topk_gate_fwd", logits, logits.dtype, (logits, logits.dtype), logits.stride(0),
        (weights, weights.dtype), (experts, torch.int32), (scratch, torch.uint8), stride, num_tokens,
        num_experts, k, RULES.index(order), (bias, weights.dtype), num_groups, kept_groups, renormalise, scale,
        (forced, None if forced is None else forced.dtype), 0 if forced is None else forced.element_size(),
    )  # fmt: skip
    if refused and forced is not None:
        refuse_bad_forced(forced, num_experts)
    return weights, experts


def topk_gate_bwd(
    native, grad, weights, experts, logits, num_experts, dtype, order: str, renormalise: bool, scale: float
) -> Tensor:
    dlogits = grad.new_empty((grad.shape[0], num_experts), dtype=dtype)
    scratch, stride = (None, 0) if order == "" else native.gate_scratch(dlogits, False, 0)
    refused = native.call(
        "topk_gate_bwd", dlogits, dtype, (grad, compute_dtype(dtype)), (weights, compute_dtype(dtype)),
        (experts, torch.int32), (logits, dtype), 0 if logits is None else logits.stride(0), (dlogits, dtype),
        (scratch, torch.uint8), stride, *dlogits.shape, grad.shape[1], RULES.index(order) if order else -1,
        renormalise, scale,
    )  # fmt: skip
    if refused:
        refuse_bad_choices("topk_gate_bwd", experts, num_experts)
    return dlogits
