"""The grouped GEMM, by definition: every expert multiplies its own rows, one expert after the other."""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def activate(pre: Tensor, activation: str | None, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """act(pre). gelu is computed with erf. swiglu, geglu and swiglu_clamped halve the number of columns.

    swiglu, geglu: silu or gelu of the first half of the columns, times the second half. swiglu_clamped:
    (u + 1) g sigmoid(alpha g), with g = min(even columns, limit) and u the odd columns clamped to [-limit, limit].
    """
    if activation is None:
        return pre
    if activation == "swiglu_clamped":
        gate, linear = pre[..., ::2].clamp(max=limit), pre[..., 1::2].clamp(-limit, limit)
        return (linear + 1) * gate * torch.sigmoid(alpha * gate)
    if activation in ("swiglu", "geglu"):
        gate, linear = pre.chunk(2, dim=-1)
        return (F.silu(gate) if activation == "swiglu" else F.gelu(gate)) * linear
    plain: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh}
    return plain[activation](pre)


def grouped_gemm(
    rows: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    row_token: Tensor | None = None,
) -> Tensor:
    """rows (R, Din), weight (E, Din, Dout) -> (R, Dout): out_r = act(rows_r W_e + b_e), with e the expert of row r.

    swiglu, geglu and swiglu_clamped give (R, Dout / 2). The rows of expert e are expert_offsets[e] to
    expert_offsets[e + 1] - 1; rows of the result from expert_offsets[E] on are zero. Computed in float32 (float64
    stays); the result is rounded to the dtype of rows, and so is rows_r W_e + b_e before swiglu_clamped. With row_token
    (R,), `rows` holds tokens (T, Din), and row r is rows[row_token_r], or zeros where row_token_r is -1.
    """
    if row_token is not None:
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])[row_token.long()]  # index -1 is the row of zeros
    dtype = torch.promote_types(rows.dtype, torch.float32)
    bounds, outs = expert_offsets.tolist(), []
    for expert, (first, last) in enumerate(pairwise(bounds)):
        pre = rows[first:last].to(dtype) @ weight[expert].to(dtype)
        if bias is not None:
            pre = pre + bias[expert].to(dtype)
        if activation == "swiglu_clamped":
            pre = pre.to(rows.dtype).to(dtype)
        outs.append(activate(pre, activation, alpha, limit).to(rows.dtype))
    width = weight.shape[2] // 2 if activation in ("swiglu", "geglu", "swiglu_clamped") else weight.shape[2]
    return torch.cat([*outs, rows.new_zeros(rows.shape[0] - bounds[-1], width)])
