"""`Call`, which says how to call an operation, and what the files of several operations share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from math import prod
from typing import Any

import torch

Shape = dict[str, Any]  # sizes and settings of a call by name, such as {"R": 64, "N": 512, "p": 0.1}
Shapes = dict[str, tuple[int, ...]]  # shapes of tensors by name
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A call of an operation with inputs by name, which may hold more than the operation reads.

    function: takes the inputs that have the names of its parameters, and `backend`.
    outputs: names of its results.
    leaves: names of the inputs that have gradients. optional: those of further ones that inputs may lack.
    grads: for each output that has a gradient, the name of the input that is its gradient.
    inputs(shape, dtype, device): random inputs, those that bench measures.
    least_bytes(shape, dtype, direction): bytes of one call in which each pass, forward and backward, reads its inputs
        once and writes its outputs once. direction: "forward", "backward" or "training".
    """

    function: Callable[..., Any]
    outputs: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    grads: tuple[str, ...] = ()
    inputs: Callable[[Shape, torch.dtype, str], Inputs] = lambda shape, dtype, device: {}
    least_bytes: Callable[[Shape, torch.dtype, str], int] = lambda shape, dtype, direction: 0

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        return tuple(name for name in signature(self.function).parameters if name != "backend")

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the leaves and of the gradients."""
        return *self.leaves, *self.optional, *self.grads

    def run(self, inputs: Inputs, backend: str) -> Any:
        return self.function(**{name: inputs[name] for name in self.parameters if name in inputs}, backend=backend)


def normal(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: str, generator: torch.Generator | None = None
) -> Inputs:
    """Normal numbers, drawn in the order of `shapes`: by `generator` on the CPU, or else by torch's own on `device`."""
    options: dict[str, Any] = {"generator": generator} if generator else {"device": device}
    return {name: torch.randn(size, **options).to(dtype).to(device) for name, size in shapes.items()}


def streamed(
    shapes: Callable[[Shape], Shapes],
    read: tuple[str, ...],
    written: tuple[str, ...],
    shape: Shape,
    dtype: torch.dtype,
    direction: str,
) -> int:
    """Least bytes of an operation that reads and writes tensors of the named shapes. Backward reads the same inputs and
    the gradients of the outputs, and writes a gradient for each input."""
    sizes = {name: prod(size) for name, size in shapes(shape).items()}
    given, made = (sum(sizes[name] for name in names) for names in (read, written))
    return dtype.itemsize * ((3 * given + 2 * made) if direction == "training" else given + made)
