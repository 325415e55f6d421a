"""The grouped GEMM and what the expert MLP and expert norms are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import backends
from moe_kernels.library._define import GATED, define, matrices, no_flops, rows, wide


def refuse_bad_rows(expert_offsets: Tensor, rows: Tensor, row_token: Tensor | None) -> int | None:
    """ValueError for offsets that fall or exceed R, or tokens outside [-1, T), on the CPU; for a GPU one would wait.

    Returns the number of rows in use, where it is known.
    """
    if not expert_offsets.is_cpu:
        return None
    num_rows = rows.shape[0] if row_token is None else row_token.shape[0]
    bounds = expert_offsets.tolist()
    if bounds[0] != 0 or bounds[-1] > num_rows or bounds != sorted(bounds):
        raise ValueError(f"grouped_gemm: expert_offsets must rise from 0 to at most R = {num_rows}; got {bounds}")
    if row_token is not None and num_rows > 0:
        low, high = (int(bound) for bound in torch.aminmax(row_token))
        if low < -1 or high >= rows.shape[0]:
            raise ValueError(
                f"grouped_gemm: row_token must be from -1 (zeros) to {rows.shape[0] - 1}; got {low} to {high}"
            )
    return bounds[-1]


def _kernels(backend: str):
    return backends.load(backend, "grouped_gemm")


def _num_rows(x: Tensor, token: Tensor | None) -> int:
    return (x if token is None else token).shape[0]


def _grouped_gemm_fwd(
    x: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None,
    bias: Tensor | None,
    activation: str,
    keep_pre: bool,
    backend: str,
):
    if backend != "cpu":  # whose kernel looks while it is there, in a tenth of the time
        refuse_bad_rows(expert_offsets, x, row_token)
    bias = None if bias is None else bias.contiguous()
    return _kernels(backend).grouped_gemm_fwd(
        rows(x), matrices(weight), expert_offsets, row_token, bias, activation, keep_pre
    )


def _grouped_gemm_fwd_ready(x, weight, expert_offsets, row_token, bias, activation, keep_pre, backend):
    read_in_place = rows(x) is x and matrices(weight) is weight and (bias is None or bias.is_contiguous())
    if backend != "cpu" or not read_in_place:
        return _grouped_gemm_fwd
    return _kernels(backend).grouped_gemm_fwd_ready(x, weight, expert_offsets, row_token, bias, activation, keep_pre)


def _grouped_gemm_fwd_fake(x, weight, expert_offsets, row_token, bias, activation, keep_pre, backend):
    num_rows, dout = _num_rows(x, row_token), weight.shape[2]
    out = x.new_empty((num_rows, dout // 2 if activation in GATED else dout))
    return out, x.new_empty((num_rows if keep_pre else 0, dout))


def _product_flops(x, weight, row_token) -> int:
    return 2 * (x if row_token is None else row_token)[0] * weight[1] * weight[2]


def _grouped_gemm_bwd_weight(x, grad, expert_offsets, x_token, grad_token, with_bias: bool, backend: str):
    return _kernels(backend).grouped_gemm_bwd_weight(
        rows(x), rows(grad), expert_offsets, x_token, grad_token, with_bias
    )


def _grouped_gemm_bwd_weight_ready(x, grad, expert_offsets, x_token, grad_token, with_bias, backend):
    if backend != "cpu" or rows(x) is not x or rows(grad) is not grad:
        return _grouped_gemm_bwd_weight
    return _kernels(backend).grouped_gemm_bwd_weight_ready(x, grad, expert_offsets, x_token, grad_token, with_bias)


def _grouped_gemm_bwd_weight_fake(x, grad, expert_offsets, x_token, grad_token, with_bias, backend):
    num_experts, dout = expert_offsets.shape[0] - 1, grad.shape[1]
    dweight = x.new_empty((num_experts, x.shape[1], dout))
    return dweight, x.new_empty((num_experts if with_bias else 0, dout))


def _grouped_gemm_sum_rows(x: Tensor, row_token: Tensor, num_tokens: int, backend: str) -> Tensor:
    """(R, D) -> (T, D): every token's sum of its rows, in float32 and in their order; -1 is no token."""
    return _kernels(backend).grouped_gemm_sum_rows(rows(x), row_token, num_tokens)


