"""Combine, by definition: every token sums its rows, each times its gate weight."""

from typing import Any

import torch
from torch import Tensor


def combine(rows: Tensor, plan: Any, weights: Tensor | None = None) -> Tensor:
    """rows (R, D), weights (T, K) -> y (T, D): y_t = sum over k with slot_row_tk >= 0 of weights_tk rows[slot_row_tk].

    Summed in float32 (float64 stays). Without weights every weight is 1. Weights of choices without a row have no
    effect, even NaN.
    """
    dtype = torch.promote_types(rows.dtype, torch.float32)
    zeros = rows.new_zeros(1, rows.shape[1])
    picked = torch.cat([rows, zeros])[plan.slot_row.long()].to(dtype)  # (T, K, D); index -1 is the row of zeros
    if weights is not None:
        picked = picked * torch.where(plan.slot_row >= 0, weights.to(dtype), 0)[..., None]
    return picked.sum(dim=1).to(rows.dtype)
