"""The norm of every expert's output for every token, by definition: all (T, E, Dout) outputs, then their norms.

In some training steps CompeteSMoE routes every token to the experts with the largest norms.
"""

import torch
from torch import Tensor

from python_ref.grouped_gemm import activate


def expert_norms(
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    *,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    activation: str | None = "relu",
) -> Tensor:
    """x (T, D), w_in (E, D, H), w_out (E, H, Dout) -> s (T, E). swiglu and geglu need w_in (E, D, 2 H).

    s_te = ||act(x_t W_in_e + b_in_e) W_out_e + b_out_e||, the root of the sum of squares; its gradient is zero where
    that sum is zero. Computed in float32 (float64 stays); the hidden layer and s are rounded to the dtype of x.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    pre = torch.einsum("td,edh->teh", x.to(dtype), w_in.to(dtype))
    if b_in is not None:
        pre = pre + b_in.to(dtype)
    out = torch.einsum("teh,ehd->ted", activate(pre, activation).to(x.dtype).to(dtype), w_out.to(dtype))
    if b_out is not None:
        out = out + b_out.to(dtype)
    squares = out.square().sum(-1)
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1).sqrt(), 0 * squares).to(x.dtype)
