"""The products of x with a tree gate's weights on CPU tensors.

A tree of 33 to 1024 experts is divided into top nodes and, below them, branches (_nodes_above). The products of top
nodes are computed for all tokens. A saturated node sends a token to one child with probability 1, so the token cannot
reach the branches below the other child. If enough nodes are saturated, the products of these branches are skipped
(csrc/cpu/tree_gate_products.cpp). Otherwise all products are computed, as a grouped GEMM of one expert.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from moe_kernels.backends.native.grouped_gemm_cpu import grouped_gemm_bwd_weight, grouped_gemm_fwd
from moe_kernels.sizes import all_rows, compute_dtype, contiguous_matrices, contiguous_rows, is_fixed

# kColumns and kBlock of csrc/cpu/tree_gate_products.cpp: COLUMNS is room for the nodes and leaves of a branch, TILE the
# number of tokens multiplied at a time.
COLUMNS, TILE = 32, 256

# With large P and T, skipping products saves time if tokens reach on average at most the share WORTH of the branches.
# With small P or T the share is smaller: multiplying a token by a branch takes as long as if x had OVERHEAD more
# columns, and packing the weights of a branch as long as PACKING more tokens. _reach tries up to SAMPLE tokens first.
WORTH, OVERHEAD, PACKING, SAMPLE = 0.36, 50, 25, 256


def tree_gate_logits(native, x, split_weight, leaf_weight, split_bias, leaf_bias, gamma) -> tuple[Tensor, Tensor]:
    above = _nodes_above(leaf_weight)
    top_weight, top_bias = split_weight[:, :above], None if split_bias is None else split_bias[:, :above]
    others = split_weight, leaf_weight, split_bias, leaf_bias
    found = _reach(native, lambda step: _logits(native, x[::step], top_weight, top_bias), x, others, above, gamma)
    if found is None:
        return _logits(native, x, split_weight, split_bias), _logits(native, x, leaf_weight, leaf_bias)
    dtype = compute_dtype(x.dtype)
    split, leaf = (native.fresh((x.shape[0], *weight.shape[:2]), dtype) for weight in (split_weight, leaf_weight))
    biases = [
        weight.new_zeros(weight.shape[:2], dtype=dtype) if bias is None else bias.to(dtype).contiguous()
        for weight, bias in ((split_weight, split_bias), (leaf_weight, leaf_bias))
    ]
    results = ((each, dtype) for each in biases)
    _run(native, "tree_products_fwd", x, split_weight, leaf_weight, split, leaf, found, results)
    split[:, :, :above] = found.top
    return split.to(x.dtype), leaf.to(x.dtype)


def tree_gate_logits_bwd(
    native, dsplit, dleaf, split_logits, x, split_weight, leaf_weight, gamma, wants
) -> tuple[Tensor, Tensor, Tensor]:
    above = _nodes_above(leaf_weight)
    weights = split_weight, leaf_weight
    found = _reach(native, lambda step: split_logits[::step, :, :above], x, weights, above, gamma)
    if found is None:
        grads = torch.cat([dsplit.flatten(1), dleaf.flatten(1)], 1)
        dx = (
            _product(native, grads, torch.cat([each.flatten(0, 1) for each in weights])) if wants[0] else x.new_empty(0)
        )
        dsplit_weight, dleaf_weight = (
            _gradient(native, each, x) if wanted else x.new_empty(0)
            for each, wanted in zip((dsplit, dleaf), wants[1:], strict=True)
        )
        return dx, dsplit_weight, dleaf_weight
    dtype = compute_dtype(x.dtype)
    top, top_weight = dsplit[:, :, :above].to(dtype), split_weight[:, :above].to(dtype)
    dx = _product(native, top.flatten(1), top_weight.flatten(0, 1)) if wants[0] else x.new_empty(0, dtype=dtype)
    dsplit_weight, dleaf_weight = (
        native.fresh(each.shape if wanted else (0,), dtype) for each, wanted in zip(weights, wants[1:], strict=True)
    )
    if wants[1]:
        dsplit_weight[:, :above] = _gradient(native, top, x.to(dtype))
    results = dx, dsplit_weight, dleaf_weight
    pointers = ((each if each.numel() else None, dtype) for each in results)
    _run(native, "tree_products_bwd", x, *weights, dsplit, dleaf, found, pointers)
    return dx.to(x.dtype), dsplit_weight.to(x.dtype), dleaf_weight.to(x.dtype)


def _logits(native: ModuleType, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (T, P), weight (K, N, P), bias (K, N) -> (T, K, N), for N nodes or leaves of each of K trees."""
    flat = _product(native, x, weight.flatten(0, 1).t(), None if bias is None else bias.contiguous().view(1, -1))
    return flat.view(x.shape[0], *weight.shape[:2])


