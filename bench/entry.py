"""The entry of an operation in the registry.

Directions: "forward" without autograd; "backward", the kernel alone on what forward saved; "training", both through
autograd. A peer is another implementation of the whole operation; torch.topk alone, which only selects, is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

DIRECTIONS = ("forward", "backward", "training")

Shape = dict[str, Any]
Inputs = dict[str, Any]
Calls = dict[str, Callable[[Inputs], object]]  # by direction


@dataclass(frozen=True)
class Entry:
    """One operation of the bench.

    shapes: sets of shapes by name: "quick", "papers", "llm", and "scaling", which differ in one size over two decades.
        complete(shape, device type) fits a shape to the device.
    inputs(shape, dtype, device): fresh random inputs.
    kernel(backend): what to call for that backend, by direction.
    peers: the same for PyTorch's own compositions, by name; peers of other packages are in bench/peers.py.
    flops(shape, direction), least_bytes(shape, dtype, direction): of one call; every input read once, every output
        written once.
    leaves, grad: names of the inputs that training differentiates by, and of the gradient of the output.
    """

    shapes: dict[str, list[Shape]]
    complete: Callable[[Shape, str], Shape]
    inputs: Callable[[Shape, torch.dtype, str], Inputs]
    kernel: Callable[[str], Calls]
    peers: dict[str, Calls]
    flops: Callable[[Shape, str], int]
    least_bytes: Callable[[Shape, torch.dtype, str], int]
    directions: tuple[str, ...] = DIRECTIONS
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    leaves: tuple[str, ...] = ()
    grad: str = "grad"


def through_autograd(forward: Callable[[Inputs], Any], leaves: tuple[str, ...], grad: str) -> Calls:
    """Forward without autograd and, where there are leaves, training through it."""

    def infer(inputs: Inputs) -> object:
        with torch.no_grad():
            return forward(inputs)

    def train(inputs: Inputs) -> object:
        return torch.autograd.grad(forward(inputs), [inputs[name] for name in leaves], inputs[grad])

    return {"forward": infer, "training": train} if leaves else {"forward": infer}


def label(shape: Shape) -> str:
    """ "R=4096 N=512 p=0.5": the shape as tables and keys show it."""
    return " ".join(f"{name}={value}" for name, value in shape.items())
