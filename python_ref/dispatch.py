"""Dispatch, by definition: copies the tokens to the rows of a plan."""

from typing import Any

import torch
from torch import Tensor


def dispatch(x: Tensor, plan: Any) -> Tensor:
    """x (T, D) -> rows (R, D): rows_r = x[row_token_r], and 0 where row_token_r is -1."""
    zeros = x.new_zeros(1, x.shape[1])
    return torch.cat([x, zeros])[plan.row_token.long()]  # index -1 is the row of zeros
