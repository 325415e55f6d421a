"""Routing of layers of experts, recorded in the forward pass of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from moe_kernels.nn.gates import Gate
from moe_kernels.nn.moe import MoE, MoEOutput
from moe_kernels.recipes import Routing


class Watched:
    """The distributions of the routers of all `MoE` layers of a model, in the order of the forward pass."""

    def __init__(self) -> None:
        self.probs: list[Tensor | None] = []

    def routing(self, outputs: Sequence[MoEOutput]) -> list[Routing]:
        """A Routing for each layer, from the layers' outputs in that forward pass."""
        weights = [out.gates[0].weights.detach() if out.gates[0].dense else None for out in outputs]
        return [
            Routing(out.plan.used, probs, each) for out, probs, each in zip(outputs, self.probs, weights, strict=True)
        ]


@contextmanager
def watched_routers(model: nn.Module) -> Iterator[Watched]:
    """Records the router's distribution of every layer of experts in one forward pass of `model` inside the block."""
    watched = Watched()

    def note(gate: Gate, args: tuple[Tensor, ...]) -> None:
        watched.probs.append(gate.router_probs(*args))

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, MoE):
                stack.callback(module.gate.register_forward_pre_hook(note).remove)
        yield watched


@contextmanager
def experts_off(model: nn.Module) -> Iterator[None]:
    """Inside the block all layers of experts give zeros, so that only the residuals around them are left."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, MoE):
                hook = module.experts.register_forward_hook(lambda experts, args, y: torch.zeros_like(y))
                stack.callback(hook.remove)
        yield


def regularisers(outputs: Sequence[MoEOutput]) -> dict[str, Tensor]:
    """The losses of all layers of experts by name, summed over the layers."""
    found: dict[str, Tensor] = {}
    for out in outputs:
        for name, loss in out.losses.items():
            found[name] = found[name] + loss if name in found else loss
    return found
