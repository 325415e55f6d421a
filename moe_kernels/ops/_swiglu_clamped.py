"""The clamped, interleaved SwiGLU of gpt_oss as an operator, computed by PyTorch on any device.

g = min(pre_(2j), limit),   u = pre_(2j+1) clamped to +-limit,   y_j = (u + 1) g sigmoid(alpha g)

On a CPU torch's sigmoid rounds by an element's place in memory. So in the mode batch_invariant (`fixed`) the C++ kernel
of activations computes there g sigmoid(alpha g) = silu(alpha g) / alpha, and its derivative silu'(alpha g).
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch
from torch import Tensor

from moe_kernels import backends
from moe_kernels.backends import is_batch_invariant
from moe_kernels.ops import _checks
from moe_kernels.ops._define import define, no_flops, no_second_derivative, operators
from moe_kernels.sizes import compute_dtype
from python_ref.grouped_gemm import activate


def _check(op: str, pre: Tensor, alpha: float, limit: float, fixed: bool = False) -> None:
    _checks.floating(op, "pre", pre, pre.dim())
    if pre.dim() < 1 or pre.shape[-1] % 2:
        raise ValueError(f"{op}: pre must have an even last dimension, got shape {tuple(pre.shape)}")
    largest = torch.finfo(compute_dtype(pre.dtype)).max
    if not isfinite(alpha):
        raise ValueError(f"{op}: alpha must be finite, got {alpha}")
    if not 0 < limit <= largest:
        raise ValueError(f"{op}: limit must be above 0 and finite in {compute_dtype(pre.dtype)}, got {limit}")


def _check_bwd(op: str, grad: Tensor, pre: Tensor, alpha: float, limit: float, fixed: bool = False) -> None:
    _check(op, pre, alpha, limit)
    _checks.expect(op, "grad", grad, (*pre.shape[:-1], pre.shape[-1] // 2), pre.dtype, pre)


def swiglu_clamped(pre: Tensor, alpha: float, limit: float) -> Tensor:
    return operators.swiglu_clamped(pre, alpha, limit, is_batch_invariant() and pre.device.type == "cpu")


def _fwd(pre: Tensor, alpha: float, limit: float, fixed: bool = False) -> Tensor:
    if not fixed:
        return activate(pre.to(compute_dtype(pre.dtype)), "swiglu_clamped", alpha, limit).to(pre.dtype)
    gate, linear = _halves(pre)
    return ((linear.clamp(-limit, limit) + 1) * _gated(gate.clamp(max=limit), alpha)[0]).to(pre.dtype)


def _halves(pre: Tensor) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(pre.dtype)
    return pre[..., ::2].to(dtype), pre[..., 1::2].to(dtype)


def _gated(g: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """g sigmoid(alpha g), and its derivative, by the C++ kernel: of "swiglu" with linear parts and gradient 1."""
    if alpha == 0 or g.numel() == 0:
        return g / 2, torch.full_like(g, 0.5)
    rows = (alpha * g).flatten(0, -2) if g.dim() > 1 else (alpha * g)[None]
    ones = torch.ones_like(rows)
    found = backends.load("cpu", "grouped_gemm").activation_bwd(ones, torch.cat([rows, ones], -1), "swiglu")
    slope, value = (each.reshape(g.shape) for each in found.chunk(2, -1))
    return value / alpha, slope


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pre, ctx.alpha, ctx.limit, ctx.fixed = inputs
    ctx.save_for_backward(pre)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return operators.swiglu_clamped_bwd(grad, *ctx.saved_tensors, ctx.alpha, ctx.limit, ctx.fixed), None, None, None


def _bwd(grad: Tensor, pre: Tensor, alpha: float, limit: float, fixed: bool = False) -> Tensor:
    gate, linear = _halves(pre)
    grad = grad.to(gate.dtype)
    g, u = gate.clamp(max=limit), linear.clamp(-limit, limit)
    if fixed:
        value, slope = _gated(g, alpha)
        to_gate = (gate <= limit) * (u + 1) * slope
        to_linear = (linear.abs() <= limit) * value
    else:
        share = torch.sigmoid(alpha * g)
        to_gate = (gate <= limit) * (u + 1) * share * (1 + alpha * g * (1 - share))
        to_linear = (linear.abs() <= limit) * g * share
    return torch.stack([grad * to_gate, grad * to_linear], -1).flatten(-2).to(pre.dtype)


define(
    "swiglu_clamped(Tensor pre, float alpha, float limit, bool fixed=False) -> Tensor",
    _fwd,
    lambda pre, alpha, limit, fixed=False: pre.new_empty((*pre.shape[:-1], pre.shape[-1] // 2)),
    no_flops,
    check=_check,
    save=_save,
    backward=_backward,
)
define(
    "swiglu_clamped_bwd(Tensor grad, Tensor pre, float alpha, float limit, bool fixed=False) -> Tensor",
    _bwd,
    lambda grad, pre, alpha, limit, fixed=False: pre.new_empty(pre.shape),
    no_flops,
    check=_check_bwd,
    backward=no_second_derivative("swiglu_clamped"),
)