def _product(native: ModuleType, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (T, P), weight (P, N), bias (1, N) -> (T, N)"""
    operands = contiguous_rows(x), contiguous_matrices(weight[None]), all_rows(x)
    return grouped_gemm_fwd(native, *operands, None, bias, "", False)[0]


def _gradient(native: ModuleType, grad: Tensor, x: Tensor) -> Tensor:
    """grad (T, K, N), x (T, P) -> (K, N, P), the gradient to the weight of _logits."""
    flat, _ = grouped_gemm_bwd_weight(
        native, contiguous_rows(grad.flatten(1)), contiguous_rows(x), all_rows(x), None, None, False
    )
    return flat.view(*grad.shape[1:], x.shape[1])


def _nodes_above(leaf_weight: Tensor) -> int:
    """Number of a tree's top nodes, above the branches; 0 if the tree is not divided.

    A branch is a subtree of at most four levels of nodes, and their leaves. Trees of up to 32 experts are not divided:
    they would have at most two branches. Trees of over 1024 experts are not divided either: they would have more than
    64 branches, but tree_reach keeps the branches that a token reaches in 64 bits.
    """
    levels = (leaf_weight.shape[1] - 1).bit_length() - 4
    return 2**levels - 1 if 1 < levels <= 6 else 0


class _Reach(NamedTuple):
    """top: pre-activations of the top nodes. token: the tokens that reach each branch, branch by branch. offsets: where
    each branch starts in `token`, and where the last one ends."""

    top: Tensor
    offsets: Tensor
    token: Tensor


def _reach(native, top_of, x, others, above, gamma) -> _Reach | None:
    """The tokens that reach each branch, or None if all products should be computed.

    All are computed if skipping saves no time, which a sample of tokens may show, or if a skipped product could be NaN:
    NaN in a node that a token cannot reach makes all gates of the token NaN in the definition. All are computed in the
    mode batch_invariant too, as the other tokens must not decide.

    Args:
        top_of: top_of(step) returns the pre-activations of the top nodes for every step-th token.
        others: the weights and, in forward, the biases (or None).
    """
    tokens, dim = x.shape
    worth = WORTH * dim / (dim + OVERHEAD) - PACKING / max(tokens, 1)
    if above == 0 or worth <= 0 or is_fixed():
        return None
    step = -(-tokens // SAMPLE)
    if step > 1 and _reached(native, top_of(step), gamma, worth) is None:
        return None
    return _reached(native, top_of(1), gamma, worth) if _are_finite(x, others) else None


def _reached(native: ModuleType, top: Tensor, gamma: float, worth: float) -> _Reach | None:
    wide_top = top.to(compute_dtype(top.dtype))
    tokens, trees, above = top.shape
    branches = trees * (above + 1)
    offsets = torch.empty(branches + 1, dtype=torch.int32, device="cpu")
    token = offsets.new_empty(tokens * branches)
    bits = offsets.new_empty((trees, tokens), dtype=torch.int64)
    native.call(
        "tree_reach", wide_top, wide_top.dtype, (wide_top, wide_top.dtype), wide_top.stride(0),
        wide_top.stride(1), gamma, tokens, trees, above.bit_length(), (bits, torch.int64),
        (offsets, torch.int32), (token, torch.int32),
    )  # fmt: skip
    return _Reach(top, offsets, token) if offsets[-1] <= worth * tokens * branches else None


def _are_finite(x: Tensor, others: tuple[Tensor | None, ...]) -> bool:
    """Whether a bound shows that no product of x with a weight, plus a bias, is NaN or overflows the compute dtype."""
    largest, *of = [sum(abs(float(end)) for end in torch.aminmax(each)) for each in (x, *others) if each is not None]
    return largest * x.shape[1] * sum(of[:2]) + sum(of[2:]) < torch.finfo(compute_dtype(x.dtype)).max


def _run(native, name, x, split_weight, leaf_weight, split, leaf, found, results) -> None:
    dtype, (tokens, dim), (trees, experts, _) = compute_dtype(x.dtype), x.shape, leaf_weight.shape
    x = contiguous_rows(x.to(dtype))
    pairs = [each.to(dtype).contiguous() for each in (split_weight, leaf_weight, split, leaf)]
    # scratch, of each thread: the weights of a branch or their gradient, and two blocks of logits or their gradients.
    # packed: the weights of all branches.
    branches, stride = found.offsets.shape[0] - 1, COLUMNS * (dim + 2 * TILE)
    scratch = x.new_empty((native.chunks(x.numel()), stride))
    packed = native.fresh((branches, -(-dim // COLUMNS) * COLUMNS * COLUMNS), dtype)
    native.call(
        name, x, dtype, (x, dtype), x.stride(0), *((each, dtype) for each in pairs),
        (found.offsets, torch.int32), (found.token, torch.int32), (packed, dtype), (scratch, dtype),
        stride, tokens, dim, trees, experts, (branches // trees).bit_length() - 1, *results, passes=trees * experts,
    )  # fmt: skip
