"""Benchmarks of the tree gate: `tree_gate` at gamma = 1, `tree_route` at a gamma near 0."""

from __future__ import annotations

import torch

import moe_kernels as mk
import python_ref.tree_gate as reference
from bench.entry import Inputs, Shape, entry

LEAVES = ("x", "split_weight", "leaf_weight")
SATURATED = 1e-6  # gamma far below the pre-activations, which are about 1: nearly every split gives 0 or 1


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
    tokens, dim, experts, trees = (shape[name] for name in "TPEK")
    size = {"x": (tokens, dim), "split_weight": (trees, experts - 1, dim), "leaf_weight": (trees, experts, dim)}
    found = {name: torch.randn(each, device=device) for name, each in size.items()}
    found |= {name: found[name] / dim**0.5 for name in LEAVES[1:]}
    found = {name: each.to(dtype).requires_grad_() for name, each in found.items()}
    return {**found, "grad": (torch.randn(tokens, experts, device=device) / tokens).to(dtype)}


def _gate(inputs: Inputs, backend: str) -> object:
    return mk.tree_gate(*(inputs[name] for name in LEAVES), gamma=1.0, backend=backend)[0]


def _route(inputs: Inputs, backend: str) -> object:
    return mk.tree_route(*(inputs[name] for name in LEAVES), gamma=SATURATED, backend=backend)


def _composed_gate(inputs: Inputs) -> object:
    return reference.tree_gate(*(inputs[name] for name in LEAVES), gamma=1.0)[0]


def _composed_route(inputs: Inputs) -> object:
    """Gate and expert of each tree's likeliest leaf; 0 and -1 if an earlier tree has the same expert."""
    gates, leaf_probs = reference.tree_gate(*(inputs[name] for name in LEAVES), gamma=SATURATED)
    experts = leaf_probs.argmax(-1)
    repeated = (experts[:, :, None] == experts[:, None, :]).tril(-1).any(-1)
    return gates.gather(1, experts).masked_fill(repeated, 0), experts.masked_fill(repeated, -1)


def _gate_flops(shape: Shape, direction: str) -> int:
    """The products of x with all split and leaf weights."""
    products = 2 * shape["T"] * shape["P"] * shape["K"] * (2 * shape["E"] - 1)
    return products * (3 if direction == "training" else 1)


def _gate_bytes(shape: Shape, dtype: torch.dtype, direction: str) -> int:
    """Forward: x, weights -> gates, leaf probabilities. Backward: x, weights, gradient of gates -> three gradients."""
    tokens, dim, experts, trees = (shape[name] for name in "TPEK")
    given, gates = tokens * dim + trees * (2 * experts - 1) * dim, tokens * experts
    forward = given + gates + tokens * trees * experts
    return dtype.itemsize * (forward + (2 * given + gates if direction == "training" else 0))


def _depth(shape: Shape) -> int:
    return (shape["E"] - 1).bit_length()


def _route_bytes(shape: Shape, dtype: torch.dtype, direction: str) -> int:
    """x and the rows of the weights that the tokens can visit -> a weight and an expert for each token and tree."""
    tokens, dim, experts, trees = (shape[name] for name in "TPEK")
    visited = min(2 * experts - 1, tokens * (_depth(shape) + 1))
    return dtype.itemsize * (tokens * dim + trees * visited * dim + tokens * trees) + 4 * tokens * trees


ENTRIES = {
    "tree_gate": entry(
        _gate,
        {"torch level by level": _composed_gate},
        LEAVES,
        shapes=SHAPES,
        inputs=_inputs,
        flops=_gate_flops,
        least_bytes=_gate_bytes,
    ),
    "tree_route": entry(
        _route,
        {"torch level by level": _composed_route},
        (),
        shapes=SHAPES,
        inputs=_inputs,
        flops=lambda shape, direction: 2 * shape["T"] * shape["P"] * shape["K"] * (_depth(shape) + 1),
        least_bytes=_route_bytes,
    ),
}
