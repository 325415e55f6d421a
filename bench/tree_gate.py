"""Benchmarks of the tree gate: `tree_gate` at gamma = 1, `tree_route` at a gamma near 0."""

from __future__ import annotations

from functools import partial

import python_ref.tree_gate as reference
from bench.entry import Inputs, Shape, entry
from moe_kernels.cases.tree_gate import LEAVES, TREE_GATE, TREE_ROUTE


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


def _composed_gate(inputs: Inputs) -> object:
    return reference.tree_gate(*(inputs[name] for name in LEAVES), gamma=inputs["gamma"])[0]


def _composed_route(inputs: Inputs) -> object:
    """Gate and expert of each tree's likeliest leaf; 0 and -1 if an earlier tree has the same expert."""
    gates, leaf_probs = reference.tree_gate(*(inputs[name] for name in LEAVES), gamma=inputs["gamma"])
    experts = leaf_probs.argmax(-1)
    repeated = (experts[:, :, None] == experts[:, None, :]).tril(-1).any(-1)
    return gates.gather(1, experts).masked_fill(repeated, 0), experts.masked_fill(repeated, -1)


_on_shapes = partial(entry, shapes=SHAPES)
ENTRIES = {
    "tree_gate": _on_shapes(TREE_GATE, {"torch level by level": _composed_gate}),
    "tree_route": _on_shapes(TREE_ROUTE, {"torch level by level": _composed_route}),
}
