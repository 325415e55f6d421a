"""The smooth-step tree gate, by definition: probabilities level by level, one softmax over the leaves of all trees.

Each of the K trees has E - 1 nodes in heap order (node q has the left child 2 q + 1 and the right child 2 q + 2) and E
leaves. The leaves from left to right are the experts; if E is not a power of two, the deeper leaves are the left-most.
Equations: moe_kernels/ops/tree_gate.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def smooth_step(t: Tensor, gamma: float) -> Tensor:
    """h(t): 0 up to -gamma/2, 1 from gamma/2 on, u^2 (3 - 2 u) between, with u = (t + gamma/2) / gamma. Elementwise.

    In this form h is accurate near t = -gamma/2, where the terms of the expanded cubic cancel.
    """
    t_promoted = _promoted(t)
    u = ((t_promoted + gamma / 2) / gamma).clamp(0, 1)
    return torch.where(t_promoted >= gamma / 2, 1, u * u * (3 - 2 * u)).to(t.dtype)


def tree_probabilities(split_logits: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """split_logits (..., E-1) in heap order -> probabilities of reaching each node (..., E-1) and leaf (..., E)."""
    left, right = smooth_step(split_logits, gamma), smooth_step(-split_logits, gamma)
    level, nodes, start = left.new_ones(*left.shape[:-1], 1), [], 0
    while start < left.shape[-1]:
        inner = level[..., : left.shape[-1] - start]
        columns = slice(start, start := start + inner.shape[-1])
        nodes.append(inner)
        children = torch.stack([inner * left[..., columns], inner * right[..., columns]], -1).flatten(-2)
        level = torch.cat([children, level[..., inner.shape[-1] :]], -1)  # the other entries of the level are leaves
    return torch.cat(nodes, -1), level


def tree_softmax(leaf_logits: Tensor, leaf_probs: Tensor, parity: str | None = None) -> Tensor:
    """Joint softmax of leaf_logits + log p over trees and leaves, summed over trees: (..., K, E) -> (..., E).

    p are the leaf probabilities. Without `parity` the terms are computed as p exp(leaf_logits), and leaves with p below
    the smallest normal number are left out, so that a gate's derivative with respect to p, at most 1 / p, is finite.
    parity "tf" and "bert" compute log p as the authors' TensorFlow and BERT code do (see moe_kernels/ops/tree_gate.py).
    """
    if parity is not None:
        dropped, epsilon = (leaf_probs <= 0, 1e-8) if parity == "tf" else (leaf_probs < 1e-5, 1e-6)
        least = torch.finfo(leaf_probs.dtype).min if parity == "tf" else -torch.inf
        p = (leaf_probs + epsilon).log().masked_fill(dropped, least)
        logits = leaf_logits.masked_fill(dropped, 0)  # +inf or NaN of a dropped leaf would make all gates NaN
        return (logits + p).flatten(-2).softmax(-1).view(leaf_logits.shape).sum(-2)
    reachable = leaf_logits.masked_fill(leaf_probs < torch.finfo(leaf_probs.dtype).tiny, -torch.inf)
    weights = leaf_probs * (reachable - reachable.detach().amax((-2, -1), keepdim=True)).exp()
    return weights.sum(-2) / weights.sum((-2, -1))[..., None]


def tree_gate(
    x: Tensor,
    split_weight: Tensor,
    leaf_weight: Tensor,
    *,
    gamma: float,
    split_bias: Tensor | None = None,
    leaf_bias: Tensor | None = None,
    parity: str | None = None,
) -> tuple[Tensor, Tensor]:
    """x (T, P), split_weight (K, E-1, P), leaf_weight (K, E, P) -> gates (T, E), leaf_probs (T, K, E)."""
    _, leaf_probs = tree_probabilities(_logits(x, split_weight, split_bias), gamma)
    gates = tree_softmax(_logits(x, leaf_weight, leaf_bias), leaf_probs, parity)
    return gates.to(x.dtype), leaf_probs.to(x.dtype)


class RouteStatistics(NamedTuple):
    """Statistics of tree_route, (T, K) each.

    visited (int32): number of inner nodes at least as likely as the chosen leaf. unsaturated (bool): whether the smooth
    step is neither 0 nor 1 at one of these nodes.
    """

    visited: Tensor
    unsaturated: Tensor


@torch.no_grad()
def tree_route(
    x: Tensor,
    split_weight: Tensor,
    leaf_weight: Tensor,
    *,
    gamma: float,
    split_bias: Tensor | None = None,
    leaf_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, RouteStatistics]:
    """Weights (T, K), experts (T, K) and statistics: each tree's likeliest leaf, of equally likely ones the left-most.

    weights = softmax of the logits of the K leaves. An expert that several trees chose keeps its first column, with the
    sum of its weights; its other columns get weight 0 and expert -1. At a node whose pre-activation is NaN the token
    goes left; if `visited` counts the node, the token's weights are NaN, except in columns with expert -1.
    """
    split_logits = _logits(x, split_weight, split_bias)
    is_nan = split_logits.isnan()
    split_logits = split_logits.masked_fill(is_nan, torch.inf)
    node_probs, leaf_probs = tree_probabilities(split_logits, gamma)
    highest, leaves = leaf_probs.sort(dim=-1, descending=True, stable=True)
    experts, visited = leaves[..., 0], node_probs >= highest[..., :1]
    undecided = (smooth_step(split_logits, gamma) > 0) & (smooth_step(-split_logits, gamma) > 0)
    logits = _logits(x, leaf_weight, leaf_bias).gather(-1, experts[..., None])[..., 0]
    weights = logits.masked_fill((visited & is_nan).any(-1), torch.nan).softmax(-1)
    equal = experts[:, :, None] == experts[:, None, :]
    repeated = equal.tril(-1).any(-1)
    weights = (equal * weights[:, None, :]).sum(-1).masked_fill(repeated, 0)
    statistics = RouteStatistics(visited.sum(-1, dtype=torch.int32), (visited & undecided).any(-1))
    return weights.to(x.dtype), experts.masked_fill(repeated, -1).to(torch.int32), statistics


def _promoted(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (T, P) and weight (K, N, P) -> (T, K, N)."""
    product = F.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
    return _promoted(product).unflatten(-1, weight.shape[:2])
