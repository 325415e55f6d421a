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

from moe_kernels.cases.call import Call, Inputs, Shape

DIRECTIONS = ("forward", "backward", "training")

Calls = dict[str, Callable[[Inputs], object]]  # by direction


@dataclass(frozen=True)
class Entry:
    """One operation of the bench.

    shapes: sets of shapes by name: "quick", "papers", "llm", "aims" (few shapes, which `bench gpu` measures first) and
        "scaling", in which one size grows by a factor of 128.
    complete(shape, device type): the shape with the sizes that it leaves out; on a CPU some operations take fewer
        tokens and experts.
    inputs(shape, dtype, device): fresh random inputs, and what peers need besides.
    kernel(backend): the calls of that backend, by direction.
    peers: by name, calls of compositions of PyTorch's operations. Peers of other packages are in bench/peers.py.
    least_bytes(shape, dtype, direction): see Call.
    leaves: names of the inputs for which training computes gradients.
    grad: name of the input that holds the gradient of the output.
    """

    shapes: dict[str, list[Shape]]
    inputs: Callable[[Shape, torch.dtype, str], Inputs]
    kernel: Callable[[str], Calls]
    peers: dict[str, Calls]
    least_bytes: Callable[[Shape, torch.dtype, str], int]
    complete: Callable[[Shape, str], Shape] = lambda shape, device: shape
    directions: tuple[str, ...] = DIRECTIONS
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    leaves: tuple[str, ...] = ()
    grad: str = "grad"


def entry(
    call: Call,
    peers: dict[str, Any],
    *,
    forward: Callable[..., object] | None = None,
    more: Callable[[Inputs], Inputs] = lambda inputs: {},
    **fields: Any,
) -> Entry:
    """The entry of a call that is measured forward and, if it has leaves, in training, through its first output.

    peers: functions of the inputs, by name. forward(inputs, backend=...): measured instead of `call`. more(inputs):
    what peers need besides the call's inputs.
    """

    def first(inputs: Inputs, backend: str) -> object:
        found = call.run(inputs, backend)
        return found[0] if call.leaves and isinstance(found, tuple) else found

    def inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
        found = call.inputs(shape, dtype, device)
        found |= more(found)
        return found | {name: found[name].requires_grad_() for name in call.leaves}

    grad = call.grads[0] if call.grads else ""
    calls = partial(through_autograd, leaves=call.leaves, grad=grad)
    given = {
        "inputs": inputs,
        "kernel": lambda backend: calls(partial(forward or first, backend=backend)),
        "peers": {name: calls(peer) for name, peer in peers.items()},
        "least_bytes": call.least_bytes,
        "directions": ("forward", "training") if call.leaves else ("forward",),
        "dtypes": (torch.float32, torch.bfloat16),
    }
    return Entry(**{**given, **fields}, leaves=call.leaves, grad=grad)


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
