"""Fuzzed, which says how the fuzzer makes cases of an operation."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from moe_kernels.cases.call import Inputs
from moe_kernels.verify.operation import Operation
from tests.fuzz.values import Spec


@dataclass(frozen=True)
class Fuzzed:
    """How random cases of an operation are made.

    draw(draw): a random spec without the keys op, on (backend), dtype and seed.
    build(spec): the inputs.
    fits(spec): whether a simplified spec is valid for the operation.
    loose(spec): factor of `Operation.floor`, the epsilons that are always allowed.
    dtypes: names to draw from, repeated for a higher frequency.
    weight: frequency of the operation relative to others.
    own: how to run a function that is not in moe_kernels.verify.
    """

    draw: Callable[[random.Random], Spec]
    build: Callable[[Spec], Inputs]
    fits: Callable[[Spec], bool] = lambda spec: True
    loose: Callable[[Spec], float] = lambda spec: 1.0
    dtypes: tuple[str, ...] = ("float32", "float32", "bfloat16", "float16", "float64")
    weight: int = 1
    own: Operation | None = None


def without_kernels(run: Callable[..., dict], *exact: str) -> Operation:
    return Operation(lambda *args: iter(()), run, exact=frozenset(exact))
