"""Expert norms as one operator, and its gradients as another. Both compute a group of experts at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moe_kernels.ops._define import define, gradient_like, no_second_derivative, operators
from moe_kernels.ops.combine import combine_fwd
from moe_kernels.ops.grouped_gemm import grouped_gemm_fwd, kernels, rows_gradient, weight_gradient
from moe_kernels.sizes import compute_dtype, contiguous_matrices

# Limit on the elements of a tensor with a row for each token and expert of a group. A group has at least one expert.
ELEMENTS = 2**27


def _groups(x: Tensor, w_in: Tensor, w_out: Tensor, backend: str) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yields groups of experts that are computed together, as (experts, offsets, token).

    A group's rows are all tokens for its first expert, then all tokens for its second expert, and so on. offsets: the
    first row of each expert, then the number of rows. token: the token of each row; None if row r is token r. On a CPU
    a group is one expert, so that its tensors are small.
    """
    num_tokens, num_experts = x.shape[0], w_in.shape[0]
    widest = max(x.shape[1], w_in.shape[2], w_out.shape[2], 1) * max(num_tokens, 1)
    group_size = 1 if backend == "cpu" else max(ELEMENTS // widest, 1)
    for first in range(0, num_experts, group_size):
        experts = slice(first, min(first + group_size, num_experts))
        count = experts.stop - first
        offsets = torch.arange(count + 1, device=x.device, dtype=torch.int32) * num_tokens
        token = torch.arange(num_tokens, device=x.device, dtype=torch.int32).repeat(count) if count > 1 else None
        yield experts, offsets, token


def _fwd(x, w_in, w_out, b_in, b_out, activation, backend) -> Tensor:
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


def _bwd(grad, x, w_in, w_out, b_in, b_out, norms, activation, wanted, backend) -> tuple[Tensor, ...]:
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
    _fwd,
    lambda x, w_in, *rest: x.new_empty((x.shape[0], w_in.shape[0]), dtype=compute_dtype(x.dtype)),
    lambda x, w_in, w_out, *rest, out_shape=None, **kwargs: sum(_products_flops(x, w_in, w_out)),
    save=_save,
    backward=_backward,
)
define(
    f"expert_norms_bwd(Tensor grad, {_TENSORS}, Tensor norms, str activation, bool[] wanted, str backend) -> "
    f"({', '.join(['Tensor'] * 5)})",
    _bwd,
    _bwd_fake,
    _bwd_flops,
    backward=no_second_derivative("expert_norms"),
)
