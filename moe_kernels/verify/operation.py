"""The description of an operation that `verify` needs, and functions for its cases and calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_kernels.cases.call import Call, Inputs

Outputs = dict[str, Tensor]


class Case(NamedTuple):
    name: str
    inputs: Inputs


@dataclass(frozen=True)
class Operation:
    """How one operation is verified.

    cases(dtype, device, small): the cases. `small` ones are for interpreters and sanitizers.
    run(inputs, backend): outputs and gradients by name. The fuzzer (tests/fuzz) calls it with random inputs.
    exact: names of the outputs that must equal those of the reference bit for bit.
    floor: the error of other outputs may be twice the reference's plus `floor` epsilons of their dtype (float64:
        32 * floor epsilons).
    """

    cases: Callable[[torch.dtype, str, bool], Iterator[Case]]
    run: Callable[[Inputs, str], Outputs]
    exact: frozenset[str]
    floor: float = 0.0


def differentiated(inputs: Inputs, backend: str, call: Call, leaves: Sequence[str] | None = None) -> Outputs:
    """Outputs of `call`, and gradients of those leaves that are in `inputs` and are not None. leaves: None for all."""
    named = (*call.leaves, *call.optional) if leaves is None else leaves
    leaf = {name: inputs[name].detach().requires_grad_() for name in named if inputs.get(name) is not None}
    found = call.run(inputs | leaf, backend)
    outputs = dict(zip(call.outputs, found if isinstance(found, tuple) else (found,), strict=True))
    roots = [each for each in outputs.values() if each.requires_grad]
    if roots:
        grads = [inputs[name] for name in call.grads[: len(roots)]]
        gradients = torch.autograd.grad(roots, list(leaf.values()), grads, materialize_grads=True)
        outputs |= {f"gradient of {name}": each for name, each in zip(leaf, gradients, strict=True)}
    return {name: each.detach() for name, each in outputs.items()}


def random_rows(kind: str, rows: int, n: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """(rows, n). kind: "normal", "ties", "constant", "sorted", "special" (NaN, infinities, 0, denormals, limits)."""
    if kind == "constant":
        return torch.full((rows, n), 0.5, dtype=dtype)
    if kind == "ties":
        return torch.randint(-3, 4, (rows, n), generator=generator).to(dtype)
    x = torch.randn(rows, n, generator=generator).to(dtype)
    if kind == "sorted":
        return x.sort(-1).values
    if kind == "special":
        limits = torch.finfo(dtype)
        low = limits.smallest_normal / 4
        hostile = [math.nan, math.inf, -math.inf, 0.0, -0.0, low, -low, limits.max, limits.min]
        which = torch.randint(0, 2 * len(hostile), (rows, n), generator=generator)
        for index, value in enumerate(hostile):
            x = x.masked_fill(which == index, value)
    return x
