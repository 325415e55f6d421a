"""The grouped GEMM on CPU tensors: torch's matrix library, expert by expert, as offsets are at hand there.

float16 is widened first: its own products run at a hundredth of float32's speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.library import GATED, wide

aten = torch.ops.aten

_SPAN = 1024  # rows at a time where intermediate results would fill the memory

Function = Callable[..., Tensor]

_GATE: dict[str, Function] = {"swiglu": F.silu, "geglu": F.gelu}
_PLAIN: dict[str, Function] = {
    "": lambda pre: pre,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}
_BACKWARD: dict[str, Function] = {  # of the gradient, of what went in and of what came out
    "": lambda grad, pre, out: grad,
    "relu": lambda grad, pre, out: aten.threshold_backward(grad, pre, 0),
    "gelu": lambda grad, pre, out: aten.gelu_backward(grad, pre),
    "silu": lambda grad, pre, out: aten.silu_backward(grad, pre),
    "tanh": lambda grad, pre, out: aten.tanh_backward(grad, out),
}
_BACKWARD |= {"swiglu": _BACKWARD["silu"], "geglu": _BACKWARD["gelu"]}


def fwd(
    x: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None,
    bias: Tensor | None,
    activation: str,
    keep_pre: bool,
) -> tuple[Tensor, Tensor]:
    num_rows, width = (x if row_token is None else row_token).shape[0], weight.shape[2]
    out = x.new_zeros((num_rows, width // 2 if activation in GATED else width))
    pre = x.new_zeros((num_rows if keep_pre else 0, width))
    for expert, first, last in _groups(expert_offsets, _SPAN):
        found = _gather(x, row_token, first, last) @ weight[expert].to(wide(x.dtype))
        if bias is not None:
            found += bias[expert]
        if keep_pre:
            pre[first:last] = found
        out[first:last] = _activate(found, activation)
    return out, pre


def bwd_weight(
    x: Tensor,
    grad: Tensor,
    expert_offsets: Tensor,
    x_token: Tensor | None,
    grad_token: Tensor | None,
    with_bias: bool,
) -> tuple[Tensor, Tensor]:
    num_experts, width = expert_offsets.shape[0] - 1, grad.shape[1]
    dweight = x.new_zeros((num_experts, x.shape[1], width))
    dbias = x.new_zeros((num_experts if with_bias else 0, width))
    for expert, first, last in _groups(expert_offsets):
        rows = _gather(grad, grad_token, first, last)
        dweight[expert] = _gather(x, x_token, first, last).t() @ rows
        if with_bias:
            dbias[expert] = rows.sum(0)
    return dweight, dbias


def activation_bwd(grad: Tensor, pre: Tensor, activation: str) -> Tensor:
    return _activate_both(pre.to(wide(pre.dtype)), activation, grad.to(wide(pre.dtype)))[1].to(pre.dtype)


def hidden_bwd(
    grad: Tensor,
    w_out: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor,
    row_weight: Tensor,
    pre: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dpre, weighted = torch.zeros_like(pre), pre.new_zeros((pre.shape[0], w_out.shape[1]))
    drow_weight = torch.zeros_like(row_weight)
    for expert, first, last in _groups(expert_offsets):
        row = slice(first, last)
        to_hidden = _gather(grad, row_token, first, last) @ w_out[expert].to(row_weight.dtype).t()
        weight = row_weight[row, None]
        hidden, dpre[row] = _activate_both(pre[row].to(weight.dtype), activation, weight * to_hidden)
        weighted[row] = weight * hidden
        drow_weight[row] = (hidden * to_hidden).sum(1)
    return dpre, weighted, drow_weight


def norms(rows: Tensor, weight: Tensor, expert_offsets: Tensor, bias: Tensor | None) -> Tensor:
    sums = rows.new_zeros(rows.shape[0], dtype=wide(rows.dtype))
    for expert, first, last in _groups(expert_offsets, _SPAN):
        found = rows[first:last].to(sums.dtype) @ weight[expert].to(sums.dtype)
        if bias is not None:
            found += bias[expert]
        sums[first:last] = found.square_().sum(1)
    return sums


def _groups(expert_offsets: Tensor, span: int = 2**31) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, row after the last) of every expert that has rows, at most `span` of them at a time."""
    bounds = expert_offsets.tolist()
    for expert, (first, last) in enumerate(pairwise(bounds)):
        yield from ((expert, row, min(row + span, last)) for row in range(first, last, span))


def _gather(x: Tensor, token: Tensor | None, first: int, last: int) -> Tensor:
    """Rows first to last, widened: x itself, or the tokens that stand there, zeros for -1."""
    if token is None:
        return x[first:last].to(wide(x.dtype))
    index = token[first:last]
    return torch.where((index >= 0)[:, None], x[index.clamp(min=0)], 0).to(wide(x.dtype))


def _activate(pre: Tensor, activation: str) -> Tensor:
    if activation in GATED:
        gate, linear = pre.chunk(2, dim=-1)
        return _GATE[activation](gate) * linear
    return _PLAIN[activation](pre)


def _activate_both(pre: Tensor, activation: str, grad: Tensor) -> tuple[Tensor, Tensor]:
    """act(pre), and grad times its derivative."""
    out = _activate(pre, activation)
    if activation in GATED:
        gate, linear = pre.chunk(2, dim=-1)
        to_gate = _BACKWARD[activation](grad * linear, gate, None)
        return out, torch.cat([to_gate, grad * _GATE[activation](gate)], dim=-1)
    return out, _BACKWARD[activation](grad, pre, out)
