"""The grouped GEMM and its gradients as operators, and functions that the expert MLP and the expert norms share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_kernels import backends
from moe_kernels.ops._define import define, define_check, gradient_like, no_second_derivative, operators
from moe_kernels.sizes import (
    GATED,
    contiguous,
    contiguous_matrices,
    contiguous_rows,
    refuse_bad_groups,
)

define_check("refuse_bad_groups(Tensor expert_offsets, Tensor rows, Tensor? row_token)", refuse_bad_groups)


def kernels(backend: str):
    return backends.load(backend, "grouped_gemm")


def forward(
    x, weight, expert_offsets, row_token, bias, activation, keep_pre, backend, training=False
) -> tuple[Tensor, Tensor]:
    """Implements grouped_gemm_fwd: the result, (R, Dout) or (R, Dout / 2) if gated, and pre-activations (R, Dout).

    Without keep_pre the second tensor has no elements. training: whether the call is part of a training step, as any
    call with keep_pre is; Triton chooses tiles by it.
    """
    expert_offsets, row_token, bias = contiguous(expert_offsets, row_token, bias)
    if backend != "cpu":  # the C++ kernel checks while it reads
        refuse_bad_groups(expert_offsets, x, row_token)
    given = contiguous_rows(x), contiguous_matrices(weight), expert_offsets, row_token, bias
    return kernels(backend).grouped_gemm_fwd(*given, activation, keep_pre, keep_pre or training)


def rows_gradient(grad: Tensor, weight: Tensor, expert_offsets: Tensor, backend: str) -> Tensor:
    """grad_r W_e^T (R, Din), with e the expert of row r and grad (R, Dout), by the forward kernel."""
    given = contiguous_rows(grad), contiguous_matrices(weight.transpose(1, 2)), expert_offsets
    return kernels(backend).grouped_gemm_fwd(*given, None, None, "", False, True)[0]


def weight_gradient(
    x, grad, expert_offsets, x_token, grad_token, with_bias, backend, weight=None, row_weight=None
) -> tuple[Tensor, Tensor]:
    """Gradients to weight (E, Din, Dout) and, if with_bias, to bias (E, Dout); else the second has no elements.

    dweight_e = sum of x_r^T grad_r and dbias_e = sum of row_weight_r grad_r, both over the rows r of expert e.

    x_token, grad_token: (R), indices: x_r is x[x_token[r]], zeros for -1, and likewise grad_r. None: x_r is x[r].
    weight: if it is transposed in memory, dweight is too, as autograd would copy a gradient of another layout.
    row_weight: (R) in compute_dtype; None for ones.
    """
    given = contiguous_rows(x), contiguous_rows(grad), expert_offsets, x_token, grad_token
    if weight is None or not is_transposed(weight):
        return kernels(backend).grouped_gemm_bwd_weight(*given, with_bias, row_weight)
    # The transpose of dweight = x^T grad is grad^T x, for which the kernel gets x and grad in each other's place. With
    # bias it would then sum the rows of x, so a second call, without columns of x, computes dbias from grad.
    dweight, dbias = weight_gradient(grad, x, expert_offsets, grad_token, x_token, False, backend)
    if with_bias:
        given = contiguous_rows(x)[:, :0], *given[1:]
        dbias = kernels(backend).grouped_gemm_bwd_weight(*given, True, row_weight)[1]
    return dweight.transpose(1, 2), dbias


def is_transposed(weight: Tensor) -> bool:
    return weight.stride(-2) == 1 and weight.stride(-1) != 1


def weight_like(weight: Tensor, wanted: bool) -> Tensor:
    """An uninitialised tensor for the gradient to a weight, transposed if the weight is; no elements if not wanted."""
    if not (wanted and is_transposed(weight)):
        return gradient_like(weight, wanted)
    num_experts, din, dout = weight.shape
    return weight.new_empty((num_experts, dout, din)).transpose(1, 2)


def _fwd_fake(x, weight, expert_offsets, row_token, bias, activation, keep_pre, backend):
    num_rows, dout = (x if row_token is None else row_token).shape[0], weight.shape[2]
    out = x.new_empty((num_rows, dout // 2 if activation in GATED else dout))
    return out, x.new_empty((num_rows if keep_pre else 0, dout))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.activation, keep_pre, ctx.backend = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, output[1] if keep_pre else None)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, expert_offsets, row_token, bias, pre = ctx.saved_tensors
    to_x, to_weight, _, _, to_bias, *_ = ctx.needs_input_grad
    given = grad, x, weight, expert_offsets, row_token, bias, pre, ctx.activation, [to_x, to_weight, to_bias]
    dx, dweight, dbias = operators.grouped_gemm_bwd(*given, ctx.backend)
    return dx if to_x else None, dweight if to_weight else None, None, None, dbias if to_bias else None, *[None] * 3


def _bwd(grad, x, weight, expert_offsets, row_token, bias, pre, activation, wanted, backend) -> tuple[Tensor, ...]:
    """The gradients to x, weight and bias, without elements where not wanted. pre: None if it was not saved."""
    to_x, to_weight, to_bias = wanted
    expert_offsets, row_token = contiguous(expert_offsets, row_token)
    dx = dweight = dbias = None
    if activation:
        if pre is None:
            pre, _ = forward(x, weight, expert_offsets, row_token, bias, "", False, backend)
        grad = kernels(backend).activation_bwd(contiguous_rows(grad), pre.contiguous(), activation)
    if to_weight or to_bias:
        found = weight_gradient(x, grad, expert_offsets, row_token, None, to_bias, backend, weight)
        dweight, dbias = found[0] if to_weight else None, found[1] if to_bias else None
    if to_x:
        dx = rows_gradient(grad, weight, expert_offsets, backend)
        if row_token is not None:
            dx = kernels(backend).grouped_gemm_sum_rows(contiguous_rows(dx), row_token, x.shape[0])
    return tuple(x.new_empty(0) if each is None else each for each in (dx, dweight, dbias))


def _bwd_fake(grad, x, weight, expert_offsets, row_token, bias, pre, activation, wanted, backend):
    to_x, to_weight, to_bias = wanted
    dbias = x.new_empty((weight.shape[0], weight.shape[2]) if to_bias else 0)
    return gradient_like(x, to_x), weight_like(weight, to_weight), dbias


def gemm_flops(x, weight, row_token) -> int:
    return 2 * (x if row_token is None else row_token)[0] * weight[1] * weight[2]


def _bwd_flops(grad, x, weight, offsets, row_token, bias, pre, activation, wanted, *rest, **kwargs) -> int:
    to_x, to_weight, to_bias = wanted
    return gemm_flops(x, weight, row_token) * (to_x + (to_weight or to_bias))


define(
    "grouped_gemm_fwd(Tensor x, Tensor weight, Tensor expert_offsets, Tensor? row_token, Tensor? bias, str activation, "
    "bool keep_pre, str backend) -> (Tensor, Tensor)",
    forward,
    _fwd_fake,
    lambda x, weight, offsets, row_token, *rest, out_shape=None, **kwargs: gemm_flops(x, weight, row_token),
    save=_save,
    backward=_backward,
)
define(
    "grouped_gemm_bwd(Tensor grad, Tensor x, Tensor weight, Tensor expert_offsets, Tensor? row_token, Tensor? bias, "
    "Tensor? pre, str activation, bool[] wanted, str backend) -> (Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
    _bwd_flops,
    backward=no_second_derivative("grouped_gemm"),
)
