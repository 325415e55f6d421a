"""Expert norms: how strongly every expert responds to every token, without storing what it responds.

    h_te = act(x_t W_in_e + b_in_e),   y_te = h_te W_out_e + b_out_e,   s_te = ||y_te||
    dy_te = ds_te y_te / s_te (0 where s_te = 0),   and from there as a two-layer network

One expert after the other: the second product's accumulators are squared and summed in the kernel, so that a forward
holds one (T, H) hidden layer and the (T, E) norms, never the (T, E, Dout) outputs. Saved for backward: x, the norms and
the parameters. Backward computes each expert's hidden layer and output again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import python_ref.expert_norms as reference
from moe_kernels import backends, library
from moe_kernels.ops._checks import FLOATING, check_rank, check_tensor, once_differentiable
from moe_kernels.ops.expert_mlp import check_parameters
from moe_kernels.ops.grouped_gemm import transposed


def expert_norms(
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    *,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    activation: str | None = "relu",
    backend: str | None = None,
) -> Tensor:
    """The l2 norm of every expert's output for every token: (T, D) -> (T, E).

    Args:
        x: (T, D), float32, bfloat16 or float16 (float64 on "reference" and "cpu"). Rows may have any stride.
        w_in: (E, D, H), or (E, D, 2 H) for a gated activation, in the dtype of x; any strides (see grouped_gemm).
        w_out: (E, H, Dout) in the dtype of x.
        b_in, b_out: (E, H or 2 H) and (E, Dout) in the dtype of x, or None.
        activation: as in grouped_gemm.
        backend: "reference", "cpu", "triton" or "cuda"; None chooses (see moe_kernels.explain).

    Returns:
        s (T, E) in the dtype of x. The hidden layer is rounded to that dtype; outputs, squares and their sum are
        float32 (float64 stays) and are not rounded before the root, but for outputs of large experts on a CPU that
        multiplies bfloat16.

    Gradient: to x, the weights and the biases; zero where a norm is zero. Once differentiable. Elements held, with
    W = H or 2 H columns of w_in: T (E + H) forward, T (E + 2 (D + W + Dout)) and the gradients of the parameters
    backward. FLOPs (torch's counter): 2 T E (D W + H Dout) forward, three times that backward, a third of it for
    computing again.

    Raises:
        TypeError: a tensor of another dtype, or a torch.func transform.
        ValueError: shapes or devices that do not fit, an unknown activation, a gated one with an odd W.
        BackendError: the backend asked for by name cannot run this.

    Source: paper 004 (CompeteSMoE), the competition mechanism.
    """
    check_tensor("expert_norms", "x", x, FLOATING)
    check_rank("expert_norms", "x", x, "(T, D)")
    check_parameters("expert_norms", x, None, w_in, w_out, b_in, b_out, activation)
    chosen = backends.choose("expert_norms", backend, x)
    if chosen == "reference":
        return reference.expert_norms(x, w_in, w_out, b_in=b_in, b_out=b_out, activation=activation)
    return _ExpertNorms.apply(x, w_in, w_out, b_in, b_out, activation or "", chosen).to(x.dtype)


class _ExpertNorms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_in: Tensor,
        w_out: Tensor,
        b_in: Tensor | None,
        b_out: Tensor | None,
        activation: str,
        backend: str,
    ) -> Tensor:
        offsets = library.all_rows(x)
        norms = x.new_empty((x.shape[0], w_in.shape[0]), dtype=library.wide(x.dtype))
        for expert in range(w_in.shape[0]):
            w1, w2, b1, b2 = _expert(expert, w_in, w_out, b_in, b_out)
            hidden, _ = library.ops.grouped_gemm_fwd(x, w1, offsets, None, b1, activation, False, backend)
            norms[:, expert] = library.ops.grouped_gemm_norms(hidden, w2, offsets, b2, backend).sqrt()
        ctx.save_for_backward(x, w_in, w_out, b_in, b_out, norms)
        ctx.activation, ctx.backend = activation, backend
        return norms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w_in, w_out, b_in, b_out, norms = ctx.saved_tensors
        dx = torch.zeros_like(x, dtype=norms.dtype) if ctx.needs_input_grad[0] else None
        gradients: list[list[Tensor | None]] = []
        for expert in range(w_in.shape[0]):
            share = torch.where(norms[:, expert] == 0, 0, grad[:, expert] / norms[:, expert])
            parameters = _expert(expert, w_in, w_out, b_in, b_out)
            to_x, *rest = _expert_backward(ctx, x, share, *parameters)
            gradients.append(rest)
            if dx is not None and to_x is not None:
                dx += to_x
        given = w_in, w_out, b_in, b_out
        if gradients:
            stacked = [None if each[0] is None else torch.cat(each) for each in zip(*gradients, strict=True)]
        else:  # no experts
            wanted = zip(given, ctx.needs_input_grad[1:5], strict=True)
            stacked = [torch.zeros_like(each) if each is not None and needed else None for each, needed in wanted]
        return None if dx is None else dx.to(x.dtype), *stacked, None, None


def _expert_backward(
    ctx: Any, x: Tensor, share: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None, b_out: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients to x and to one expert's parameters, where dy = share y."""
    to_x, to_w_in, to_w_out, to_b_in, to_b_out = ctx.needs_input_grad[:5]
    gemm, activation, backend = library.ops.grouped_gemm_fwd, ctx.activation, ctx.backend
    offsets = library.all_rows(x)
    dx = dw_in = dw_out = db_in = db_out = None
    hidden, pre = gemm(x, w_in, offsets, None, b_in, activation, activation != "", backend)
    dy, _ = gemm(hidden, w_out, offsets, None, b_out, "", False, backend)
    dy = (dy.to(share.dtype) * share[:, None]).to(x.dtype)
    if to_w_out or to_b_out:
        dw_out, db_out = library.ops.grouped_gemm_bwd_weight(hidden, dy, offsets, None, None, to_b_out, backend)
    if to_x or to_w_in or to_b_in:
        dpre = transposed(dy, w_out, offsets, backend)
        if activation:
            dpre = library.ops.activation_bwd(dpre, pre, activation, backend)
        if to_x:
            dx = transposed(dpre, w_in, offsets, backend)
        if to_w_in or to_b_in:
            dw_in, db_in = library.ops.grouped_gemm_bwd_weight(x, dpre, offsets, None, None, to_b_in, backend)
    return dx, dw_in, dw_out, db_in if to_b_in else None, db_out if to_b_out else None


def _expert(expert: int, *parameters: Tensor | None) -> tuple[Any, ...]:
    """The parameters of one expert, still with a dimension of experts."""
    return tuple(None if each is None else each[expert : expert + 1] for each in parameters)
