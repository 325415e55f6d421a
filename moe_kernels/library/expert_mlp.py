"""Operators: the expert MLP with a given plan, its six gradients, and the expert MLP that makes its own plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels.ops._define import define, gradient_like, no_second_derivative, operators
from moe_kernels.ops.combine import combine_fwd
from moe_kernels.ops.grouped_gemm import (
    contiguous_matrices,
    grouped_gemm_fwd,
    kernels,
    rows_gradient,
    weight_gradient,
    weight_like,
)
from moe_kernels.ops.plan import make_plan_fwd
from moe_kernels.sizes import compute_dtype, contiguous, contiguous_rows


def _fwd(
    x, weights, w_in, w_out, b_in, b_out, expert_offsets, row_token, row_choice, slot_row, activation, keep_pre, backend
) -> tuple[Tensor, Tensor]:
    plan = contiguous(expert_offsets, row_token, slot_row)
    found = _single_launch(x, weights, w_in, w_out, b_in, b_out, activation, plan, None, keep_pre, backend)
    if found is not None:
        return found
    hidden, pre = grouped_gemm_fwd(x, w_in, expert_offsets, row_token, b_in, activation, keep_pre, backend)
    result, _ = grouped_gemm_fwd(hidden, w_out, expert_offsets, None, b_out, "", False, backend, keep_pre)
    del hidden  # combine can reuse its memory
    return combine_fwd(result, weights, slot_row, backend), pre


def _single_launch(x, weights, w_in, w_out, b_in, b_out, activation, plan, experts, keep_pre, backend):
    """y and pre from one C++ call (grouped_gemm_cpu.mlp). None if mlp returns None or the backend is not "cpu"."""
    if backend != "cpu":
        return None
    given = contiguous_rows(x), *contiguous(weights), *map(contiguous_matrices, (w_in, w_out)), *contiguous(b_in, b_out)
    return kernels(backend).expert_mlp_at_once(*given, activation, plan, experts, keep_pre)


def _of_choices(x, weights, w_in, w_out, b_in, b_out, experts, activation, backend) -> Tensor:
    given = x, weights, w_in, w_out, b_in, b_out
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in given):
        raise RuntimeError("expert_mlp_of_choices: it has no gradient; expert_mlp_fwd has one")
    found = _single_launch(*given, activation, None, experts.contiguous(), False, backend)
    if found is None:
        choices = torch.where(experts < w_in.shape[0], experts, -1)
        plan = make_plan_fwd(choices, w_in.shape[0], None, None, "choice", backend)
        found = _fwd(*given, plan[0], plan[1], plan[2], plan[3], activation, False, backend)
    return found[0]


def _fwd_fake(x, weights, w_in, w_out, b_in, b_out, expert_offsets, row_token, *rest):
    pre = x.new_empty((row_token.shape[0] if rest[-2] else 0, w_in.shape[2]))
    return x.new_empty((x.shape[0], w_out.shape[2])), pre


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.activation, keep_pre, ctx.backend = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, output[1] if keep_pre else None)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:6])
    found = operators.expert_mlp_bwd(grad, *ctx.saved_tensors, ctx.activation, wanted, ctx.backend)
    return *(each if needed else None for each, needed in zip(found, wanted, strict=True)), *[None] * 7


def _bwd(grad, x, weights, w_in, w_out, b_in, b_out, *plan_and_options) -> tuple[Tensor, ...]:
    *plan, pre, activation, wanted, backend = plan_and_options
    expert_offsets, row_token, row_choice, slot_row = contiguous(*plan)
    to_x, to_weights, to_w_in, to_w_out, to_b_in, to_b_out = wanted
    if pre is None:
        pre, _ = grouped_gemm_fwd(x, w_in, expert_offsets, row_token, b_in, "", False, backend)
    dx = dweights = dw_in = dw_out = db_in = db_out = None
    grad, row_weight = contiguous_rows(grad), _row_weight(weights, row_token, row_choice, compute_dtype(x.dtype))
    given = grad, contiguous_matrices(w_out), expert_offsets, row_token, row_weight, pre.contiguous()
    biased = b_out.contiguous() if to_weights and b_out is not None else None
    dpre, weighted, drow_weight = kernels(backend).expert_mlp_bwd_hidden(*given, activation, biased)
    if to_w_out or to_b_out:
        arrays = expert_offsets, None, row_token
        found = weight_gradient(weighted, grad, *arrays, to_b_out, backend, w_out, row_weight)
        dw_out, db_out = found[0] if to_w_out else None, found[1] if to_b_out else None
    del weighted  # the next tensors can reuse its memory
    if to_x:
        dx = combine_fwd(rows_gradient(dpre, w_in, expert_offsets, backend), None, slot_row, backend)
    if to_w_in or to_b_in:
        found = weight_gradient(x, dpre, expert_offsets, row_token, None, to_b_in, backend, w_in)
        dw_in, db_in = found[0] if to_w_in else None, found[1] if to_b_in else None
    if weights is not None and to_weights:
        dweights = _weights_gradient(weights, drow_weight, slot_row)
    return tuple(x.new_empty(0) if each is None else each for each in (dx, dweights, dw_in, dw_out, db_in, db_out))


def _row_weight(weights: Tensor | None, row_token: Tensor, row_choice: Tensor, dtype: torch.dtype) -> Tensor:
    """(R,): the gate weight of every row, or ones without weights. Elements of rows not in use are arbitrary."""
    if weights is None or weights.numel() == 0:
        return row_token.new_ones(row_token.shape, dtype=dtype)
    index = torch.add(row_choice, row_token, alpha=weights.shape[1]).clamp_(min=0)
    return weights.reshape(-1).index_select(0, index)


def _weights_gradient(weights, drow_weight, slot_row) -> Tensor:
    if drow_weight.numel() == 0:
        return torch.zeros_like(weights, memory_format=torch.contiguous_format)
    found = drow_weight.index_select(0, slot_row.clamp(min=0).view(-1)).view(slot_row.shape)
    return found.masked_fill_(slot_row < 0, 0)


def _bwd_fake(grad, x, weights, w_in, w_out, b_in, b_out, *rest):
    given = (x, weights, w_in, w_out, b_in, b_out)
    return tuple(
        x.new_empty(0) if each is None else (weight_like if each.dim() == 3 else gradient_like)(each, wanted)
        for each, wanted in zip(given, rest[-2], strict=True)
    )


def _products_flops(w_in, w_out, row_token) -> tuple[int, int]:
    return 2 * row_token[0] * w_in[1] * w_in[2], 2 * row_token[0] * w_out[1] * w_out[2]


def _fwd_flops(x, weights, w_in, w_out, b_in, b_out, offsets, row_token, *rest, **kwargs) -> int:
    return sum(_products_flops(w_in, w_out, row_token)) + (1 if weights is None else 2) * row_token[0] * w_out[2]


def _of_choices_flops(x, weights, w_in, w_out, b_in, b_out, experts, *rest, **kwargs) -> int:
    return _fwd_flops(x, weights, w_in, w_out, b_in, b_out, None, (experts[0] * experts[1],))


def _bwd_flops(grad, x, weights, w_in, w_out, b_in, b_out, offsets, row_token, *rest, **kwargs) -> int:
    to_x, to_weights, to_w_in, to_w_out, to_b_in, to_b_out = rest[-2]
    first, second = _products_flops(w_in, w_out, row_token)
    bias_share = 2 * row_token[0] * w_out[2] if to_weights and b_out is not None else 0
    to_bias = 2 * row_token[0] * w_out[2] * to_b_out
    to_input = (first + row_token[0] * w_in[1]) * to_x
    return second * (1 + (to_w_out or to_b_out)) + first * (to_w_in or to_b_in) + to_input + to_bias + bias_share


_TENSORS = (
    "Tensor x, Tensor? weights, Tensor w_in, Tensor w_out, Tensor? b_in, Tensor? b_out, Tensor expert_offsets, "
    "Tensor row_token, Tensor row_choice, Tensor slot_row"
)

define(
    f"expert_mlp_fwd({_TENSORS}, str activation, bool keep_pre, str backend) -> (Tensor, Tensor)",
    _fwd,
    _fwd_fake,
    _fwd_flops,
    save=_save,
    backward=_backward,
)
define(
    f"expert_mlp_bwd(Tensor grad, {_TENSORS}, Tensor? pre, str activation, bool[] wanted, str backend) -> "
    f"({', '.join(['Tensor'] * 6)})",
    _bwd,
    _bwd_fake,
    _bwd_flops,
    backward=no_second_derivative("expert_mlp"),
)

# This operator has no autograd formula: registering one would slow a call without gradients.
define(
    "expert_mlp_of_choices(Tensor x, Tensor? weights, Tensor w_in, Tensor w_out, Tensor? b_in, Tensor? b_out, "
    "Tensor experts, str activation, str backend) -> Tensor",
    _of_choices,
    lambda x, weights, w_in, w_out, *rest: x.new_empty((x.shape[0], w_out.shape[2])),
    _of_choices_flops,
)
