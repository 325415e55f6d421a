"""Zero gradients for unused parameters, for DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def attach_unused(y: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """Returns y. If torch.distributed is initialised, backward of y gives the trainable `parameters` a zero gradient.

    By default DistributedDataParallel fails in the step after one in which a parameter got no gradient. Without
    torch.distributed the gradient stays None, so that weight decay and momentum do not change the parameter.
    """
    if not (torch.is_grad_enabled() and torch.distributed.is_available() and torch.distributed.is_initialized()):
        return y
    # No DTensors (they have `placements`): moe_kernels.nn.parallel.data_parallel makes DDP ignore them.
    unused = [each for each in parameters if each.requires_grad and not hasattr(each, "placements")]
    return _AttachUnused.apply(y, *unused) if unused else y


class _AttachUnused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *map(torch.zeros_like, ctx.saved_tensors)
