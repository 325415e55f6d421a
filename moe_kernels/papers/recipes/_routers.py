"""Functions for models with MoE layers: the routing of a forward pass, experts switched off, sums of the losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels.nn.gates import Gate, GateOutput
from moe_kernels.nn.losses import symmetric_kl
from moe_kernels.nn.moe import MoE, MoEOutput
from moe_kernels.nn.policies import TokenChoice
from moe_kernels.papers.recipes import Routing
from moe_kernels.plan import RoutingPlan

Part = TypeVar("Part", bound=nn.Module)


def forward_with_routing(model: nn.Module, *args: Any) -> tuple[Tensor, list[MoEOutput], list[Routing]]:
    """Returns the two results of model(*args), y and the outputs of its MoE layers, and the routing of each layer."""
    probs: list[Tensor | None] = []

    def append_probs(gate: Gate, args: tuple[Tensor, ...]) -> None:
        probs.append(gate.router_probs(*args))

    with ExitStack() as stack:
        for layer in modules_of(model, MoE):
            stack.callback(layer.gate.register_forward_pre_hook(append_probs).remove)
        y, outputs = model(*args)
    weights = [out.gates[0].weights.detach() if out.gates[0].dense else None for out in outputs]
    used = [out.plan.used for out in outputs]
    return y, outputs, [Routing(*each) for each in zip(used, probs, weights, strict=True)]


@contextmanager
def experts_off(model: nn.Module) -> Iterator[None]:
    """Inside the `with` block the experts of every MoE layer return zeros."""
    with ExitStack() as stack:
        for layer in modules_of(model, MoE):
            hook = layer.experts.register_forward_hook(lambda experts, args, y: torch.zeros_like(y))
            stack.callback(hook.remove)
        yield


@dataclass(frozen=True)
class RandomOrder:
    """The policy `of`, but an expert with too many requests keeps a random choice: the control of batch priority."""

    of: TokenChoice

    def __call__(self, gate: GateOutput, training: bool) -> tuple[RoutingPlan, Tensor]:
        plan, _ = replace(self.of, priority="max")(replace(gate, weights=torch.rand_like(gate.weights)), training)
        return plan, gate.weights


@contextmanager
def policies(model: nn.Module, *, factor_eval: float, priority: str | None) -> Iterator[None]:
    """Inside the `with` block the TokenChoice of every MoE layer has these values; priority "random": RandomOrder."""
    before = [(layer, layer.policy) for layer in modules_of(model, MoE)]
    try:
        for layer, policy in before:
            assert isinstance(policy, TokenChoice)
            known = None if priority == "random" else priority
            changed = replace(policy, factor_eval=factor_eval, priority=known)
            layer.policy = RandomOrder(changed) if priority == "random" else changed
        yield
    finally:
        for layer, policy in before:
            layer.policy = policy


def regularisers(outputs: Sequence[MoEOutput]) -> dict[str, Tensor]:
    """The losses of all layers by name; losses of the same name are added."""
    found: dict[str, Tensor] = {}
    for out in outputs:
        for name, loss in out.losses.items():
            found[name] = found[name] + loss if name in found else loss
    return found


def second_pass(logits: Tensor, again: Tensor, y: Tensor, alpha: float) -> dict[str, Tensor]:
    """THOR's further losses, by name: of a second pass, and alpha times the divergence of the logits of both passes.

    logits, again: (B, classes) of the first and the second pass. y: targets (B,).
    """
    return {"second pass": F.cross_entropy(again, y), "consistency": alpha * symmetric_kl(logits, again)}


def modules_of(model: nn.Module, kind: type[Part]) -> list[Part]:
    return [module for module in model.modules() if isinstance(module, kind)]
