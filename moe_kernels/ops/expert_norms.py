"""Expert norms: the norm of every expert's output for every token.

    h_te = act(x_t W_in_e + b_in_e),   y_te = h_te W_out_e + b_out_e,   s_te = ||y_te||
    dy_te = ds_te y_te / s_te,   0 where s_te = 0

Kernels compute experts in groups, with a row for each token and each expert of a group. Saved for backward: x, the
norms and the parameters. Backward computes hidden layers and outputs of a group again. The gradients are those of an
expert MLP with gate weights ds / s and the output gradient y.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import python_ref.expert_norms as reference
from moe_kernels import backends
from moe_kernels.backends import mark
from moe_kernels.ops import _checks
from moe_kernels.ops._autocast import without_autocast
from moe_kernels.ops._checks import FLOATING, check_rank, check_tensor
from moe_kernels.ops._define import define, gradient_like, no_second_derivative, operators
from moe_kernels.ops.combine import combine_fwd
from moe_kernels.ops.expert_mlp import check_layers, check_parameters
from moe_kernels.ops.grouped_gemm import grouped_gemm_fwd, kernels, rows_gradient, weight_gradient
from moe_kernels.sizes import CLAMPED, compute_dtype, contiguous_matrices, is_fixed

# Limit on the elements of a tensor with a row for each token and expert of a group. A group has at least one expert.
ELEMENTS = 2**27


def _groups(x: Tensor, w_in: Tensor, w_out: Tensor, backend: str) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yields groups of experts that are computed together, as (experts, offsets, token).

    A group's rows are all tokens for its first expert, then all tokens for its second expert, and so on. offsets: the
    first row of each expert, then the number of rows. token: the token of each row; None if row r is token r. On a CPU
    a group is one expert, so that its tensors are small; in the mode batch_invariant too, since the number of tokens
    must not decide in which order dx is summed.
    """
    num_tokens, num_experts = x.shape[0], w_in.shape[0]
    widest = max(x.shape[1], w_in.shape[2], w_out.shape[2], 1) * max(num_tokens, 1)
    group_size = 1 if backend == "cpu" or is_fixed() else max(ELEMENTS // widest, 1)
    for first in range(0, num_experts, group_size):
        experts = slice(first, min(first + group_size, num_experts))
        count = experts.stop - first
        offsets = torch.arange(count + 1, device=x.device, dtype=torch.int32) * num_tokens
        token = torch.arange(num_tokens, device=x.device, dtype=torch.int32).repeat(count) if count > 1 else None
        yield experts, offsets, token


def _check_fwd(op, x, w_in, w_out, b_in, b_out, activation, backend) -> None:
    _checks.floating(op, "x", x, 2)
    num_experts = _checks.shape_of(op, "w_in", w_in, 3)[0]
    check_layers(op, x, num_experts, w_in, w_out, b_in, b_out, activation)


def _check_bwd(op, grad, x, w_in, w_out, b_in, b_out, norms, activation, wanted, backend) -> None:
    _check_fwd(op, x, w_in, w_out, b_in, b_out, activation, backend)
    for name, each in (("grad", grad), ("norms", norms)):
        _checks.expect(op, name, each, (x.shape[0], w_in.shape[0]), compute_dtype(x.dtype), x)
    _checks.flags(op, "wanted", wanted, 5)


def expert_norms_fwd(x, w_in, w_out, b_in, b_out, activation, backend) -> Tensor:
    norms = x.new_empty((x.shape[0], w_in.shape[0]), dtype=compute_dtype(x.dtype))
    for experts, offsets, token in _groups(x, w_in, w_out, backend):
        w1, w2, b1, b2 = _slice_of(experts, w_in, w_out, b_in, b_out)
        hidden, _ = grouped_gemm_fwd(x, w1, offsets, token, b1, activation, False, backend)
        squares = kernels(backend).grouped_gemm_norms(hidden, contiguous_matrices(w2), offsets, b2)
        norms[:, experts] = squares.view(experts.stop - experts.start, x.shape[0]).t().sqrt()
    return norms


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.activation, ctx.backend = inputs
    ctx.save_for_backward(*tensors, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:5])
    found = operators.expert_norms_bwd(grad, *ctx.saved_tensors, ctx.activation, wanted, ctx.backend)
    return *(each if needed else None for each, needed in zip(found, wanted, strict=True)), None, None


