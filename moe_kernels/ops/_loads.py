"""count_requests: how many choices name each expert, summed over forwards; checkpoints' repetitions do not count."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.ops import _checks
from moe_kernels.ops._define import define, no_flops, operators


def _check(op: str, loads: Tensor, counted: Tensor | None, experts: Tensor) -> None:
    (num_experts,) = _checks.shape_of(op, "loads", loads, 1)
    _checks.expect(op, "loads", loads, (num_experts,), torch.float32, experts)
    _checks.expect(op, "counted", counted, (num_experts,), torch.float32, experts)
    shape = _checks.shape_of(op, "experts", experts, 2)
    _checks.expect(op, "experts", experts, shape, torch.int32, experts)


def count_requests(loads: Tensor, counted: Tensor | None, experts: Tensor) -> None:
    """loads[e] += the number of elements of experts (T, K) that are e, for loads (E,) float32. With `counted`, like
    loads, that tensor is added to instead, and then copied to loads.

    Elements outside [0, E) do not count. In a backward pass, where a checkpoint repeats a forward, nothing changes:
    that is asked when the operator runs, so that compiled programs do as eager ones.
    """
    if torch._C._current_graph_task_id() != -1 or not loads.numel():
        return
    total = loads if counted is None else counted
    known = (experts >= 0) & (experts < total.shape[0])
    total.index_add_(0, experts.where(known, 0).flatten().long(), known.flatten().to(total.dtype))
    if counted is not None:
        loads.copy_(counted)


define(
    "count_requests(Tensor(a!) loads, Tensor(b!)? counted, Tensor experts) -> ()",
    count_requests,
    lambda loads, counted, experts: None,
    no_flops,
    check=_check,
)
count = operators.count_requests
