"""Rows in the order of their tokens, for GPU kernels that sum them."""

from __future__ import annotations

import torch
from torch import Tensor


def rows_by_token(row_token: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """token_offsets (T + 1) and by_token (R), int32: by_token[token_offsets[t]:token_offsets[t + 1]] are the rows of t.

    A stable sort keeps the rows of a token in their order, at a cost linear in R. Counting the rows of each token
    separately would cost R times T. Rows without a token (-1) come first and are in no range. The host does not wait.
    """
    tokens, by_token = torch.sort(row_token, stable=True)
    bounds = torch.arange(num_tokens + 1, dtype=row_token.dtype, device=row_token.device)
    return torch.searchsorted(tokens, bounds, out_int32=True), by_token.to(torch.int32)
