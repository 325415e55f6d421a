"""Expert norms as one operator, and their gradients as another; both go from expert to expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels.library._define import all_rows, define, gradient_like, matrices, ops, refused, rows, wide
from moe_kernels.library.grouped_gemm import kernels, product, transposed, weight_gradient


def _fwd(x, w_in, w_out, b_in, b_out, activation, backend) -> Tensor:
    offsets = all_rows(x)
    norms = x.new_empty((x.shape[0], w_in.shape[0]), dtype=wide(x.dtype))
    for expert in range(w_in.shape[0]):
        w1, w2, b1, b2 = _expert(expert, w_in, w_out, b_in, b_out)
        hidden, _ = product(x, w1, offsets, None, b1, activation, False, backend)
        b2 = None if b2 is None else b2.contiguous()
        norms[:, expert] = kernels(backend).grouped_gemm_norms(hidden, matrices(w2), offsets, b2).sqrt()
    return norms


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.activation, ctx.backend = inputs
    ctx.save_for_backward(*tensors, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:5])
    found = ops.expert_norms_bwd(grad, *ctx.saved_tensors, ctx.activation, wanted, ctx.backend)
    return *(each if needed else None for each, needed in zip(found, wanted, strict=True)), None, None


def _bwd(grad, x, w_in, w_out, b_in, b_out, norms, activation, wanted, backend) -> tuple[Tensor, ...]:
    given = w_in, w_out, b_in, b_out
    dx = torch.zeros_like(x, dtype=norms.dtype, memory_format=torch.contiguous_format)
    found = [
        torch.zeros_like(each, memory_format=torch.contiguous_format) if each is not None and needed else x.new_empty(0)
        for each, needed in zip(given, wanted[1:], strict=True)
    ]
    for expert in range(w_in.shape[0]):
        share = torch.where(norms[:, expert] == 0, 0, grad[:, expert] / norms[:, expert])
        to_x, *rest = _expert_bwd(x, share, _expert(expert, *given), activation, wanted, backend)
        for whole, part in zip(found, rest, strict=True):
            if part is not None:
                whole[expert] = part[0]
        if to_x is not None:
            dx += to_x
    return dx.to(x.dtype) if wanted[0] else x.new_empty(0), *found


def _expert_bwd(x, share, parameters, activation, wanted, backend) -> tuple[Tensor | None, ...]:
    """Gradients to x and to one expert's parameters, where dy = share y."""
    w_in, w_out, b_in, b_out = parameters
    to_x, to_w_in, to_w_out, to_b_in, to_b_out = wanted
    offsets = all_rows(x)
    dx = dw_in = dw_out = db_in = db_out = None
    hidden, pre = product(x, w_in, offsets, None, b_in, activation, activation != "", backend)
    dy, _ = product(hidden, w_out, offsets, None, b_out, "", False, backend)
    dy = (dy.to(share.dtype) * share[:, None]).to(x.dtype)
    if to_w_out or to_b_out:
        dw_out, db_out = weight_gradient(hidden, dy, offsets, None, None, to_b_out, backend)
    if to_x or to_w_in or to_b_in:
        dpre = transposed(dy, w_out, offsets, backend)
        if activation:
            dpre = kernels(backend).activation_bwd(rows(dpre), pre, activation)
        if to_x:
            dx = transposed(dpre, w_in, offsets, backend)
        if to_w_in or to_b_in:
            dw_in, db_in = weight_gradient(x, dpre, offsets, None, None, to_b_in, backend)
    found = dx, dw_in, dw_out, db_in, db_out
    return tuple(each if needed else None for each, needed in zip(found, wanted, strict=True))


def _expert(expert: int, *parameters: Tensor | None) -> tuple[Any, ...]:
    """The parameters of one expert, still with a dimension of experts."""
    return tuple(None if each is None else each[expert : expert + 1] for each in parameters)


def _bwd_fake(grad, x, w_in, w_out, b_in, b_out, norms, activation, wanted, backend):
    given = zip((x, w_in, w_out, b_in, b_out), wanted, strict=True)
    return tuple(x.new_empty(0) if each is None else gradient_like(each, needed) for each, needed in given)


def _sizes(x, w_in, w_out) -> tuple[int, int]:
    """FLOPs of each of the two products, all experts."""
    return 2 * x[0] * w_in[0] * w_in[1] * w_in[2], 2 * x[0] * w_out[0] * w_out[1] * w_out[2]


def _bwd_flops(grad, x, w_in, w_out, b_in, b_out, norms, activation, wanted, *rest, **kwargs) -> int:
    first, second = _sizes(x, w_in, w_out)
    to_x, to_w_in, to_w_out, to_b_in, to_b_out = wanted
    to_hidden = second * (to_x or to_w_in or to_b_in)
    return first + second + second * (to_w_out or to_b_out) + to_hidden + first * (to_x + (to_w_in or to_b_in))


_TENSORS = "Tensor x, Tensor w_in, Tensor w_out, Tensor? b_in, Tensor? b_out"

define(
    f"expert_norms_fwd({_TENSORS}, str activation, str backend) -> Tensor",
    _fwd,
    lambda x, w_in, *rest: x.new_empty((x.shape[0], w_in.shape[0]), dtype=wide(x.dtype)),
    lambda x, w_in, w_out, *rest, out_shape=None, **kwargs: sum(_sizes(x, w_in, w_out)),
    save=_save,
    backward=_backward,
)
define(
    f"expert_norms_bwd(Tensor grad, {_TENSORS}, Tensor norms, str activation, bool[] wanted, str backend) -> "
    f"({', '.join(['Tensor'] * 5)})",
    _bwd,
    _bwd_fake,
    _bwd_flops,
    backward=refused("expert_norms"),
)
