"""The backend "cuda": csrc/cuda, on the current stream of the tensor's device."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from moe_kernels.backends import _addresses, _gpu
from moe_kernels.backends.native import bind

try:
    module: Any = import_module("moe_kernels._cuda")  # the error of a "from" import would name a path
except ImportError as error:
    module = None
    _not_built = f"the CUDA extension is not built or does not load ({error}); build with nvcc and MOE_KERNELS_CUDA=1"

# tests/ptx runs the launchers on CPU tensors: it replaces `module`, and sets device_type to "cpu".
device_type = "cuda"

PLAN_TILE = 1024  # choices that a block of csrc/cuda/plan.cu reads at a time


def call(name: str, work: Tensor, *args: Any, passes: int = 1) -> None:
    """Calls C++ function `name` (see native/) on the device of `work`. Only cpu.call uses `passes`."""
    numbers = _addresses.as_numbers(device_type, name, args)
    if device_type == "cpu":
        getattr(module, name)(*numbers, 0)
        return
    with torch.cuda.device(work.device):
        getattr(module, name)(*numbers, torch.cuda.current_stream().cuda_stream)


def chunks(elements: int) -> int:
    """Number of scratch buffers that the kernels of gates take: none here, one for each thread in cpu.chunks."""
    return 0


def gate_scratch(logits: Tensor, scored: bool, num_groups: int) -> tuple[Tensor | None, int]:
    """Scratch for the keys of topk_gate's experts and groups, (T, E + num_groups), and 0; None where a warp's
    registers hold them."""
    num_tokens, num_experts = logits.shape
    if not scored or num_experts <= 256:
        return None, 0
    return logits.new_empty((num_tokens, 4 * (num_experts + num_groups)), dtype=torch.uint8), 0


def plan_counts(experts: Tensor, num_experts: int, order: str) -> Tensor:
    """Scratch for make_plan: how often each chunk of choices names each expert, (chunks, E).

    At most 1024 chunks; above 4096 experts as many as fit into 16 MiB, but at least one.
    """
    limit = max(1, min(1024, 2**22 // num_experts))
    chunks = max(1, min(-(-experts.numel() // PLAN_TILE), limit))
    return experts.new_empty((chunks, num_experts), dtype=torch.int32)


def sinkhorn_scratch(scores: Tensor, iterations: int, backward: bool) -> Tensor:
    """Scratch, (B, bytes for each matrix): in backward two vectors of n doubles for each iteration, and a flag, whether
    the matrix needs the logarithmic form. The flags of all matrices are behind all vectors (csrc/cuda/sinkhorn.cu)."""
    batch, n, _ = scores.shape
    return scores.new_empty((batch, 16 * n * iterations * backward + 8), dtype=torch.uint8)


def _supports(target: str, dtype: torch.dtype) -> str | None:
    if module is None:
        return _not_built
    reason = _addresses.unsupported(target, device_type, dtype, (torch.float32, torch.bfloat16, torch.float16))
    if reason is not None or device_type == "cpu":
        return reason
    return _gpu.unsupported(target, module.architectures, module.runtime_version, module.driver_version())


kwta_supports = topk_gate_supports = dispatch_supports = combine_supports = sinkhorn_supports = _supports
tree_gate_supports = tree_route_supports = _supports


def make_plan_supports(target: str, dtype: torch.dtype) -> str | None:
    return _supports(target, torch.float32)  # the dtype of experts, int32 or int64, does not matter


def grouped_gemm_supports(target: str, dtype: torch.dtype) -> str | None:
    if dtype == torch.float32:
        return _supports(target, dtype) or "its tensor-core kernel takes bfloat16 and float16, not float32"
    return _supports(target, dtype)


TREE_GATE_ROUNDS = True  # kernels round gates and leaf probabilities to the dtype of x


# The C++ launchers refuse larger sizes than these.
def sinkhorn_limits(target: str) -> dict[str, int]:
    return {"n": 64}


def tree_gate_limits(target: str) -> dict[str, int]:
    return {"E": 4096}


def tree_route_limits(target: str) -> dict[str, int]:
    return {"K": 1024}


bind(
    sys.modules[__name__],
    "activation",
    "combine",
    "dispatch",
    "grouped_gemm_cuda",
    "kwta",
    "plan",
    "sinkhorn",
    "topk_gate",
    "tree_gate",
)