def _expert_mlp_bwd_hidden(
    grad: Tensor,
    w_out: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor,
    row_weight: Tensor,
    pre: Tensor,
    activation: str,
    backend: str,
):
    return _kernels(backend).expert_mlp_bwd_hidden(
        rows(grad), matrices(w_out), expert_offsets, row_token, row_weight, pre, activation
    )


def _expert_mlp_bwd_hidden_fake(grad, w_out, expert_offsets, row_token, row_weight, pre, activation, backend):
    weighted = pre.new_empty((pre.shape[0], w_out.shape[1]))
    return pre.new_empty(pre.shape), weighted, row_weight.new_empty(row_weight.shape)


def _grouped_gemm_norms(x: Tensor, weight: Tensor, expert_offsets: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    bias = None if bias is None else bias.contiguous()
    return _kernels(backend).grouped_gemm_norms(rows(x), matrices(weight), expert_offsets, bias)


define(
    "grouped_gemm_fwd(Tensor x, Tensor weight, Tensor expert_offsets, Tensor? row_token, Tensor? bias, str activation, "
    "bool keep_pre, str backend) -> (Tensor, Tensor)",
    _grouped_gemm_fwd,
    _grouped_gemm_fwd_fake,
    lambda x, weight, offsets, row_token, *rest, out_shape=None, **kwargs: _product_flops(x, weight, row_token),
    _grouped_gemm_fwd_ready,
)
define(
    "grouped_gemm_bwd_weight(Tensor x, Tensor grad, Tensor expert_offsets, Tensor? x_token, Tensor? grad_token, "
    "bool with_bias, str backend) -> (Tensor, Tensor)",
    _grouped_gemm_bwd_weight,
    _grouped_gemm_bwd_weight_fake,
    lambda x, grad, offsets, x_token, *rest, out_shape=None, **kwargs: _product_flops(x, (0, x[1], grad[1]), x_token),
    _grouped_gemm_bwd_weight_ready,
)
define(
    "grouped_gemm_sum_rows(Tensor x, Tensor row_token, SymInt num_tokens, str backend) -> Tensor",
    _grouped_gemm_sum_rows,
    lambda x, row_token, num_tokens, backend: x.new_empty((num_tokens, x.shape[1])),
    no_flops,
)
define(
    "activation_bwd(Tensor grad, Tensor pre, str activation, str backend) -> Tensor",
    lambda grad, pre, activation, backend: _kernels(backend).activation_bwd(rows(grad), pre, activation),
    lambda grad, pre, activation, backend: pre.new_empty(pre.shape),
    no_flops,
)
define(
    "expert_mlp_bwd_hidden(Tensor grad, Tensor w_out, Tensor expert_offsets, Tensor row_token, Tensor row_weight, "
    "Tensor pre, str activation, str backend) -> (Tensor, Tensor, Tensor)",
    _expert_mlp_bwd_hidden,
    _expert_mlp_bwd_hidden_fake,
    lambda grad, w_out, offsets, row_token, *rest, out_shape=None, **kwargs: _product_flops(grad, w_out, row_token),
)
define(
    "grouped_gemm_norms(Tensor x, Tensor weight, Tensor expert_offsets, Tensor? bias, str backend) -> Tensor",
    _grouped_gemm_norms,
    lambda x, weight, expert_offsets, bias, backend: x.new_empty(x.shape[0], dtype=wide(x.dtype)),
    lambda x, weight, *rest, out_shape=None, **kwargs: _product_flops(x, weight, None),
)
