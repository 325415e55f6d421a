"""The top-k gate on the C++ backends: csrc/cpu/topk_gate.cpp and csrc/cuda/topk_gate.cu."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moe_kernels.sizes import compute_dtype, refuse_outside, words

SCRATCH = 20  # most bytes of scratch per thread and expert: a float64 logit (8), an integer key (8), an index (4)


def topk_gate_fwd(native: ModuleType, logits: Tensor, k: int, order: str) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    weights = logits.new_empty((num_tokens, k), dtype=compute_dtype(logits.dtype))
    experts = logits.new_empty((num_tokens, k), dtype=torch.int32)
    stride = SCRATCH * 32 * words(num_experts)
    scratch = logits.new_empty((native.chunks(logits.numel()), stride), dtype=torch.uint8)
    native.call(
        "topk_gate_fwd", logits, logits.dtype, (logits, logits.dtype), logits.stride(0),
        (weights, weights.dtype), (experts, torch.int32), (scratch, torch.uint8), stride, num_tokens,
        num_experts, k, order == "softmax_topk",
    )  # fmt: skip
    return weights, experts


def topk_gate_bwd(native, grad, weights, experts, logits, num_experts, dtype) -> Tensor:
    dlogits = grad.new_empty((grad.shape[0], num_experts), dtype=dtype)
    out_of_range = native.call(
        "topk_gate_bwd", dlogits, dtype, (grad, compute_dtype(dtype)), (weights, compute_dtype(dtype)),
        (experts, torch.int32), (logits, dtype), 0 if logits is None else logits.stride(0), (dlogits, dtype),
        *dlogits.shape, grad.shape[1],
    )  # fmt: skip
    if out_of_range:
        refuse_outside("topk_gate_bwd: experts", experts, 0, num_experts)
    return dlogits
