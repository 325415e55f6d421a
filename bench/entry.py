"""The entry of an operation in bench/registry.py: all that the bench needs to measure it.

A call has a direction. "forward" runs without autograd, "backward" runs the backward kernel alone on tensors that
forward saves, and "training" runs both through autograd. A peer is another implementation of the whole operation:
torch.topk alone is no peer of kwta, since it only selects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

DIRECTIONS = ("forward", "backward", "training")

Shape = dict[str, Any]
Inputs = dict[str, Any]
Calls = dict[str, Callable[[Inputs], object]]  # by direction


@dataclass(frozen=True)
class Entry:
    """One operation of the bench.

    shapes: sets of shapes by name: "quick", "papers", "llm", "aims" (few shapes, which `bench gpu` measures first) and
        "scaling", in which one size grows by a factor of 128.
    complete(shape, device type): the shape with the sizes that it leaves out; on a CPU some operations take fewer
        tokens and experts.
    inputs(shape, dtype, device): fresh random inputs.
    kernel(backend): the calls of that backend, by direction.
    peers: by name, calls of compositions of PyTorch's operations. Peers of other packages are in bench/peers.py.
    flops(shape, direction): FLOPs of one call.
    least_bytes(shape, dtype, direction): bytes of one call in which each pass, forward and backward, reads its inputs
        once and writes its outputs once.
    leaves: names of the inputs for which training computes gradients.
    grad: name of the input that holds the gradient of the output.
    """

    shapes: dict[str, list[Shape]]
    inputs: Callable[[Shape, torch.dtype, str], Inputs]
    kernel: Callable[[str], Calls]
    peers: dict[str, Calls]
    flops: Callable[[Shape, str], int]
    least_bytes: Callable[[Shape, torch.dtype, str], int]
    complete: Callable[[Shape, str], Shape] = lambda shape, device: shape
    directions: tuple[str, ...] = DIRECTIONS
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    leaves: tuple[str, ...] = ()
    grad: str = "grad"


def entry(
    forward: Callable[..., object], peers: dict[str, Any], leaves: tuple[str, ...], grad: str = "grad", **fields: Any
) -> Entry:
    """The entry of an operation that is measured forward and, if it has leaves, in training through autograd.

    forward(inputs, backend=...); peers: functions of the inputs, by name.
    """
    calls = partial(through_autograd, leaves=leaves, grad=grad)
    return Entry(
        kernel=lambda backend: calls(partial(forward, backend=backend)),
        peers={name: calls(peer) for name, peer in peers.items()},
        directions=("forward", "training") if leaves else ("forward",),
        leaves=leaves,
        grad=grad,
        **{"dtypes": (torch.float32, torch.bfloat16), **fields},
    )


def through_autograd(forward: Callable[[Inputs], Any], leaves: tuple[str, ...], grad: str) -> Calls:
    def infer(inputs: Inputs) -> object:
        with torch.no_grad():
            return forward(inputs)

    def train(inputs: Inputs) -> object:
        return torch.autograd.grad(forward(inputs), [inputs[name] for name in leaves], inputs[grad])

    return {"forward": infer, "training": train} if leaves else {"forward": infer}


def label(shape: Shape) -> str:
    """ "R=4096 N=512 p=0.5": the shape as text, in tables and results."""
    return " ".join(f"{name}={value}" for name, value in shape.items())
