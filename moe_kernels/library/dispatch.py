"""Dispatch; its gradient is a combine."""

from __future__ import annotations

from torch import Tensor

from moe_kernels import backends
from moe_kernels.library._define import define, no_flops


def _dispatch(x: Tensor, row_token: Tensor, slot_row: Tensor, expert_offsets: Tensor, backend: str) -> Tensor:
    return backends.load(backend, "dispatch").dispatch_fwd(x, row_token, slot_row, expert_offsets)


define(
    "dispatch_fwd(Tensor x, Tensor row_token, Tensor slot_row, Tensor expert_offsets, str backend) -> Tensor",
    _dispatch,
    lambda x, row_token, *rest: x.new_empty((row_token.shape[0], x.shape[1])),
    no_flops,
)
