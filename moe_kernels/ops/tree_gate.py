"""The tree gate: K soft binary trees of smooth steps, and one softmax over the leaves of all of them.

    h(t) = 0 if t <= -g/2,  1 if t >= g/2,  else u^2 (3 - 2 u), u = t/g + 1/2, g = gamma (COMET trees, corrected eq. 9)
    s_kn = <split_weight_kn, x> + split_bias_kn        for node n = 0 .. E-2 of tree k, in heap order: s (T, K, E-1)
    p_ke = product of h(s) or h(-s) over the nodes above leaf e, h(s) where the path goes left:     p (T, K, E)
    a_ke = <leaf_weight_ke, x> + leaf_bias_ke                                                       a (T, K, E)
    q_ke = p_ke exp(a_ke) / (sum over all trees and leaves of p exp(a))                             q (T, K, E)
    gates_e = sum over k of q_ke                                                   (COMET trees, eq. 3) gates (T, E)

Backward, from the gradients dgates and dp (of leaf_probs, that is p). L and R are the sums of da_ke + p_ke dp_ke over
the leaves under the left and the right child of node n:

    da_ke = q_ke (dgates_e - <gates, dgates>),   ds_kn = L h'(s) / h(s) - R h'(s) / h(-s)

Saved for backward: x, the weights, s and a; a kernel computes p again. Kernels compute h'/h as
6 (1 - u) / (g u (3 - 2 u)), or 0 where the node is saturated (h is 0 or 1), so that gradients are finite. A leaf
whose p is subnormal is not in the softmax. The argument `parity` of tree_gate instead adds an epsilon of 1e-8 or 1e-6:
then p + epsilon replaces p in the softmax, and da p / (p + epsilon) replaces da in L and R. Backend "cpu" may skip s
and a of unreachable nodes and leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import python_ref.tree_gate as reference
from moe_kernels import backends
from moe_kernels.backends import mark
from moe_kernels.ops import _checks
from moe_kernels.ops._autocast import without_autocast
from moe_kernels.ops._checks import FLOATING, check_choice, check_fits, check_positive, check_rank, check_tensor
from moe_kernels.ops._define import define, gradient_like, no_flops, no_second_derivative, operators
from moe_kernels.ops.grouped_gemm import fixed_product
from moe_kernels.sizes import compute_dtype, contiguous, is_fixed
from python_ref.tree_gate import RouteStatistics

PARITIES = (None, "tf", "bert")
MODES = ("", "tf", "bert")  # the same for operators

# Smallest normal number of each compute dtype. If gamma is from this number to its inverse, 1 / gamma is normal too.
_TINY = {dtype: torch.finfo(dtype).tiny for dtype in (torch.float32, torch.float64)}


def _check(op, x, split_weight, leaf_weight, gamma, split_bias, leaf_bias) -> float:
    """gamma as a float; raises unless dtypes, shapes and devices of the other arguments fit."""
    check_tensor(op, "x", x, FLOATING)
    check_rank(op, "x", x, "(T, P)")
    check_rank(op, "split_weight", split_weight, "(K, E-1, P)")
    (num_trees, num_nodes, _), dim = split_weight.shape, x.shape[1]
    if num_trees < 1 or num_nodes < 1 or split_weight.shape[2] != dim:
        raise ValueError(
            f"{op}: split_weight must be (K, E-1, P) with K >= 1 trees, E >= 2 experts and P = {dim} as x has; "
            f"got shape {tuple(split_weight.shape)}"
        )
    check_fits(op, "split_weight", split_weight, split_weight.shape, "(K, E-1, P)", "x", x)
    check_fits(op, "leaf_weight", leaf_weight, (num_trees, num_nodes + 1, dim), "(K, E, P)", "x", x)
    if split_bias is not None:
        check_fits(op, "split_bias", split_bias, (num_trees, num_nodes), "(K, E-1)", "x", x)
    if leaf_bias is not None:
        check_fits(op, "leaf_bias", leaf_bias, (num_trees, num_nodes + 1), "(K, E)", "x", x)
    return _check_gamma(op, gamma, x.dtype)


def _check_gamma(op: str, gamma: object, dtype: torch.dtype) -> float:
    """gamma as a float; raises unless gamma and 1 / gamma are normal numbers of the compute dtype of `dtype`."""
    number, computed = check_positive(op, "gamma", gamma), compute_dtype(dtype)
    low = _TINY[computed]
    if not low <= number <= 1 / low:
        raise ValueError(
            f"{op}: gamma must be above 0 and finite in {str(computed).removeprefix('torch.')}, from {low:.4g} to "
            f"{1 / low:.4g} (so that 1 / gamma is a normal number too); got {number}"
        )
    return number


def _check_tree(op, x, split_weight, leaf_weight, split_bias=None, leaf_bias=None) -> tuple[int, int, int]:
    """T, K and E, for an operator."""
    tokens, dim = _checks.floating(op, "x", x, 2)
    trees, experts, _ = _checks.shape_of(op, "leaf_weight", leaf_weight, 3)
    if trees < 1 or experts < 2:
        raise ValueError(f"{op}: leaf_weight must be (K, E, P) with K >= 1, E >= 2; got {tuple(leaf_weight.shape)}")
    for name, each, nodes in (("split", split_weight, experts - 1), ("leaf", leaf_weight, experts)):
        bias = split_bias if name == "split" else leaf_bias
        _checks.expect(op, f"{name}_weight", each, (trees, nodes, dim), x.dtype, x)
        _checks.expect(op, f"{name}_bias", bias, (trees, nodes), x.dtype, x)
    return tokens, trees, experts


def _check_fwd(op, x, split_weight, leaf_weight, split_bias, leaf_bias, gamma, mode, backend) -> None:
    _check_tree(op, x, split_weight, leaf_weight, split_bias, leaf_bias)
    _check_gamma(op, gamma, x.dtype)
    _checks.one_of(op, "mode", mode, MODES)


def _check_route(op, x, split_weight, leaf_weight, split_bias, leaf_bias, gamma, backend) -> None:
    _check_fwd(op, x, split_weight, leaf_weight, split_bias, leaf_bias, gamma, "", backend)


def _check_bwd(op, grad_gates, grad_leaf_probs, split_logits, leaf_logits, gamma, mode, backend) -> None:
    tokens, trees, experts = _checks.floating(op, "leaf_logits", leaf_logits, 3)
    if trees < 1 or experts < 2:
        raise ValueError(f"{op}: leaf_logits must be (T, K, E), K >= 1, E >= 2; got {tuple(leaf_logits.shape)}")
    dtype = results_dtype(leaf_logits.dtype, backend)
    _checks.expect(op, "split_logits", split_logits, (tokens, trees, experts - 1), leaf_logits.dtype, leaf_logits)
    _checks.expect(op, "grad_gates", grad_gates, (tokens, experts), dtype, leaf_logits)
    _checks.expect(op, "grad_leaf_probs", grad_leaf_probs, leaf_logits.shape, dtype, leaf_logits)
    _check_gamma(op, gamma, leaf_logits.dtype)
    _checks.one_of(op, "mode", mode, MODES)


def _check_logits_bwd(op, dsplit, dleaf, split_logits, x, split_weight, leaf_weight, gamma, wants, backend) -> None:
    tokens, trees, experts = _check_tree(op, x, split_weight, leaf_weight)
    for name, each, nodes in (
        ("dsplit", dsplit, experts - 1),
        ("dleaf", dleaf, experts),
        ("split_logits", split_logits, experts - 1),
    ):
        _checks.expect(op, name, each, (tokens, trees, nodes), x.dtype, x)
    _check_gamma(op, gamma, x.dtype)
    _checks.flags(op, "wants", wants, 3)


def products(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """<weight_kn, x_t> + bias_kn by torch, for N nodes or leaves of each of K trees.

    x (T, P), weight (K, N, P), bias (K, N) -> (T, K, N)
    """
    factors, flat = (x, weight.flatten(0, 1).t()), None if out is None else out.flatten(1)
    flat = torch.mm(*factors, out=flat) if bias is None else torch.addmm(bias.flatten(), *factors, out=flat)
    return flat.view(x.shape[0], weight.shape[0], weight.shape[1])


def _fixed_products(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    """As `products`, in an order of sums that does not depend on T."""
    stored, flat = weight.flatten(0, 1)[None], None if bias is None else bias.contiguous().view(1, -1)
    return fixed_product(x, stored.transpose(1, 2), flat, backend).view(x.shape[0], *weight.shape[:2])


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


def tree_gate_fwd(x, split_weight, leaf_weight, split_bias, leaf_bias, gamma, mode, backend):
    kernels = backends.load(backend, "tree_gate")
    fits = getattr(kernels, "tree_gate_fits", None)
    if fits is not None and fits(x, split_weight, leaf_weight):
        return kernels.tree_gate_fused_fwd(x, split_weight, leaf_weight, split_bias, leaf_bias, gamma, mode)
    if hasattr(kernels, "tree_gate_logits"):
        logits = kernels.tree_gate_logits(x, split_weight, leaf_weight, split_bias, leaf_bias, gamma)
    elif is_fixed():
        given = (split_weight, split_bias), (leaf_weight, leaf_bias)
        logits = tuple(_fixed_products(x, weight, bias, backend) for weight, bias in given)
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


def tree_gate_bwd(
    grad_gates, grad_leaf_probs, split_logits, leaf_logits, gamma, mode, backend
) -> tuple[Tensor, Tensor]:
    given = contiguous(grad_gates, grad_leaf_probs, split_logits, leaf_logits)
    return backends.load(backend, "tree_gate").tree_gate_bwd(*given, gamma, mode)


def tree_gate_logits_bwd(dsplit, dleaf, split_logits, x, split_weight, leaf_weight, gamma, wants, backend):
    kernels = backends.load(backend, "tree_gate")
    dsplit, dleaf, split_logits = contiguous(dsplit, dleaf, split_logits)
    if hasattr(kernels, "tree_gate_logits_bwd"):
        return kernels.tree_gate_logits_bwd(dsplit, dleaf, split_logits, x, split_weight, leaf_weight, gamma, wants)
    if is_fixed() and wants[0]:
        grads, weights = torch.cat([dsplit, dleaf], 2), torch.cat([split_weight, leaf_weight], 1)
        given = dsplit, dleaf, split_logits, x, split_weight, leaf_weight, gamma, [False, *wants[1:]], backend
        dx = fixed_product(grads.flatten(1), weights.flatten(0, 1)[None], None, backend)
        return dx, *tree_gate_logits_bwd(*given)[1:]
    results = _wanted(x, split_weight, leaf_weight, wants=wants)
    products_gradients(dsplit, dleaf, x, split_weight, leaf_weight, list(results))
    return results


def _wanted(*sources: Tensor, wants: Sequence[bool] = (True, True)) -> tuple[Tensor, ...]:
    return tuple(gradient_like(each, wanted) for each, wanted in zip(sources, wants, strict=True))


def _tree_gate_logits_bwd_fake(dsplit, dleaf, split_logits, x, split_weight, leaf_weight, gamma, wants, backend):
    return _wanted(x, split_weight, leaf_weight, wants=wants)


def tree_route_fwd(x, split_weight, leaf_weight, split_bias, leaf_bias, gamma, backend):
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
    tree_gate_fwd,
    _tree_gate_fwd_fake,
    _tree_gate_flops,
    check=_check_fwd,
    save=_save,
    backward=_backward,
)
define(
    "tree_gate_bwd(Tensor grad_gates, Tensor? grad_leaf_probs, Tensor split_logits, Tensor leaf_logits, float gamma, "
    "str mode, str backend) -> (Tensor, Tensor)",
    tree_gate_bwd,
    lambda grad_gates, grad_leaf_probs, *logits_and_rest: tuple(
        gradient_like(each, True) for each in logits_and_rest[:2]
    ),
    no_flops,
    check=_check_bwd,
    backward=no_second_derivative("tree_gate"),
)
define(
    "tree_gate_logits_bwd(Tensor dsplit, Tensor dleaf, Tensor split_logits, Tensor x, Tensor split_weight, "
    "Tensor leaf_weight, float gamma, bool[] wants, str backend) -> (Tensor, Tensor, Tensor)",
    tree_gate_logits_bwd,
    _tree_gate_logits_bwd_fake,
    _tree_gate_logits_bwd_flops,
    check=_check_logits_bwd,
    backward=no_second_derivative("tree_gate"),
)
define(
    f"tree_route_fwd({_TREE}, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    tree_route_fwd,
    _tree_route_fwd_fake,
    _tree_route_flops,
    check=_check_route,
)


def smooth_step(t: Tensor, gamma: float, *, backend: str | None = None) -> Tensor:
    """h(t): 0 up to -gamma/2, 1 from gamma/2 on, and u^2 (3 - 2 u) between, with u = t/gamma + 1/2. Elementwise.

    Args:
        t: float32, bfloat16, float16 or float64, any shape.
        gamma: width of the step. gamma and 1 / gamma must be normal numbers of the dtype that h is computed in:
            from 1.2e-38 to 8.5e37 for float32.
        backend: "reference" or None.

    Returns:
        h in the dtype of t, computed in float32 (float64 stays). This form is accurate near -gamma/2, where the paper's
        expanded cubic cancels. NaN stays NaN.

    Gradient: to t, 6 u (1 - u) / gamma, exactly 0 at and beyond +-gamma/2.

    Raises:
        TypeError: a tensor or number has another type, dtype or layout, or torch.func or forward-mode AD is used.
        ValueError: gamma is out of range.
        BackendError: the named backend cannot run this.

    Source: COMET trees, eq. 9, whose middle interval is misprinted.

    Example:
        >>> mk.smooth_step(torch.tensor([-1.0, -0.25, 0.0, 0.5, 1.0]), gamma=1.0)
        tensor([0.0000, 0.1562, 0.5000, 1.0000, 1.0000])
    """
    check_tensor("smooth_step", "t", t, FLOATING)
    gamma = _check_gamma("smooth_step", gamma, t.dtype)
    backends.choose("smooth_step", backend, t)
    return reference.smooth_step(t, gamma)


def tree_gate(
    x: Tensor,
    split_weight: Tensor,
    leaf_weight: Tensor,
    *,
    gamma: float,
    split_bias: Tensor | None = None,
    leaf_bias: Tensor | None = None,
    parity: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Every expert's gate, and the probability of every leaf of every tree.

    Args:
        x: (T, P), float32, bfloat16 or float16 (float64 on "reference" and "cpu").
        split_weight: (K, E-1, P) in the dtype of x, nodes in heap order; E >= 2, K >= 1.
        leaf_weight: (K, E, P) in the dtype of x; leaf e, counted from the left, belongs to expert e. Leaves are the
            places E-1 .. 2E-2 of the heap. If E is not a power of two, the deeper leaves are those on the left.
        gamma: width of the smooth step, as for smooth_step: from 1.2e-38 to 8.5e37 unless x is float64.
        split_bias, leaf_bias: (K, E-1) and (K, E) in the dtype of x, or None.
        parity: the factor of exp(logit) in the softmax, from the leaf's probability p. None: p, as in eq. 3. As in the
            authors' code, "tf": p + 1e-8, or 0 where p = 0; "bert": p + 1e-6, or 0 where p < 1e-5. A leaf with factor 0
            is not in the softmax.
        backend: "reference", "cpu", "triton" or "cuda"; None: automatic choice (see moe_kernels.explain).

    Returns:
        gates (T, E), which sum to one over the experts, and leaf_probs (T, K, E), which sum to one over the leaves of a
        tree. A leaf that a token cannot reach, because a node above it is saturated (h is 0 or 1), has probability 0.
        Both are in the dtype of x, computed in float32 (float64 stays) from pre-activations in the dtype of x. A NaN
        among a token's split pre-activations, or among the logits of leaves in its softmax, makes its gates NaN.

    Gradient: to x, weights and biases, from gates and leaf_probs. Saturated nodes and unreachable leaves get exactly 0.
    Kernels are once differentiable and do not divide by probabilities. "reference" does: its gradients may become NaN
    or infinite if the leaves with the largest logits are hardly reached, so that all terms of the softmax,
    probability * exp(logit - largest logit), are below 1e-36. For a token with NaN gates, the gradient of a node or
    leaf is NaN or 0, depending on the backend. Autocast: runs in the dtype of its inputs. FLOPs of kernels (torch's
    counter): 2 T P K (2E - 1) for the products, twice as many backward if all gradients are needed. On a GPU torch.mm
    computes float32 products: in TF32 if torch.backends.cuda.matmul allows it, else IEEE.

    Raises:
        TypeError: a tensor or number has another type, dtype or layout, or torch.func or forward-mode AD is used.
        ValueError: shapes that do not fit, another device than that of x, gamma out of range, an unknown parity.
        BackendError: the named backend cannot run this.

    Source: COMET trees, eqs. 3 and 9; parity: the authors' TensorFlow and BERT code.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> split_weight = torch.tensor([[[2.0, 0.0]]])  # one tree with one node: K = 1, E = 2
        >>> leaf_weight = torch.zeros(1, 2, 2)
        >>> gates, leaf_probs = mk.tree_gate(x, split_weight, leaf_weight, gamma=1.0)
        >>> gates  # token 0 goes left for certain, token 1 half and half
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """
    gamma = _check("tree_gate", x, split_weight, leaf_weight, gamma, split_bias, leaf_bias)
    check_choice("tree_gate", "parity", parity, PARITIES)
    chosen = backends.choose("tree_gate", backend, x, split_weight)
    with without_autocast(x.device.type):
        if chosen == "reference":
            biases = {"split_bias": split_bias, "leaf_bias": leaf_bias}
            return reference.tree_gate(x, split_weight, leaf_weight, gamma=gamma, parity=parity, **biases)
        arguments = (x, split_weight, leaf_weight, split_bias, leaf_bias, gamma, parity or "", mark(chosen))
        gates, leaf_probs, _, _ = operators.tree_gate_fwd(*arguments)
        return gates.to(x.dtype), leaf_probs.to(x.dtype)


