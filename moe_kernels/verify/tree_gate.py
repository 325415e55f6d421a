"""Cases of tree_gate and tree_route, at gammas at which almost none, some or all of the nodes are saturated."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_kernels.ops import tree_gate
from moe_kernels.verify.operation import Case, Inputs, Operation, Outputs, differentiated


def _inputs(dtype: torch.dtype, device: str, small: bool) -> Iterator[tuple[str, Inputs]]:
    generator = torch.Generator().manual_seed(0)
    many = ((1, 3, 1, 2), (9, 8, 2, 5), (40, 48, 2, 64), (7, 33, 4, 100), (5, 16, 1, 1024), (65, 80, 1, 64))
    for tokens, dim, trees, experts in ((3, 5, 1, 2), (4, 8, 2, 5), (3, 16, 1, 6)) if small else many:
        weights = {"split_weight": (trees, experts - 1, dim), "leaf_weight": (trees, experts, dim)}
        biases = {"split_bias": (trees, experts - 1), "leaf_bias": (trees, experts)}
        for given in ({}, biases):
            shapes = {"x": (tokens, dim), **weights, **given}
            tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
            tensors["split_weight"] *= 0.5 / dim**0.5
            inputs = {name: each.to(dtype).to(device) for name, each in tensors.items()}
            yield f"{tokens} x {dim}, K={trees}, E={experts}{', biases' * bool(given)}", inputs


def _gate_cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    for name, inputs in _inputs(dtype, device, small):
        (tokens, _), (trees, experts, _) = inputs["x"].shape, inputs["leaf_weight"].shape
        grads = {"grad_gates": (tokens, experts), "grad_leaf_probs": (tokens, trees, experts)}
        given = {each: torch.randn(shape, generator=generator).to(dtype).to(device) for each, shape in grads.items()}
        for gamma in (10.0, 1.0):
            yield Case(f"{name}, gamma={gamma:g}", {**inputs, **given, "gamma": gamma})


def _gate(inputs: Inputs, backend: str) -> Outputs:
    leaves = ("x", "split_weight", "leaf_weight", "split_bias", "leaf_bias")
    return differentiated(tree_gate.tree_gate, inputs, leaves, ("gates", "leaf_probs"), backend=backend)


def _route_cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    for name, inputs in _inputs(dtype, device, small):
        # 16-bit dtypes have no case gamma = 3: backends sum pre-activations in different orders and round the sums to
        # 16 bits, so they may choose different leaves if two are nearly equal.
        for gamma in (3.0, 1e-6) if dtype.itemsize > 2 else (1e-6,):
            yield Case(f"{name}, gamma={gamma:g}", {**inputs, "gamma": gamma})


def _route(inputs: Inputs, backend: str) -> Outputs:
    return differentiated(tree_gate.tree_route, inputs, (), ("weights", "experts"), backend=backend)


GATE = Operation(_gate_cases, _gate, exact=frozenset(), floor=16.0)
ROUTE = Operation(_route_cases, _route, exact=frozenset({"experts"}), floor=8.0)