def expert_norms_bwd(grad, x, w_in, w_out, b_in, b_out, norms, activation, wanted, backend) -> tuple[Tensor, ...]:
    given = w_in, w_out, b_in, b_out
    found: list[Tensor | None] = [None] * len(wanted)  # the gradients to x and to the tensors of `given`
    if w_in.shape[0] == 0:
        every = zip((x, *given), wanted, strict=True)
        found = [each.new_zeros(each.shape) if needed else None for each, needed in every]
    shares = torch.where(norms == 0, 0, grad / norms).t().contiguous()
    for experts, offsets, token in _groups(x, w_in, w_out, backend):
        share, parameters = shares[experts].view(-1), _slice_of(experts, *given)
        to_x, *rest = _group_bwd(x, offsets, token, share, parameters, activation, wanted, backend)
        if experts.stop - experts.start == w_in.shape[0]:
            found = [to_x, *rest]
            break
        if to_x is not None:
            found[0] = to_x.to(norms.dtype) if found[0] is None else found[0].add_(to_x)
        for index, part in enumerate(rest, 1):
            if part is not None:
                whole = found[index]
                if whole is None:
                    whole = found[index] = part.new_empty((w_in.shape[0], *part.shape[1:]))
                whole[experts] = part
    return tuple(x.new_empty(0) if each is None else each.to(x.dtype) for each in found)


def _group_bwd(x, offsets, token, share, parameters, activation, wanted, backend) -> tuple[Tensor | None, ...]:
    """Gradients to x and the parameters of a group of experts, where the gradient to an output row y_r is share_r y_r:
    the backward pass of an expert MLP with gate weights `share` and the gradient y."""
    w_in, w_out, b_in, b_out = parameters
    to_x, to_w_in, to_w_out, to_b_in, to_b_out = wanted
    dx = dw_in = dw_out = db_in = db_out = None
    hidden, pre = grouped_gemm_fwd(x, w_in, offsets, token, b_in, activation, activation != "", backend)
    y, _ = grouped_gemm_fwd(hidden, w_out, offsets, None, b_out, "", False, backend)
    if x.dtype == torch.float16:  # kernels store hidden * share, which may overflow if a norm is small
        y, share = y.mul_(share[:, None]), torch.ones_like(share)
    given = y, contiguous_matrices(w_out), offsets, None, share, pre if activation else hidden
    dpre, weighted, _ = kernels(backend).expert_mlp_bwd_hidden(*given, activation)
    if to_w_out or to_b_out:
        dw_out, db_out = weight_gradient(weighted, y, offsets, None, None, to_b_out, backend, row_weight=share)
    if to_x:
        dx = _sum_of_experts(rows_gradient(dpre, w_in, offsets, backend), x.shape[0], backend)
    if to_w_in or to_b_in:
        dw_in, db_in = weight_gradient(x, dpre, offsets, token, None, to_b_in, backend)
    found = dx, dw_in, dw_out, db_in, db_out
    return tuple(each if needed else None for each, needed in zip(found, wanted, strict=True))


def _sum_of_experts(rows: Tensor, num_tokens: int, backend: str) -> Tensor:
    """(T, D): row t is the sum of rows t, T + t, 2 T + t, ... of `rows`."""
    if rows.shape[0] == num_tokens:
        return rows
    row = torch.arange(rows.shape[0], device=rows.device, dtype=torch.int32)
    return combine_fwd(rows, None, row.view(-1, num_tokens).t(), backend)


def _slice_of(experts: slice, *parameters: Tensor | None) -> tuple[Any, ...]:
    parts = (None if each is None else each[experts] for each in parameters)
    return tuple(each if each is None or each.dim() == 3 else each.contiguous() for each in parts)


def _bwd_fake(grad, x, w_in, w_out, b_in, b_out, norms, activation, wanted, backend):
    given = zip((x, w_in, w_out, b_in, b_out), wanted, strict=True)
    return tuple(x.new_empty(0) if each is None else gradient_like(each, needed) for each, needed in given)


def _products_flops(x, w_in, w_out) -> tuple[int, int]:
    return 2 * x[0] * w_in[0] * w_in[1] * w_in[2], 2 * x[0] * w_out[0] * w_out[1] * w_out[2]


