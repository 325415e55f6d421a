"""Gates and layers of experts for tests."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_kernels import nn as mnn

D, E, H, IDS = 6, 4, 5, 12
LOSSES = {"importance": 0.1, "balance": 0.1, "z": 0.1}


def competing(rate=1.0):
    return mnn.CompetitionGate(mnn.TopKGate(D, E, 2), mnn.ExpertMLP(E, D, H), rate=rate)


def staged(**o):
    gate = mnn.StagedGate(mnn.SoftmaxGate(D, E, **o), mnn.TopKGate(D, E, 1, order="softmax_topk", **o), distill=1.0)
    gate.stage = 2
    return gate


# By name: a function that makes the gate. All but two accept device and dtype.
EVERY = {
    "softmax": lambda **o: mnn.SoftmaxGate(D, E, noise=True, importance=0.1, **o),
    "topk": lambda **o: mnn.TopKGate(D, E, 2, noise="jitter", **LOSSES, **o),
    "vmoe": lambda **o: mnn.TopKGate(D, E, 2, order="softmax_topk", noise="vmoe", load=0.1, **o),
    "tree": lambda **o: mnn.TreeGate(D, E, 2, entropy=0.1, **o),
    "tree, route": lambda **o: mnn.TreeGate(D, E, 2, route=True, **o),
    "dselect": lambda **o: mnn.DSelectKGate(D, 3, 2, entropy=0.1, **o),
    "hash": lambda device=None, dtype=None: mnn.HashGate(IDS, E, device=device),
    "manual": lambda device=None, dtype=None: mnn.ManualGate([0, 1, 2, 3] * 3, device=device),
    "random": lambda: mnn.RandomGate(E),
    "xmoe": lambda **o: mnn.XMoEGate(D, E, 2, **o),
    "xmoe cosine": lambda **o: mnn.XMoEGate(D, E, 2, score="cosine", **o),
    "hyper": lambda **o: mnn.HyperRouterGate(D, E, 2, hidden=8, **o),
    "stable": lambda **o: mnn.StableGate(D, E, IDS, **o),
    "ensemble": lambda **o: mnn.EnsembleGate(D, E, 1, noise=True, **o),
    "staged": staged,
    "permuted": lambda **o: mnn.PermutedGate(mnn.TreeGate(D, E, 2, **o), mnn.LocalSearch(E, 5, **o)),
    "competition": competing,
}


def layer(gate, policy=None, experts=None, **options):
    """A layer with this gate. Default experts: those of a CompetitionGate, otherwise a new ExpertMLP."""
    (own,) = getattr(gate, "_experts", (mnn.ExpertMLP(gate.num_experts, D, H),))
    return mnn.MoE(gate, experts or own, policy, **options)


LAYERS = {name: lambda make=make: layer(make()) for name, make in EVERY.items()} | {
    "capacity": lambda: layer(mnn.TopKGate(D, E, 2), mnn.TokenChoice(1.25)),
    "groups": lambda: layer(mnn.TopKGate(D, E, 2), mnn.TokenChoice(1.05, priority="max", multiple_of=4, group=4)),
    "expert choice": lambda: layer(mnn.SoftmaxGate(D, E), mnn.ExpertChoice(1.5)),
    "priority": lambda: layer(mnn.SoftmaxGate(D, E), mnn.PriorityRouting()),
    "nonzero": lambda: layer(mnn.TreeGate(D, E, 2), mnn.NonzeroWeights()),
    "swiglu": lambda: layer(mnn.TopKGate(D, E, 2), experts=mnn.ExpertMLP(E, D, H, activation="swiglu", bias=False)),
    "one layer": lambda: layer(mnn.TopKGate(D, E, 2), experts=mnn.ExpertLayer(E, D, H)),
    "tensor": lambda: layer(mnn.TopKGate(D, E, 2), output="tensor"),
    "pass": lambda: layer(mnn.TopKGate(D, E, 1, order="softmax_topk"), pass_through=True),
    "tasks": lambda: mnn.MultiGateMoE([mnn.SoftmaxGate(D, E), mnn.TopKGate(D, E, 2)], mnn.ExpertLayer(E, D, H)),
}
ON_THE_HOST = ("permuted", "competition")  # layers whose training calls a function that torch.compile does not trace
# Layers that tests run in training only, since evaluation computes the same.
NO_OTHER_TRAINING = (
    "hash",
    "manual",
    "xmoe cosine",
    "hyper",
    "nonzero",
    "swiglu",
    "one layer",
    "tensor",
    "pass",
    "tasks",
)


def inputs(tokens):
    """x (T, D) and ids (T,) for T = `tokens`; the values depend only on T."""
    return torch.randn(tokens, D, generator=torch.Generator().manual_seed(tokens)), torch.arange(tokens) % 2


def found(call, parameters, tokens=9):
    """[*y, loss, *gradients to x and parameters] of a call on `tokens` tokens. An input without gradient is left out.

    loss: the sum of the squares of y, plus the layer's own loss.
    """
    torch.manual_seed(1)
    x, ids = inputs(tokens)
    out = call(x.requires_grad_(), ids)
    y = tree_leaves(getattr(out, "y", out))
    loss = sum(each.square().sum() for each in y) + getattr(out, "loss", 0)
    leaves = [x, *(each for each in parameters if each.requires_grad)]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*y, loss, *(each for each in gradients if each is not None)]


def assert_close(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class Operators(TorchDispatchMode):
    """Records the names of the operators of moe_kernels that run inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "moe_kernels":
            self.names.append(op._opname)
        return op(*args, **(kwargs or {}))


class Lora(nn.Module):
    """linear(x) + B A x, as PEFT wraps a layer. B starts at 0."""

    def __init__(self, linear: nn.Linear, bare: bool = False) -> None:
        super().__init__()
        self.base_layer = linear.requires_grad_(False)
        self.a = nn.Linear(linear.in_features, 2, bias=False)
        self.b = nn.Linear(2, linear.out_features, bias=False)
        nn.init.zeros_(self.b.weight)
        if not bare:
            self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))