def tree_route(
    x: Tensor,
    split_weight: Tensor,
    leaf_weight: Tensor,
    *,
    gamma: float,
    split_bias: Tensor | None = None,
    leaf_bias: Tensor | None = None,
    statistics: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, RouteStatistics]:
    """One expert per tree, for inference: the likeliest leaf, of equally likely ones the left-most.

    Kernels search for this leaf from the root and need not compute all nodes. weights = softmax of the logits of the K
    leaves. If every node on the K paths is saturated, the weights are the gates of `tree_gate`, up to rounding;
    otherwise they approximate the gates.

    Args:
        x, split_weight, leaf_weight, gamma, split_bias, leaf_bias: as for tree_gate.
        statistics: whether to return RouteStatistics as well.
        backend: "reference", "cpu", "triton" or "cuda"; None: automatic choice (see moe_kernels.explain). GPU kernels
            take K up to 1024.

    Returns:
        weights (T, K) and experts (T, K) int32; column k belongs to tree k. Weights are in the dtype of x, computed in
        float32 (float64 stays). An expert that several trees chose appears once, in the first of their columns, with
        the sum of their weights; their other columns have weight 0 and expert -1.
        With statistics also RouteStatistics(visited, unsaturated), each (T, K). visited (int32) counts the nodes that
        the token reaches with at least the probability of the leaf: those on the leaf's path and, in unsaturated trees,
        perhaps others. unsaturated (bool) says whether one of these nodes was not saturated.
        At a node whose pre-activation is NaN the token goes left. If the node is one of those counted by `visited`, the
        token's weights are NaN, except in columns with expert -1.

    Gradient: none. FLOPs of kernels (torch's counter): 2 T P K (ceil(log2 E) + 1), as if all trees were saturated.

    Raises: as tree_gate.

    Source: COMET trees, section 3.2 (conditional inference), which does not define the result for unsaturated trees.

    Example:
        >>> x = torch.tensor([[1.0], [-1.0]])
        >>> split_weight = torch.tensor([[[2.0], [2.0], [2.0]]])  # one tree, three nodes, four experts
        >>> weights, experts = mk.tree_route(x, split_weight, torch.zeros(1, 4, 1), gamma=1.0)
        >>> weights, experts
        (tensor([[1.],
                [1.]]), tensor([[0],
                [3]], dtype=torch.int32))
    """
    gamma = _check("tree_route", x, split_weight, leaf_weight, gamma, split_bias, leaf_bias)
    chosen = backends.choose("tree_route", backend, x, split_weight)
    with without_autocast(x.device.type), torch.no_grad():
        if chosen == "reference":
            biases = {"split_bias": split_bias, "leaf_bias": leaf_bias}
            weights, experts, found = reference.tree_route(x, split_weight, leaf_weight, gamma=gamma, **biases)
        else:
            arguments = (x, split_weight, leaf_weight, split_bias, leaf_bias, gamma, chosen)
            weights, experts, visited, unsaturated = operators.tree_route_fwd(*arguments)
            found = RouteStatistics(visited, unsaturated)
    weights = weights.to(x.dtype)
    return (weights, experts, found) if statistics else (weights, experts)
