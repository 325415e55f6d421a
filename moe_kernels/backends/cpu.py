"""CPU tensors: csrc/cpu, in the widest vectors that this machine has."""

from __future__ import annotations

import os
import sys
from functools import partial

import torch
from torch import Tensor

from moe_kernels.backends import _native
from moe_kernels.backends.native import kwta

try:
    from moe_kernels import _cpu as module
except ImportError as error:
    raise ImportError(f"the CPU extension is not built ({error}); run pip install . in the checkout") from None

device_type = "cpu"

# Index of the instruction set; MOE_KERNELS_CPU_ISA=base|avx2|avx512 asks for a narrower one.
isa: int = module.isas.index(os.environ.get("MOE_KERNELS_CPU_ISA", module.isas[-1]))

# Below this many elements one thread is done before a second one wakes.
_SERIAL = 1 << 15

_self = sys.modules[__name__]


def pointer(op: str, tensor: Tensor | None, dtype: torch.dtype, rank: int) -> int:
    return _native.pointer(op, tensor, dtype, rank, device_type)


def launch(name: str, work: Tensor, *args: int | float) -> None:
    threads = 1 if work.numel() < _SERIAL else torch.get_num_threads()
    getattr(module, name)(isa, *args, threads)


def kwta_supports(device: str, dtype: torch.dtype) -> str | None:
    return _native.unsupported(device, device_type, dtype, tuple(_native.DTYPES))


kwta_fwd = partial(kwta.fwd, _self)
kwta_mask = partial(kwta.mask, _self)
kwta_bwd = partial(kwta.bwd, _self)
