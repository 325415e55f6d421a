"""The tree gate, and the descent for inference."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import backends
from moe_kernels.library._define import define, no_flops, wide


def products(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x (T, P), weight (K, N, P), bias (K, N) -> (T, K, N)"""
    factors, flat = (x, weight.flatten(0, 1).t()), None if out is None else out.flatten(1)
    flat = torch.mm(*factors, out=flat) if bias is None else torch.addmm(bias.flatten(), *factors, out=flat)
    return flat.view(x.shape[0], weight.shape[0], weight.shape[1])


def products_gradients(
    dsplit: Tensor, dleaf: Tensor, x: Tensor, split_weight: Tensor, leaf_weight: Tensor, results: list[Tensor]
) -> None:
    """Gradients to x and to both weights into `results`, but for those that are empty."""
    of_split, of_leaf = dsplit.flatten(1), dleaf.flatten(1)
    dx, dsplit_weight, dleaf_weight = results
    if dx.numel():
        torch.mm(of_split, split_weight.flatten(0, 1), out=dx)
        torch.addmm(dx, of_leaf, leaf_weight.flatten(0, 1), out=dx)
    for grad, dweight in ((of_split, dsplit_weight), (of_leaf, dleaf_weight)):
        if dweight.numel():
            torch.mm(grad.t(), x, out=dweight.flatten(0, 1))


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
    if hasattr(kernels, "tree_gate_logits"):
        logits = kernels.tree_gate_logits(x, split_weight, leaf_weight, split_bias, leaf_bias, gamma)
    else:
        logits = products(x, split_weight, split_bias), products(x, leaf_weight, leaf_bias)
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


def _tree_gate_logits_bwd(
    dsplit: Tensor,
    dleaf: Tensor,
    split_logits: Tensor,
    x: Tensor,
    split_weight: Tensor,
    leaf_weight: Tensor,
    gamma: float,
    wants: list[bool],
    backend: str,
):
    kernels = backends.load(backend, "tree_gate")
    if hasattr(kernels, "tree_gate_logits_bwd"):
        return kernels.tree_gate_logits_bwd(dsplit, dleaf, split_logits, x, split_weight, leaf_weight, gamma, wants)
    results = _wanted(x, split_weight, leaf_weight, wants)
    products_gradients(dsplit, dleaf, x, split_weight, leaf_weight, list(results))
    return results


def _wanted(x: Tensor, split_weight: Tensor, leaf_weight: Tensor, wants: list[bool]) -> tuple[Tensor, ...]:
    """Room for a gradient to each, nothing for those that nobody wants."""
    given = zip((x, split_weight, leaf_weight), wants, strict=True)
    return tuple(x.new_empty(each.shape if wanted else 0) for each, wanted in given)


def _tree_gate_logits_bwd_fake(dsplit, dleaf, split_logits, x, split_weight, leaf_weight, gamma, wants, backend):
    return _wanted(x, split_weight, leaf_weight, wants)


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


def _tree_gate_logits_bwd_flops(
    dsplit, dleaf, split_logits, x, split_weight, leaf_weight, gamma, wants, *rest, **kwargs
) -> int:
    num_trees, num_experts, dim = leaf_weight
    split, leaf = (2 * x[0] * dim * num_trees * nodes for nodes in (num_experts - 1, num_experts))
    return wants[0] * (split + leaf) + wants[1] * split + wants[2] * leaf


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
    "tree_gate_logits_bwd(Tensor dsplit, Tensor dleaf, Tensor split_logits, Tensor x, Tensor split_weight, "
    "Tensor leaf_weight, float gamma, bool[] wants, str backend) -> (Tensor, Tensor, Tensor)",
    _tree_gate_logits_bwd,
    _tree_gate_logits_bwd_fake,
    _tree_gate_logits_bwd_flops,
)
define(
    f"tree_route_fwd({_TREE}, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _tree_route_fwd,
    _tree_route_fwd_fake,
    _tree_route_flops,
)
