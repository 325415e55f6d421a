"""The tree gate and its gradients as operators, and tree_route, which computes one leaf per tree for inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_kernels import backends
from moe_kernels.ops._define import define, gradient_like, no_flops, no_second_derivative, operators
from moe_kernels.sizes import compute_dtype, contiguous


def products(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """<weight_kn, x_t> + bias_kn by torch, for N nodes or leaves of each of K trees.

    x (T, P), weight (K, N, P), bias (K, N) -> (T, K, N)
    """
    factors, flat = (x, weight.flatten(0, 1).t()), None if out is None else out.flatten(1)
    flat = torch.mm(*factors, out=flat) if bias is None else torch.addmm(bias.flatten(), *factors, out=flat)
    return flat.view(x.shape[0], weight.shape[0], weight.shape[1])


def products_gradients(dsplit, dleaf, x, split_weight, leaf_weight, results) -> None:
    """Writes the gradients to x, split_weight and leaf_weight into `results`, except into empty tensors."""
    of_split, of_leaf = dsplit.flatten(1), dleaf.flatten(1)
    dx, dsplit_weight, dleaf_weight = results
    if dx.numel():
        torch.mm(of_split, split_weight.flatten(0, 1), out=dx)
        torch.addmm(dx, of_leaf, leaf_weight.flatten(0, 1), out=dx)
    for grad, dweight in ((of_split, dsplit_weight), (of_leaf, dleaf_weight)):
        if dweight.numel():
            torch.mm(grad.t(), x, out=dweight.flatten(0, 1))


def results_dtype(dtype: torch.dtype, backend: str) -> torch.dtype:
    """Dtype of gates and leaf probabilities: `dtype`, that of x, if kernels round to it, else the compute dtype."""
    return dtype if getattr(backends.load(backend, "tree_gate"), "TREE_GATE_ROUNDS", False) else compute_dtype(dtype)


def _tree_gate_fwd(x, split_weight, leaf_weight, split_bias, leaf_bias, gamma, mode, backend):
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
    gates = x.new_empty((num_tokens, num_experts), dtype=results_dtype(x.dtype, rest[-1]))
    leaf_logits = x.new_empty((num_tokens, num_trees, num_experts))
    split_logits = x.new_empty((num_tokens, num_trees, num_experts - 1))
    return gates, gates.new_empty(leaf_logits.shape), split_logits, leaf_logits


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, split_weight, leaf_weight, _, _, *ctx.settings = inputs
    ctx.save_for_backward(x, split_weight, leaf_weight, *output[2:])


def _backward(ctx: Any, grad_gates, grad_leaf_probs, *grad_logits: Tensor | None) -> tuple[Tensor | None, ...]:
    x, *weights, split_logits, leaf_logits = ctx.saved_tensors
    gamma, _, backend = ctx.settings
    if grad_gates is None:
        shape = x.shape[0], leaf_logits.shape[2]
        grad_gates = leaf_logits.new_zeros(shape, dtype=results_dtype(x.dtype, backend))
    dlogits = operators.tree_gate_bwd(grad_gates, grad_leaf_probs, split_logits, leaf_logits, *ctx.settings)
    dlogits = [own if given is None else own + given for own, given in zip(dlogits, grad_logits, strict=True)]
    wanted = list(ctx.needs_input_grad[:5])
    found = operators.tree_gate_logits_bwd(*dlogits, split_logits, x, *weights, gamma, wanted[:3], backend)
    dproducts = (grad if needed else None for grad, needed in zip(found, wanted, strict=False))
    dbiases = (each.sum(0) if needed else None for each, needed in zip(dlogits, wanted[3:], strict=True))
    return *dproducts, *dbiases, None, None, None


def _tree_gate_bwd(
    grad_gates, grad_leaf_probs, split_logits, leaf_logits, gamma, mode, backend
) -> tuple[Tensor, Tensor]:
    given = contiguous(grad_gates, grad_leaf_probs, split_logits, leaf_logits)
    return backends.load(backend, "tree_gate").tree_gate_bwd(*given, gamma, mode)


def _tree_gate_logits_bwd(dsplit, dleaf, split_logits, x, split_weight, leaf_weight, gamma, wants, backend):
    kernels = backends.load(backend, "tree_gate")
    dsplit, dleaf, split_logits = contiguous(dsplit, dleaf, split_logits)
    if hasattr(kernels, "tree_gate_logits_bwd"):
        return kernels.tree_gate_logits_bwd(dsplit, dleaf, split_logits, x, split_weight, leaf_weight, gamma, wants)
    results = _wanted(x, split_weight, leaf_weight, wants=wants)
    products_gradients(dsplit, dleaf, x, split_weight, leaf_weight, list(results))
    return results


def _wanted(*sources: Tensor, wants: Sequence[bool] = (True, True)) -> tuple[Tensor, ...]:
    return tuple(gradient_like(each, wanted) for each, wanted in zip(sources, wants, strict=True))


def _tree_gate_logits_bwd_fake(dsplit, dleaf, split_logits, x, split_weight, leaf_weight, gamma, wants, backend):
    return _wanted(x, split_weight, leaf_weight, wants=wants)


def _tree_route_fwd(x, split_weight, leaf_weight, split_bias, leaf_bias, gamma, backend):
    kernels = backends.load(backend, "tree_route")
    return kernels.tree_route_fwd(x, split_weight, leaf_weight, split_bias, leaf_bias, gamma)


def _tree_route_fwd_fake(x, split_weight, *rest):
    shape = x.shape[0], split_weight.shape[0]
    dtypes = (compute_dtype(x.dtype), torch.int32, torch.int32, torch.bool)
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
    save=_save,
    backward=_backward,
)
define(
    "tree_gate_bwd(Tensor grad_gates, Tensor? grad_leaf_probs, Tensor split_logits, Tensor leaf_logits, float gamma, "
    "str mode, str backend) -> (Tensor, Tensor)",
    _tree_gate_bwd,
    lambda grad_gates, grad_leaf_probs, *logits_and_rest: tuple(
        gradient_like(each, True) for each in logits_and_rest[:2]
    ),
    no_flops,
    backward=no_second_derivative("tree_gate"),
)
define(
    "tree_gate_logits_bwd(Tensor dsplit, Tensor dleaf, Tensor split_logits, Tensor x, Tensor split_weight, "
    "Tensor leaf_weight, float gamma, bool[] wants, str backend) -> (Tensor, Tensor, Tensor)",
    _tree_gate_logits_bwd,
    _tree_gate_logits_bwd_fake,
    _tree_gate_logits_bwd_flops,
    backward=no_second_derivative("tree_gate"),
)
define(
    f"tree_route_fwd({_TREE}, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _tree_route_fwd,
    _tree_route_fwd_fake,
    _tree_route_flops,
)