def _bwd_flops(grad, x, w_in, w_out, b_in, b_out, norms, activation, wanted, *rest, **kwargs) -> int:
    first, second = _products_flops(x, w_in, w_out)
    to_x, to_w_in, to_w_out, to_b_in, to_b_out = wanted
    return first + second * (2 + (to_w_out or to_b_out)) + first * (to_x + (to_w_in or to_b_in))


_TENSORS = "Tensor x, Tensor w_in, Tensor w_out, Tensor? b_in, Tensor? b_out"

define(
    f"expert_norms_fwd({_TENSORS}, str activation, str backend) -> Tensor",
    expert_norms_fwd,
    lambda x, w_in, *rest: x.new_empty((x.shape[0], w_in.shape[0]), dtype=compute_dtype(x.dtype)),
    lambda x, w_in, w_out, *rest, out_shape=None, **kwargs: sum(_products_flops(x, w_in, w_out)),
    check=_check_fwd,
    save=_save,
    backward=_backward,
)
define(
    f"expert_norms_bwd(Tensor grad, {_TENSORS}, Tensor norms, str activation, bool[] wanted, str backend) -> "
    f"({', '.join(['Tensor'] * 5)})",
    expert_norms_bwd,
    _bwd_fake,
    _bwd_flops,
    check=_check_bwd,
    backward=no_second_derivative("expert_norms"),
)


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
        w_in: (E, D, H), or (E, D, 2 H) for a gated activation, in the dtype of x; any strides.
        w_out: (E, H, Dout) in the dtype of x.
        b_in, b_out: (E, H or 2 H) and (E, Dout) in the dtype of x, or None.
        activation: as in grouped_gemm, but not "swiglu_clamped".
        backend: "reference", "cpu", "triton" or "cuda"; None: automatic choice (see moe_kernels.explain).

    Returns:
        s (T, E) in the dtype of x. The hidden layer is rounded to that dtype. Outputs and sums of squares are in
        float32 (float64 stays), but a CPU with AMX rounds outputs of large bfloat16 experts to bfloat16.

    Gradient: to x, the weights and the biases; zero where a norm is zero, or is computed as zero because its squares
    underflow (outputs below about 3e-23 in float32). Kernels are once differentiable.

    Cost of kernels with W = H or 2 H columns of w_in. G experts are computed at a time, 1 on a CPU. On a GPU G is the
    largest number up to E with T G max(D, W, Dout) up to 2^27, but at least 1. Tensors with a row for each token and
    each of G experts have, all together, up to T G H elements forward and T G (D + 2 W + 2 H + Dout) backward. FLOPs
    (torch's counter): 2 T E (D W + H Dout) forward, and three times as many backward if all gradients are needed, a
    third of them for recomputation.

    Raises:
        TypeError: a tensor has another dtype or layout, or torch.func or forward-mode AD is used.
        ValueError: shapes or devices that do not fit, an unknown activation, "swiglu_clamped", or an odd W with a
            gated activation.
        BackendError: the named backend cannot run this.

    Source: CompeteSMoE, the competition mechanism.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> w_in = torch.stack([torch.eye(2), 2 * torch.eye(2)])
        >>> w_out = torch.tensor([[[3.0, 4.0], [3.0, 4.0]]]).expand(2, 2, 2)
        >>> mk.expert_norms(x, w_in, w_out)
        tensor([[ 5., 10.],
                [ 5., 10.]])
    """
    check_tensor("expert_norms", "x", x, FLOATING)
    check_rank("expert_norms", "x", x, "(T, D)")
    if activation == CLAMPED:
        raise ValueError(f"expert_norms: activation must be one that grouped_gemm takes, but not {activation!r}")
    check_parameters("expert_norms", x, None, w_in, w_out, b_in, b_out, activation)
    chosen = backends.choose("expert_norms", backend, x, w_in, w_out)
    if chosen == "reference":
        with without_autocast(x.device.type):
            return reference.expert_norms(x, w_in, w_out, b_in=b_in, b_out=b_out, activation=activation)
    return operators.expert_norms_fwd(x, w_in, w_out, b_in, b_out, activation or "", mark(chosen)).to(x.dtype)
