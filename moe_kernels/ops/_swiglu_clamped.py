"""The clamped, interleaved SwiGLU of gpt_oss as an operator, computed by PyTorch on any device.

g = min(pre_(2j), limit),   u = pre_(2j+1) clamped to +-limit,   y_j = (u + 1) g sigmoid(alpha g)
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch
from torch import Tensor

from moe_kernels.ops import _checks
from moe_kernels.ops._define import define, no_flops, no_second_derivative, operators
from moe_kernels.sizes import compute_dtype
from python_ref.grouped_gemm import activate


def _check(op: str, pre: Tensor, alpha: float, limit: float) -> None:
    _checks.floating(op, "pre", pre, pre.dim())
    if pre.dim() < 1 or pre.shape[-1] % 2:
        raise ValueError(f"{op}: pre must have an even last dimension, got shape {tuple(pre.shape)}")
    largest = torch.finfo(compute_dtype(pre.dtype)).max
    if not isfinite(alpha):
        raise ValueError(f"{op}: alpha must be finite, got {alpha}")
    if not 0 < limit <= largest:
        raise ValueError(f"{op}: limit must be above 0 and finite in {compute_dtype(pre.dtype)}, got {limit}")


def _check_bwd(op: str, grad: Tensor, pre: Tensor, alpha: float, limit: float) -> None:
    _check(op, pre, alpha, limit)
    _checks.expect(op, "grad", grad, (*pre.shape[:-1], pre.shape[-1] // 2), pre.dtype, pre)


def _fwd(pre: Tensor, alpha: float, limit: float) -> Tensor:
    return activate(pre.to(compute_dtype(pre.dtype)), "swiglu_clamped", alpha, limit).to(pre.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pre, ctx.alpha, ctx.limit = inputs
    ctx.save_for_backward(pre)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return operators.swiglu_clamped_bwd(grad, *ctx.saved_tensors, ctx.alpha, ctx.limit), None, None


def _bwd(grad: Tensor, pre: Tensor, alpha: float, limit: float) -> Tensor:
    dtype = compute_dtype(pre.dtype)
    grad, gate, linear = grad.to(dtype), pre[..., ::2].to(dtype), pre[..., 1::2].to(dtype)
    g, u = gate.clamp(max=limit), linear.clamp(-limit, limit)
    share = torch.sigmoid(alpha * g)
    to_gate = (gate <= limit) * (u + 1) * share * (1 + alpha * g * (1 - share))
    to_linear = (linear.abs() <= limit) * g * share
    return torch.stack([grad * to_gate, grad * to_linear], -1).flatten(-2).to(pre.dtype)


define(
    "swiglu_clamped(Tensor pre, float alpha, float limit) -> Tensor",
    _fwd,
    lambda pre, alpha, limit: pre.new_empty((*pre.shape[:-1], pre.shape[-1] // 2)),
    no_flops,
    check=_check,
    save=_save,
    backward=_backward,
)
define(
    "swiglu_clamped_bwd(Tensor grad, Tensor pre, float alpha, float limit) -> Tensor",
    _bwd,
    lambda grad, pre, alpha, limit: pre.new_empty(pre.shape),
    no_flops,
    check=_check_bwd,
    backward=no_second_derivative("swiglu_clamped"),
)

swiglu_clamped = operators.swiglu_clamped
