"""Routing statistics of layers of experts, collected in the forward of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from moe_kernels.nn.gates import Gate
from moe_kernels.nn.moe import MoE, MoEOutput
from moe_kernels.recipes import Routing


class Watched:
    """The distributions of the routers of every layer `MoE` of a model, in the order of the forward."""

    def __init__(self) -> None:
        self.probs: list[Tensor | None] = []

    def routing(self, outputs: Sequence[MoEOutput]) -> list[Routing]:
        """One Routing a layer, of what the forward inside the block gave."""
        weights = [out.gates[0].weights.detach() if out.gates[0].dense else None for out in outputs]
        return [
            Routing(out.plan.used, probs, each) for out, probs, each in zip(outputs, self.probs, weights, strict=True)
        ]


@contextmanager
def watched_routers(model: nn.Module) -> Iterator[Watched]:
    """Notes the router's distribution of every layer of experts in one forward of model inside the block."""
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
    """Every layer of experts of model gives zero inside the block: the residual around it is all that is left."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, MoE):
                hook = module.experts.register_forward_hook(lambda experts, args, y: torch.zeros_like(y))
                stack.callback(hook.remove)
        yield


def regularisers(outputs: Sequence[MoEOutput]) -> dict[str, Tensor]:
    """The losses of all layers of experts by name, each summed over the layers."""
    found: dict[str, Tensor] = {}
    for out in outputs:
        for name, loss in out.losses.items():
            found[name] = found[name] + loss if name in found else loss
    return found
