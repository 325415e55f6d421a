"""Dispatch as an operator. Its gradient is combine without weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_kernels import backends
from moe_kernels.ops._define import define, define_check, no_flops, operators
from moe_kernels.sizes import contiguous_rows, refuse_bad_rows

define_check(
    "refuse_bad_rows(str op, Tensor slot_row, SymInt num_rows, Tensor? row_token, Tensor? expert_offsets)",
    refuse_bad_rows,
)


def _fwd(x: Tensor, row_token: Tensor, slot_row: Tensor, expert_offsets: Tensor, backend: str) -> Tensor:
    arrays = [each.contiguous() for each in (row_token, slot_row, expert_offsets)]
    if backend != "cpu":  # the C++ kernel checks while it reads
        refuse_bad_rows("dispatch", slot_row, row_token.shape[0], row_token, expert_offsets)
    return backends.load(backend, "dispatch").dispatch_fwd(contiguous_rows(x), *arrays)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *arrays, ctx.backend = inputs
    ctx.save_for_backward(*arrays)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return operators.combine_fwd(grad, None, *ctx.saved_tensors, None, ctx.backend), *[None] * 4


define(
    "dispatch_fwd(Tensor x, Tensor row_token, Tensor slot_row, Tensor expert_offsets, str backend) -> Tensor",
    _fwd,
    lambda x, row_token, *rest: x.new_empty((row_token.shape[0], x.shape[1])),
    no_flops,
    save=_save,
    backward=_backward,
)
