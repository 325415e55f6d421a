"""count_requests: how many choices name each expert, summed over forwards; checkpoints' repetitions do not count."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.ops import _checks
from moe_kernels.ops._define import define, no_flops, operators


def _check(op: str, loads: Tensor, counted: Tensor, experts: Tensor) -> None:
    (num_experts,) = _checks.shape_of(op, "loads", loads, 1)
    _checks.expect(op, "loads", loads, (num_experts,), torch.float32, experts)
    _checks.expect(op, "counted", counted, (num_experts,), torch.float32, experts)
    shape = _checks.shape_of(op, "experts", experts, 2)
    _checks.expect(op, "experts", experts, shape, torch.int32, experts)


def count_requests(loads: Tensor, counted: Tensor, experts: Tensor) -> None:
    """loads[e] += the number of elements of experts (T, K) that are e, for loads (E,) float32; then counted = loads.

    Elements outside [0, E) do not count. In a backward pass, where a checkpoint repeats a forward, nothing changes.
    In a forward of DistributedDataParallel, which has replaced the buffers of every rank by those of rank 0, `counted`
    is added to instead, and then copied to loads. Both are asked when the operator runs, so that compiled programs do
    as eager ones.
    """
    if torch._C._current_graph_task_id() != -1 or not loads.numel():
        return
    total, other = (counted, loads) if _in_ddp() else (loads, counted)
    known = (experts >= 0) & (experts < total.shape[0])
    total.index_add_(0, experts.where(known, 0).flatten().long(), known.flatten().to(total.dtype))
    other.copy_(total)


def _in_ddp() -> bool:
    """Whether a DistributedDataParallel that broadcasts buffers runs its forward."""
    active = getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    return active is not None and bool(active.broadcast_buffers)


define(
    "count_requests(Tensor(a!) loads, Tensor(b!) counted, Tensor experts) -> ()",
    count_requests,
    lambda loads, counted, experts: None,
    no_flops,
    check=_check,
)
count = operators.count_requests
