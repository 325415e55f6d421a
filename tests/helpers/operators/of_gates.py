"""Operators of the tree gate."""

from __future__ import annotations

import torch
from torch import Tensor

import python_ref.tree_gate as trees
from tests.helpers.operators.of_routing import random
from tests.helpers.operators.operator import Call, Given, Operator, Rule, computed, gradients, wide

MODES = ("", "tf", "bert")


def _given(dtype: torch.dtype, biased: bool, tokens: int, dim: int, num_trees: int, experts: int) -> Call:
    return {
        "x": random(dtype, tokens, dim),
        "split_weight": random(dtype, num_trees, experts - 1, dim) / dim,
        "leaf_weight": random(dtype, num_trees, experts, dim) / dim,
        "split_bias": random(dtype, num_trees, experts - 1) if biased else None,
        "leaf_bias": random(dtype, num_trees, experts) if biased else None,
    }


def _gate_fwd(dtype: torch.dtype) -> dict[str, Call]:
    return {
        "biases": _given(dtype, True, 5, 7, 2, 3) | {"gamma": 4.0, "mode": "", "backend": "cpu"},
        "none": _given(dtype, False, 3, 37, 1, 19) | {"gamma": 8.0, "mode": "tf", "backend": "cpu"},
    }


def _route_fwd(dtype: torch.dtype) -> dict[str, Call]:
    found = _gate_fwd(dtype)
    return {name: {each: value for each, value in call.items() if each != "mode"} for name, call in found.items()}


def _logits(s: Given) -> tuple[Tensor, Tensor]:
    x, split, leaf, *biases = wide(s.x, s.split_weight, s.leaf_weight, s.split_bias, s.leaf_bias)
    of_split, of_leaf = (torch.einsum("tp,knp->tkn", x, weight) for weight in (split, leaf))
    of_split, of_leaf = (
        each if bias is None else each + bias for each, bias in zip((of_split, of_leaf), biases, strict=True)
    )
    return of_split.detach(), of_leaf.detach()


def _gate(s: Given) -> tuple[Tensor, ...]:
    split, leaf = _logits(s)
    _, probs = trees.tree_probabilities(split, s.gamma)
    return trees.tree_softmax(leaf, probs, s.mode or None), probs, split, leaf


def _gate_bwd(dtype: torch.dtype) -> dict[str, Call]:
    def call(tokens: int, num_trees: int, experts: int, mode: str, probs: bool) -> Call:
        grad_probs = random(computed(dtype), tokens, num_trees, experts).flip(0) if probs else None
        logits = random(dtype, tokens, num_trees, experts - 1), random(dtype, tokens, num_trees, experts)
        given = {"grad_gates": random(computed(dtype), tokens, experts), "grad_leaf_probs": grad_probs}
        return given | {
            "split_logits": logits[0],
            "leaf_logits": logits[1],
            "gamma": 8.0,
            "mode": mode,
            "backend": "cpu",
        }

    return {"probs": call(5, 2, 3, "", True), "none": call(3, 1, 19, "tf", False)}


def _gate_gradients(s: Given) -> tuple[Tensor, ...]:
    leaves = wide(s.split_logits, s.leaf_logits)
    _, probs = trees.tree_probabilities(leaves[0], s.gamma)
    gates = trees.tree_softmax(leaves[1], probs, s.mode or None)
    total = (gates * s.grad_gates.double()).sum()
    if s.grad_leaf_probs is not None:
        total = total + (probs * s.grad_leaf_probs.double()).sum()
    return gradients(total, torch.ones(()), leaves, [True, True])


def _logits_bwd(dtype: torch.dtype) -> dict[str, Call]:
    def call(tokens: int, dim: int, num_trees: int, experts: int, wants: list[bool]) -> Call:
        parts = _given(dtype, False, tokens, dim, num_trees, experts)
        split = random(dtype, tokens, num_trees, experts - 1)
        given = {"dsplit": split.flip(0), "dleaf": random(dtype, tokens, num_trees, experts), "split_logits": split}
        given |= {name: parts[name] for name in ("x", "split_weight", "leaf_weight")}
        return given | {"gamma": 8.0, "wants": wants, "backend": "cpu"}

    return {"all": call(5, 7, 2, 3, [True] * 3), "weights": call(3, 37, 1, 19, [False, True, False])}


def _logits_gradients(s: Given) -> tuple[Tensor, ...]:
    leaves = wide(s.x, s.split_weight, s.leaf_weight)
    split, leaf = (torch.einsum("tp,knp->tkn", leaves[0], weight) for weight in leaves[1:])
    total = (split * s.dsplit.double()).sum() + (leaf * s.dleaf.double()).sum()
    return gradients(total, torch.ones(()), leaves, s.wants)


def _routed(s: Given) -> tuple[Tensor | None, ...]:
    x, split_weight, leaf_weight, split_bias, leaf_bias = wide(
        s.x, s.split_weight, s.leaf_weight, s.split_bias, s.leaf_bias
    )
    biases = {"split_bias": split_bias, "leaf_bias": leaf_bias}
    if s.x.dtype in (torch.bfloat16, torch.float16):  # rounding decides between leaves that are nearly equally likely
        return None, None, None, None
    weights, experts, found = trees.tree_route(x, split_weight, leaf_weight, gamma=s.gamma, **biases)
    return weights, experts, found.visited, found.unsaturated


def _gamma(name: str) -> dict:
    def allowed(s: Given) -> bool:
        tiny = torch.finfo(computed(getattr(s, name).dtype)).tiny
        return tiny <= s.gamma <= 1 / tiny

    return {"gamma": allowed}


WEIGHTS = ("split_weight", "leaf_weight")
NODES: Rule = (
    lambda s: s.E == s.N + 1 and s.N >= 1 and s.K >= 1,
    "split_weight leaf_weight split_logits leaf_logits split_bias leaf_bias",
)
TREE = {"x": "f T P", "split_weight": "f K N P", "leaf_weight": "f K E P", "split_bias": "f K N", "leaf_bias": "f K E"}

OPERATORS = {
    "tree_gate_fwd": Operator(
        TREE, _gate_fwd, _gate, floats=_gamma("x"), choices={"mode": MODES}, rules=(NODES,), reordered=WEIGHTS
    ),
    "tree_route_fwd": Operator(
        TREE, _route_fwd, _routed, floats=_gamma("x"), rules=(NODES,), reordered=WEIGHTS, backends=("cpu", "cuda")
    ),
    "tree_gate_bwd": Operator(
        {"grad_gates": "c T E", "grad_leaf_probs": "c T K E", "split_logits": "f T K N", "leaf_logits": "f T K E"},
        _gate_bwd,
        _gate_gradients,
        floats=_gamma("leaf_logits"),
        choices={"mode": MODES},
        rules=(NODES,),
        soft=((lambda s: s.backend == "cpu", "grad_gates grad_leaf_probs"),),
        reordered=WEIGHTS,
    ),
    "tree_gate_logits_bwd": Operator(
        {
            "dsplit": "f T K N",
            "dleaf": "f T K E",
            "split_logits": "f T K N",
            "x": "f T P",
            "split_weight": "f K N P",
            "leaf_weight": "f K E P",
        },
        _logits_bwd,
        _logits_gradients,
        floats=_gamma("x"),
        flags={"wants": 3},
        rules=(NODES,),
        reordered=WEIGHTS,
        families=("tree_gate_logits", "tree_gate"),
    ),
}
