"""The tree gate, and tree_route, which chooses one leaf per tree, in C++ and CUDA."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moe_kernels.sizes import compute_dtype, contiguous_rows

PAD = 16  # kPad of csrc/cpu/tree_gate.cpp: arrays in scratch are rounded up to a multiple of PAD elements
BLOCK = 128  # kBlock of csrc/cpu/tree_route.cpp: tokens that descend a tree together


def tree_gate_fwd(native, split_logits, leaf_logits, gamma, mode) -> tuple[Tensor, Tensor]:
    tokens, _, experts = leaf_logits.shape
    gates = leaf_logits.new_empty((tokens, experts), dtype=_results_dtype(native, leaf_logits.dtype))
    leaf_probs = gates.new_empty(leaf_logits.shape)
    results = ((each, gates.dtype) for each in (gates, leaf_probs))
    _run(native, "tree_gate_fwd", split_logits, leaf_logits, gamma, mode, after=results)
    return gates, leaf_probs


def tree_gate_bwd(native, grad_gates, grad_leaf_probs, split_logits, leaf_logits, gamma, mode) -> tuple[Tensor, Tensor]:
    dsplit, dleaf = torch.empty_like(split_logits), torch.empty_like(leaf_logits)
    dtype = _results_dtype(native, leaf_logits.dtype)
    grads = (grad_gates, dtype), (grad_leaf_probs, dtype)
    results = ((each, leaf_logits.dtype) for each in (dsplit, dleaf))
    _run(native, "tree_gate_bwd", split_logits, leaf_logits, gamma, mode, before=grads, after=results)
    return dsplit, dleaf


def _results_dtype(native: ModuleType, dtype: torch.dtype) -> torch.dtype:
    return dtype if getattr(native, "TREE_GATE_ROUNDS", False) else compute_dtype(dtype)


def weighing(mode: str, dtype: torch.dtype) -> tuple[float, float]:
    """(epsilon, least) of the softmax: epsilon is added to leaf probabilities; leaves with a probability below `least`
    are left out. mode: tree_gate's `parity`, "" for None."""
    limits = torch.finfo(dtype)
    return {"": (0.0, limits.tiny), "tf": (1e-8, limits.tiny * limits.eps), "bert": (1e-6, 1e-5)}[mode]


def _run(native, name, split_logits, leaf_logits, gamma, mode, before=(), after=()) -> None:
    tokens, trees, experts = leaf_logits.shape
    dtype = compute_dtype(leaf_logits.dtype)
    # TokenBuffers of csrc/cpu/tree_gate.cpp: nodes of each tree; three arrays of all leaves; `heap`, with the
    # probabilities of one tree's nodes and leaves, and 2 * PAD spare elements.
    rows = trees * -(-experts // PAD) + 3 * -(-trees * experts // PAD) + -(-2 * experts // PAD) + 2
    stride = dtype.itemsize * PAD * rows
    scratch = leaf_logits.new_empty((native.chunks(leaf_logits.numel()), stride), dtype=torch.uint8)
    native.call(
        name, leaf_logits, leaf_logits.dtype, *before, (split_logits, leaf_logits.dtype),
        (leaf_logits, leaf_logits.dtype), *after, (scratch, torch.uint8), stride, tokens, trees, experts, gamma,
        *weighing(mode, dtype),
    )  # fmt: skip


def tree_route_fwd(
    native, x, split_weight, leaf_weight, split_bias, leaf_bias, gamma
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = contiguous_rows(x)
    (tokens, dim), (trees, experts, _) = x.shape, leaf_weight.shape
    weights = x.new_empty((tokens, trees), dtype=compute_dtype(x.dtype))
    chosen, visited = (weights.new_empty(weights.shape, dtype=torch.int32) for _ in range(2))
    unsaturated = weights.new_empty(weights.shape, dtype=torch.bool)
    stride = 8 * (BLOCK + 2) * dim + 16 * (BLOCK + experts + 1)
    scratch = x.new_empty((native.chunks(x.numel()), stride), dtype=torch.uint8)
    weight = [each.contiguous() for each in (split_weight, leaf_weight)]
    bias = [None if each is None else each.contiguous() for each in (split_bias, leaf_bias)]
    native.call(
        "tree_route_fwd", x, x.dtype, (x, x.dtype), x.stride(0),
        *((each, x.dtype) for each in weight), *((each, x.dtype) for each in bias), (weights, weights.dtype),
        (chosen, torch.int32), (visited, torch.int32), (unsaturated, torch.bool), (scratch, torch.uint8),
        stride, tokens, dim, trees, experts, gamma,
    )  # fmt: skip
    return weights, chosen, visited, unsaturated
