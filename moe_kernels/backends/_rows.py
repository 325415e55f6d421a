"""Orders rows by token, for GPU kernels that sum the rows of each token."""

from __future__ import annotations

import torch
from torch import Tensor


def rows_by_token(row_token: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """token_offsets (T + 1) and by_token (R), int32: by_token[token_offsets[t]:token_offsets[t + 1]] are the rows of
    token t, in ascending order.

    Rows without a token (-1) come first in by_token. The host does not wait for the device.
    """
    tokens, by_token = torch.sort(row_token, stable=True)
    bounds = torch.arange(num_tokens + 1, dtype=row_token.dtype, device=row_token.device)
    return torch.searchsorted(tokens, bounds, out_int32=True), by_token.to(torch.int32)
