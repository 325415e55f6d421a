"""Benchmarks of the tree gate: the dense gate on half saturated trees, the route on saturated ones."""

from __future__ import annotations

import torch

import moe_kernels as mk
import python_ref.tree_gate as reference
from bench.entry import Calls, Entry, Inputs, Shape, through_autograd

LEAVES = ("x", "split_weight", "leaf_weight")
SATURATED = 1e-6  # gamma, of pre-activations of size 1


def _shape(tokens: int, dim: int, experts: int, trees: int) -> Shape:
    return {"T": tokens, "P": dim, "E": experts, "K": trees}


SHAPES = {
    "quick": [_shape(4096, 256, 64, 2), _shape(4096, 768, 256, 4)],
    "llm": [_shape(16384, 4096, 64, 1)],
    "papers": [
        _shape(16384, dim, experts, trees) for dim in (768, 4096) for experts in (8, 64, 256) for trees in (1, 4, 8)
    ],
    "aims": [_shape(16384, 768, 64, 1)],
    "scaling": [_shape(1024, 256, experts, 1) for experts in (8, 32, 128, 512, 1024)],
}


def _inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    tokens, dim, experts, trees = (int(shape[name]) for name in "TPEK")
    size = {"x": (tokens, dim), "split_weight": (trees, experts - 1, dim), "leaf_weight": (trees, experts, dim)}
    found = {name: torch.randn(each, device=device) for name, each in size.items()}
    found |= {name: found[name] / dim**0.5 for name in LEAVES[1:]}
    found = {name: each.to(dtype).requires_grad_() for name, each in found.items()}
    return {**found, "grad": (torch.randn(tokens, experts, device=device) / tokens).to(dtype)}


def _gate(backend: str) -> Calls:
    def forward(inputs: Inputs) -> object:
        return mk.tree_gate(*(inputs[name] for name in LEAVES), gamma=1.0, backend=backend)[0]

    return through_autograd(forward, LEAVES, "grad")


def _route(backend: str) -> Calls:
    def forward(inputs: Inputs) -> object:
        return mk.tree_route(*(inputs[name] for name in LEAVES), gamma=SATURATED, backend=backend)

    return through_autograd(forward, (), "grad")


def _composed_gate(inputs: Inputs) -> object:
    """The definition's products, levels and softmax in PyTorch."""
    return reference.tree_gate(*(inputs[name] for name in LEAVES), gamma=1.0)[0]


def _composed_route(inputs: Inputs) -> object:
    """The dense gate, of which every tree's likeliest leaf is kept; of equal experts the first."""
    gates, leaf_probs = reference.tree_gate(*(inputs[name] for name in LEAVES), gamma=SATURATED)
    experts = leaf_probs.argmax(-1)
    repeated = (experts[:, :, None] == experts[:, None, :]).tril(-1).any(-1)
    return gates.gather(1, experts).masked_fill(repeated, 0), experts.masked_fill(repeated, -1)


def _gate_flops(shape: Shape, direction: str) -> int:
    """Of all products. A kernel that passes over those no token reaches can be faster than their floor."""
    products = 2 * shape["T"] * shape["P"] * shape["K"] * (2 * shape["E"] - 1)
    return products * (3 if direction == "training" else 1)


def _gate_bytes(shape: Shape, dtype: torch.dtype, direction: str) -> int:
    """x and weights -> gates and leaf probabilities; then x, weights and the gates' gradient -> three gradients."""
    tokens, dim, experts, trees = (int(shape[name]) for name in "TPEK")
    given, gates = tokens * dim + trees * (2 * experts - 1) * dim, tokens * experts
    forward = given + gates + tokens * trees * experts
    return dtype.itemsize * (forward + (2 * given + gates if direction == "training" else 0))


def _depth(shape: Shape) -> int:
    return (int(shape["E"]) - 1).bit_length()


def _route_bytes(shape: Shape, dtype: torch.dtype, direction: str) -> int:
    """x and the rows of the weights that somebody can visit -> a weight and an expert a tree."""
    tokens, dim, experts, trees = (int(shape[name]) for name in "TPEK")
    visited = min(2 * experts - 1, tokens * (_depth(shape) + 1))
    return dtype.itemsize * (tokens * dim + trees * visited * dim + tokens * trees) + 4 * tokens * trees


ENTRIES = {
    "tree_gate": Entry(
        shapes=SHAPES,
        complete=lambda shape, device: shape,
        inputs=_inputs,
        kernel=_gate,
        peers={"torch level by level": through_autograd(_composed_gate, LEAVES, "grad")},
        flops=_gate_flops,
        least_bytes=_gate_bytes,
        directions=("forward", "training"),
        dtypes=(torch.float32, torch.bfloat16),
        leaves=LEAVES,
    ),
    "tree_route": Entry(
        shapes=SHAPES,
        complete=lambda shape, device: shape,
        inputs=_inputs,
        kernel=_route,
        peers={"torch level by level": through_autograd(_composed_route, (), "grad")},
        flops=lambda shape, direction: 2 * shape["T"] * shape["P"] * shape["K"] * (_depth(shape) + 1),
        least_bytes=_route_bytes,
        directions=("forward",),
        dtypes=(torch.float32, torch.bfloat16),
    ),
}
