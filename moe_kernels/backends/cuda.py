"""CUDA tensors: csrc/cuda, on the current stream of the tensor's device."""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch import Tensor

from moe_kernels.backends import _native
from moe_kernels.backends.native import kwta

try:
    from moe_kernels import _cuda as module
except ImportError as error:
    module = None
    _not_built = f"the CUDA extension is not built ({error}); install with nvcc on the PATH"

# tests/simt runs the same launchers on the host: it puts its own module here, and device_type "cpu".
device_type = "cuda"

_self = sys.modules[__name__]


def pointer(op: str, tensor: Tensor | None, dtype: torch.dtype, rank: int) -> int:
    return _native.pointer(op, tensor, dtype, rank, device_type)


def launch(name: str, work: Tensor, *args: int | float) -> None:
    if device_type == "cpu":
        getattr(module, name)(*args, 0)
        return
    with torch.cuda.device(work.device):
        getattr(module, name)(*args, torch.cuda.current_stream().cuda_stream)


def kwta_supports(device: str, dtype: torch.dtype) -> str | None:
    if module is None:
        return _not_built
    return _native.unsupported(device, device_type, dtype, (torch.float32, torch.bfloat16, torch.float16))


kwta_fwd = partial(kwta.fwd, _self)
kwta_mask = partial(kwta.mask, _self)
kwta_bwd = partial(kwta.bwd, _self)
