"""The fuzzer's entry of an operation."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from moe_kernels.verify.operation import Inputs, Operation
from tests.fuzz.values import Spec


@dataclass(frozen=True)
class Fuzzed:
    """Makes random cases of an operation; its run, exact outputs and floor are in moe_kernels.verify.

    draw(draw): a spec without op, on, dtype and seed. build(spec): the inputs. fits(spec): whether a simplified spec is
    still valid for the operation. loose(spec): a factor of the floor. dtypes: to draw from. weight: frequency of the
    operation. own: run and exact outputs of a function without kernels, which moe_kernels.verify lacks.
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
