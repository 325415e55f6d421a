"""The top-k gate."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import backends
from moe_kernels.library._define import define, no_flops, wide


def _topk_gate_fwd(logits: Tensor, k: int, order: str, backend: str):
    return backends.load(backend, "topk_gate").topk_gate_fwd(logits, k, order)


def _topk_gate_fwd_fake(logits: Tensor, k: int, order: str, backend: str):
    num_tokens = logits.shape[0]
    weights = logits.new_empty((num_tokens, k), dtype=wide(logits.dtype))
    return weights, weights.new_empty((num_tokens, k), dtype=torch.int32), weights.new_empty(num_tokens)


def _topk_gate_bwd(
    grad: Tensor,
    weights: Tensor,
    experts: Tensor,
    logits: Tensor | None,
    log_sum: Tensor,
    num_experts: int,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    kernels = backends.load(backend, "topk_gate")
    return kernels.topk_gate_bwd(grad, weights, experts, logits, log_sum, num_experts, dtype)


def _topk_gate_bwd_fake(grad, weights, experts, logits, log_sum, num_experts, dtype, backend) -> Tensor:
    return grad.new_empty((grad.shape[0], num_experts), dtype=dtype)


define(
    "topk_gate_fwd(Tensor logits, SymInt k, str order, str backend) -> (Tensor, Tensor, Tensor)",
    _topk_gate_fwd,
    _topk_gate_fwd_fake,
    no_flops,
)
define(
    "topk_gate_bwd(Tensor grad, Tensor weights, Tensor experts, Tensor? logits, Tensor log_sum, SymInt num_experts, "
    "ScalarType dtype, str backend) -> Tensor",
    _topk_gate_bwd,
    _topk_gate_bwd_fake,
    no_flops,
)
