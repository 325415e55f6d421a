"""Cases of tree_gate and tree_route, at gammas at which almost none, some or all of the nodes are saturated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from moe_kernels.cases.call import normal
from moe_kernels.cases.tree_gate import TREE_GATE, TREE_ROUTE, shapes
from moe_kernels.verify.operation import Case, Inputs, Operation, differentiated


def _tensors(dtype: torch.dtype, device: str, small: bool) -> Iterator[tuple[str, Inputs]]:
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    many = ((1, 3, 1, 2), (9, 8, 2, 5), (40, 48, 2, 64), (7, 33, 4, 100), (5, 16, 1, 1024), (65, 80, 1, 64))
    for tokens, dim, trees, experts in ((3, 5, 1, 2), (4, 8, 2, 5), (3, 16, 1, 6)) if small else many:
        for bias in (False, True):
            sizes = shapes({"T": tokens, "P": dim, "K": trees, "E": experts, "bias": bias})
            grads = {name: sizes.pop(name) for name in TREE_GATE.grads}
            tensors = normal(sizes, torch.float32, "cpu", generators[0])
            tensors["split_weight"] *= 0.5 / dim**0.5
            tensors |= normal(grads, torch.float32, "cpu", generators[1])
            inputs = {name: each.to(dtype).to(device) for name, each in tensors.items()}
            yield f"{tokens} x {dim}, K={trees}, E={experts}{', biases' * bias}", inputs


def _gate_cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    for name, inputs in _tensors(dtype, device, small):
        for gamma in (10.0, 1.0):
            yield Case(f"{name}, gamma={gamma:g}", {**inputs, "gamma": gamma})


def _route_cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    for name, inputs in _tensors(dtype, device, small):
        # 16-bit dtypes have no case gamma = 3: backends sum pre-activations in different orders and round the sums to
        # 16 bits, so they may choose different leaves if two are nearly equal.
        for gamma in (3.0, 1e-6) if dtype.itemsize > 2 else (1e-6,):
            yield Case(f"{name}, gamma={gamma:g}", {**inputs, "gamma": gamma})


GATE = Operation(_gate_cases, partial(differentiated, call=TREE_GATE), exact=frozenset(), floor=16.0)
ROUTE = Operation(_route_cases, partial(differentiated, call=TREE_ROUTE), exact=frozenset({"experts"}), floor=8.0)
