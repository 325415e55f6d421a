"""The grouped GEMM, by definition: every expert multiplies its own rows, one expert after the other."""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def activate(pre: Tensor, activation: str | None, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """act(pre), elementwise; gelu is erf's. swiglu and geglu halve the columns: act(first half) * second half.

    swiglu_clamped takes the columns in turns: g the even ones, at most limit, u the odd ones, within +-limit;
    (u + 1) g sigmoid(alpha g).
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
    """rows (R, Din), weight (E, Din, Dout) -> (R, Dout): out_r = act(rows_r W_e + b_e), offsets_e <= r < offsets_e+1.

    Computed in float32 (float64 stays) and rounded once; swiglu_clamped rounds its input to the dtype of rows.
    With row_token (R,), rows are x (T, Din) and row r reads x[row_token_r], zeros where that is -1. Rows from offsets_E
    on are zero.
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
