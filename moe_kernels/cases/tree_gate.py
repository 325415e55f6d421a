"""tree_gate and tree_route: K trees of E leaves each, on T tokens of P features."""

from __future__ import annotations

from functools import partial

import torch

from moe_kernels.cases.call import Call, Inputs, Shape, Shapes, normal, streamed
from moe_kernels.ops import tree_gate

LEAVES = ("x", "split_weight", "leaf_weight")
SATURATED = 1e-6  # gamma far below the pre-activations, which are about 1: nearly every split gives 0 or 1


def shapes(shape: Shape) -> Shapes:
    """The tensors of a call, biases only if `bias` is true, and the gradients of both results of tree_gate."""
    tokens, dim, experts, trees = (shape[name] for name in "TPEK")
    found = {"x": (tokens, dim), "split_weight": (trees, experts - 1, dim), "leaf_weight": (trees, experts, dim)}
    if shape.get("bias"):
        found |= {"split_bias": (trees, experts - 1), "leaf_bias": (trees, experts)}
    return found | {"grad_gates": (tokens, experts), "grad_leaf_probs": (tokens, trees, experts)}


def _inputs(shape: Shape, dtype: torch.dtype, device: str, gamma: float) -> Inputs:
    sizes = shapes(shape)
    del sizes["grad_leaf_probs"]
    scale = {"split_weight": shape["P"] ** 0.5, "leaf_weight": shape["P"] ** 0.5, "grad_gates": shape["T"]}
    drawn = normal(sizes, torch.float32, device)
    return {name: (each / scale.get(name, 1)).to(dtype) for name, each in drawn.items()} | {"gamma": gamma}


def _gate_bytes(shape: Shape, dtype: torch.dtype, direction: str) -> int:
    """Forward: x, weights -> gates, leaf probabilities. Backward: x, weights, gradient of gates -> three gradients."""
    leaf_probs = shape["T"] * shape["K"] * shape["E"] * dtype.itemsize
    return streamed(shapes, LEAVES, ("grad_gates",), shape, dtype, direction) + leaf_probs


def _route_bytes(shape: Shape, dtype: torch.dtype, direction: str) -> int:
    """x and the rows of the weights that the tokens can visit -> a weight and an expert for each token and tree."""
    tokens, dim, experts, trees = (shape[name] for name in "TPEK")
    visited = min(2 * experts - 1, tokens * ((experts - 1).bit_length() + 1))
    return dtype.itemsize * (tokens * dim + trees * visited * dim + tokens * trees) + 4 * tokens * trees


TREE_GATE = Call(
    tree_gate.tree_gate,
    ("gates", "leaf_probs"),
    LEAVES,
    ("split_bias", "leaf_bias"),
    ("grad_gates", "grad_leaf_probs"),
    partial(_inputs, gamma=1.0),
    _gate_bytes,
)
TREE_ROUTE = Call(
    tree_gate.tree_route, ("weights", "experts"), inputs=partial(_inputs, gamma=SATURATED), least_bytes=_route_bytes
)
