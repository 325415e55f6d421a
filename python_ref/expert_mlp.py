"""The expert MLP, by definition: dispatch, two grouped products with an activation between them, combine."""

from typing import Any

from torch import Tensor

from python_ref.combine import combine
from python_ref.dispatch import dispatch
from python_ref.grouped_gemm import grouped_gemm


def expert_mlp(
    x: Tensor,
    plan: Any,
    w_in: Tensor,
    w_out: Tensor,
    *,
    weights: Tensor | None,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    activation: str | None = "gelu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """x (T, D) -> y (T, Dout): y_t = sum of weights_tk (act(x_t W_in_e + b_in_e) W_out_e + b_out_e) over the kept
    choices k of token t, where e is the expert of choice k.

    w_in (E, D, H), or (E, D, 2 H) if the activation halves the columns; w_out (E, H, Dout). The hidden layer and the
    experts' outputs are rounded to the dtype of x. Without weights every weight is 1.
    """
    options: Any = {"activation": activation, "alpha": alpha, "limit": limit}
    hidden = grouped_gemm(dispatch(x, plan), w_in, plan.expert_offsets, bias=b_in, **options)
    return combine(grouped_gemm(hidden, w_out, plan.expert_offsets, bias=b_out), plan, weights)
