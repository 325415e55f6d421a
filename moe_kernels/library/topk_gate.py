"""The top-k gate as one operator, and its gradient as another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import backends
from moe_kernels.ops._define import define, no_flops, no_second_derivative, operators
from moe_kernels.sizes import compute_dtype, contiguous_rows


def _fwd(logits: Tensor, k: int, order: str, backend: str) -> tuple[Tensor, Tensor]:
    return backends.load(backend, "topk_gate").topk_gate_fwd(contiguous_rows(logits), k, order)


def _fwd_fake(logits: Tensor, k: int, order: str, backend: str) -> tuple[Tensor, Tensor]:
    weights = logits.new_empty((logits.shape[0], k), dtype=compute_dtype(logits.dtype))
    return weights, weights.new_empty(weights.shape, dtype=torch.int32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, ctx.order, ctx.backend = inputs
    # For "softmax_topk" backward computes all probabilities from the logits and weights[:, 0], the largest weights.
    ctx.save_for_backward(*output, logits if ctx.order == "softmax_topk" else None)
    ctx.num_experts, ctx.dtype = logits.shape[1], logits.dtype


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    weights, experts, logits = ctx.saved_tensors
    dlogits = operators.topk_gate_bwd(grad, weights, experts, logits, ctx.num_experts, ctx.dtype, ctx.backend)
    return dlogits, None, None, None


def _bwd(grad, weights, experts, logits, num_experts, dtype, backend) -> Tensor:
    if grad.shape[1] == 0 and logits is not None:  # zeros, but NaN where the softmax is NaN
        return logits.to(compute_dtype(dtype)).softmax(1).mul(0).to(dtype)
    grad, weights, experts = grad.contiguous(), weights.contiguous(), experts.contiguous()
    logits = None if logits is None else contiguous_rows(logits)
    return backends.load(backend, "topk_gate").topk_gate_bwd(grad, weights, experts, logits, num_experts, dtype)


define(
    "topk_gate_fwd(Tensor logits, SymInt k, str order, str backend) -> (Tensor, Tensor)",
    _fwd,
    _fwd_fake,
    no_flops,
    save=_save,
    backward=_backward,
    batched=(0,),
)
define(
    "topk_gate_bwd(Tensor grad, Tensor weights, Tensor experts, Tensor? logits, SymInt num_experts, "
    "ScalarType dtype, str backend) -> Tensor",
    _bwd,
    lambda grad, weights, experts, logits, num_experts, dtype, backend: grad.new_empty(
        (grad.shape[0], num_experts), dtype=dtype
    ),
    no_flops,
    backward=no_second_derivative("topk_gate"),
    batched=(0, 1, 2, 3),
)
