"""The backend "cpu": csrc/cpu, by default with the widest vectors of this machine."""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from moe_kernels.backends import _addresses
from moe_kernels.backends.native import bind
from moe_kernels.sizes import words

try:
    module: Any = import_module("moe_kernels._cpu")  # the error of a "from" import would name a path
except ImportError as error:
    message = (
        f"the CPU extension is not built or does not load ({error}); run pip install -e . in the checkout, or "
        "pip install . there and Python in another folder"
    )
    raise ImportError(message) from None

device_type = "cpu"


def _isa(name: str | None) -> int:
    """The index of instruction set `name`; without a name, of the widest set of this machine."""
    if name and name not in module.isas:
        raise ValueError(f"MOE_KERNELS_CPU_ISA must be one of {', '.join(module.isas)} on this machine; got {name!r}")
    return module.isas.index(name or module.isas[-1])


isa: int = _isa(os.environ.get("MOE_KERNELS_CPU_ISA"))

# With fewer elements neither a second thread nor releasing the GIL pays.
_SERIAL = 1 << 15

pointer = partial(_addresses.pointer, device_type)


def chunks(elements: int) -> int:
    """Number of threads for so many elements. Each thread needs a scratch buffer."""
    return 1 if elements < _SERIAL else torch.get_num_threads()


def gate_scratch(logits: Tensor, scored: bool, num_groups: int) -> tuple[Tensor, int]:
    """Scratch for topk_gate, (threads, bytes), and its bytes for each thread.

    For each expert, padded to a multiple of 32: a float64 logit, an integer key of 8 bytes and an index of 4; with
    scored choices also a group's key and an index. Backward needs room for the logits and two numbers for each choice.
    """
    stride = (32 if scored else 24) * 32 * words(logits.shape[1])
    return logits.new_empty((chunks(logits.numel()), stride), dtype=torch.uint8), stride


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocates an output buffer. Requests huge pages for a large one (csrc/include/moe/cpu/pages.h)."""
    out = torch.empty(shape, dtype=dtype, device="cpu")
    module.expect_writes(isa, False, pointer("fresh", out, dtype), out.nbytes, 1)
    return out


def plan_counts(experts: Tensor, num_experts: int, order: str) -> Tensor:
    """Scratch for make_plan: how often each chunk of tokens requests each expert, (chunks, K, E) if order is "choice",
    else (chunks, 1, E)."""
    segments = experts.shape[1] if order == "choice" else 1
    return experts.new_empty((chunks(experts.numel()), segments, num_experts), dtype=torch.int32)


def sinkhorn_scratch(scores: Tensor, iterations: int, backward: bool) -> Tensor:
    """Scratch for matrices and vectors, (threads, bytes).

    For n <= 16 a vector of up to 64 bytes (AVX-512) has element (i, j) of several matrices, one in each lane. A thread
    first reads two such vectors for each element of scores, and of grad. For larger n it computes one matrix at a time;
    a row takes at most n doubles, padded to a multiple of 16.
    """
    n = scores.shape[-1]
    packed = n <= 16
    # Backward keeps at most seven vectors per iteration (Potentials in csrc/cpu/sinkhorn_log.h). The eighth is spare.
    staged, matrices, vectors = (2, 2, 20 + 8 * iterations) if backward else (1, 1, 20)
    matrices += 2 * staged if packed else staged
    vector = 64 * n if packed else 8 * -(-n // 16) * 16
    return scores.new_empty((chunks(scores.numel()), (matrices * n + vectors) * vector), dtype=torch.uint8)


def call(name: str, work: Tensor | int, *args: Any, passes: int = 1) -> int:
    """Calls C++ function `name` (see native/). Returns 0, or 1 if an index is out of range.

    The function takes the instruction set, and whether to release the GIL, before `args`, and the number of threads
    after them.

    Args:
        work: number of elements that the kernel works on, or a tensor with so many elements.
        passes: how often the kernel works on each element.
    """
    elements = work.numel() if isinstance(work, Tensor) else work
    numbers = _addresses.as_numbers(device_type, name, args)
    return getattr(module, name)(isa, elements * passes >= _SERIAL, *numbers, chunks(elements))


def _supports(device: str, dtype: torch.dtype) -> str | None:
    return _addresses.unsupported(device, device_type, dtype, tuple(_addresses.DTYPES))


kwta_supports = kwta_linear_supports = topk_gate_supports = _supports
plan_expert_choice_supports = plan_priority_supports = _supports
dispatch_supports = combine_supports = grouped_gemm_supports = sinkhorn_supports = _supports
tree_gate_supports = tree_route_supports = _supports


def make_plan_supports(device: str, dtype: torch.dtype) -> str | None:
    return _supports(device, torch.float32)  # the dtype of experts, int32 or int64, does not matter


bind(
    sys.modules[__name__],
    "activation",
    "combine",
    "dispatch",
    "grouped_gemm_cpu",
    "kwta",
    "kwta_linear",
    "plan",
    "plan_cpu",
    "sinkhorn",
    "topk_gate",
    "tree_gate",
    "tree_gate_products_cpu",
)
