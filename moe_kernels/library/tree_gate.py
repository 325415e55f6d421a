"""The tree gate, and the descent for inference."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import backends
from moe_kernels.library._define import define, no_flops, wide


def _products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (T, P), weight (K, N, P), bias (K, N) -> (T, K, N)"""
    flat = torch.nn.functional.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
    return flat.view(x.shape[0], weight.shape[0], weight.shape[1])


def _tree_gate_fwd(
    x: Tensor,
    split_weight: Tensor,
    leaf_weight: Tensor,
    split_bias: Tensor | None,
    leaf_bias: Tensor | None,
    gamma: float,
    mode: str,
    backend: str,
):
    kernels = backends.load(backend, "tree_gate")
    fits = getattr(kernels, "tree_gate_fits", None)
    if fits is not None and fits(x, split_weight, leaf_weight):
        return kernels.tree_gate_fused_fwd(x, split_weight, leaf_weight, split_bias, leaf_bias, gamma, mode)
    logits = _products(x, split_weight, split_bias), _products(x, leaf_weight, leaf_bias)
    return *kernels.tree_gate_fwd(*logits, gamma, mode), *logits


def _tree_gate_fwd_fake(x, split_weight, leaf_weight, *rest):
    num_tokens, (num_trees, num_experts, _) = x.shape[0], leaf_weight.shape
    gates = x.new_empty((num_tokens, num_experts), dtype=wide(x.dtype))
    leaf_logits = x.new_empty((num_tokens, num_trees, num_experts))
    split_logits = x.new_empty((num_tokens, num_trees, num_experts - 1))
    return gates, gates.new_empty(leaf_logits.shape), split_logits, leaf_logits


def _tree_gate_bwd(
    grad_gates: Tensor,
    grad_leaf_probs: Tensor | None,
    split_logits: Tensor,
    leaf_logits: Tensor,
    gamma: float,
    mode: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    kernels = backends.load(backend, "tree_gate")
    return kernels.tree_gate_bwd(grad_gates, grad_leaf_probs, split_logits, leaf_logits, gamma, mode)


def _tree_route_fwd(
    x: Tensor,
    split_weight: Tensor,
    leaf_weight: Tensor,
    split_bias: Tensor | None,
    leaf_bias: Tensor | None,
    gamma: float,
    backend: str,
):
    kernels = backends.load(backend, "tree_route")
    return kernels.tree_route_fwd(x, split_weight, leaf_weight, split_bias, leaf_bias, gamma)


def _tree_route_fwd_fake(x, split_weight, *rest):
    shape = x.shape[0], split_weight.shape[0]
    dtypes = (wide(x.dtype), torch.int32, torch.int32, torch.bool)
    return tuple(x.new_empty(shape, dtype=dtype) for dtype in dtypes)


def _tree_gate_flops(x, split_weight, leaf_weight, *rest, **kwargs) -> int:
    num_trees, num_experts, dim = leaf_weight
    return 2 * x[0] * dim * num_trees * (2 * num_experts - 1)


def _tree_route_flops(x, split_weight, leaf_weight, *rest, **kwargs) -> int:
    num_trees, num_experts, dim = leaf_weight
    return 2 * x[0] * dim * num_trees * ((num_experts - 1).bit_length() + 1)


_TREE = "Tensor x, Tensor split_weight, Tensor leaf_weight, Tensor? split_bias, Tensor? leaf_bias, float gamma"

define(
    f"tree_gate_fwd({_TREE}, str mode, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _tree_gate_fwd,
    _tree_gate_fwd_fake,
    _tree_gate_flops,
)
define(
    "tree_gate_bwd(Tensor grad_gates, Tensor? grad_leaf_probs, Tensor split_logits, Tensor leaf_logits, float gamma, "
    "str mode, str backend) -> (Tensor, Tensor)",
    _tree_gate_bwd,
    lambda grad_gates, grad_leaf_probs, *logits_and_rest: tuple(map(torch.empty_like, logits_and_rest[:2])),
    no_flops,
)
define(
    f"tree_route_fwd({_TREE}, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _tree_route_fwd,
    _tree_route_fwd_fake,
    _tree_route_flops,
)
