"""What the tensors of a call look like, so that a call which was checked before is recognised."""

from __future__ import annotations

import torch
from torch import Tensor

# Of tensors whose memory is where they say: a class of its own may keep it elsewhere, or have none.
TYPES = (Tensor, torch.nn.Parameter)


def by_attributes(*tensors: Tensor | None) -> tuple | None:
    """Dtype, shape, strides and device of each; None if one has none, has no memory, or is of a class of its own."""
    looks: list[tuple | None] = []
    for each in tensors:
        if each is None:
            looks.append(None)
        elif type(each) in TYPES and each.layout is torch.strided and not each.is_meta:
            looks.append((each.dtype, each.shape, each.stride(), each.device))
        else:
            return None
    return tuple(looks)


# Older versions of torch have no such interface.
try:
    from moe_kernels import _cpu  # type: ignore[attr-defined]  # compiled

    _cpu.read_tensors_by(torch.Tensor.__dlpack_c_exchange_api__, TYPES)
    look = _cpu.look
except (ImportError, AttributeError, TypeError):
    look = by_attributes
