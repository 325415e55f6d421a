"""Gates in layers that torch.utils.checkpoint recomputes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moe_kernels.nn as mnn
from moe_kernels.nn.gates import CompetitionGate, PermutedGate, RandomGate
from moe_kernels.nn.schedules import falling_rate

T, D, E = 12, 8, 4


def trained(layer, again: bool, steps: int = 5):
    """A copy of the layer after `steps` forward and backward passes on different tokens, and each pass's gradients."""
    layer, found = copy.deepcopy(layer), []
    for step in range(steps):
        torch.manual_seed(step)
        x, weight = torch.randn(T, D), torch.randn(T, D)
        out = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        layer.zero_grad()
        (out.y * weight).sum().backward()
        found.append({name: each.grad for name, each in layer.named_parameters() if each.grad is not None})
    return layer, found


def permuted():
    return PermutedGate(mnn.SoftmaxGate(D, E), mnn.LocalSearch(E, 4, noise=0.1))


def noisy():
    return mnn.TopKGate(D, E, 2, noise="vmoe", order="softmax_topk")


@pytest.mark.parametrize("make", [permuted, noisy, lambda: RandomGate(E)], ids=["permuted", "noisy", "random"])
def test_gradients_are_those_without(make):
    if make is permuted:
        pytest.importorskip("scipy", reason="hardening needs scipy")
    torch.manual_seed(0)
    layer = mnn.MoE(make(), mnn.ExpertMLP(E, D, 6))
    (once, expected), (twice, found) = (trained(layer, again) for again in (False, True))
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    if make is permuted:
        assert once.gate.search.step == twice.gate.search.step == 4
        assert torch.equal(once.gate.search.source, twice.gate.search.source)


@pytest.mark.parametrize("own_coin", [False, True])
@pytest.mark.parametrize("rate", [0.5, falling_rate], ids=["constant", "falling"])
def test_a_competition_is_not_decided_twice(rate, own_coin):
    def layer():
        experts, coin = mnn.ExpertMLP(E, D, 6), torch.Generator().manual_seed(3) if own_coin else None
        return mnn.MoE(CompetitionGate(mnn.TopKGate(D, E, 2), experts, rate=rate, coin=coin), experts)

    found = []
    for again in (False, True):
        torch.manual_seed(0)
        made, gradients = layer(), []
        for step in range(8):
            torch.manual_seed(step)
            x = torch.randn(T, D)
            out = checkpoint(made, x, use_reentrant=False) if again else made(x)
            made.zero_grad()
            out.y.square().sum().backward()
            gradients.append(made.experts.w_in.grad)
        assert made.gate.steps == 8
        found.append(gradients)
    assert all(map(torch.equal, *found))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("kind", ["topk", "softmax", "random", "ensemble"])
def test_noise_of_a_generator_is_refused_where_it_would_be_another(kind, compiled):
    generator = torch.Generator().manual_seed(1)
    gate = {
        "topk": lambda: mnn.TopKGate(D, E, 2, noise="vmoe", order="softmax_topk", generator=generator),
        "softmax": lambda: mnn.SoftmaxGate(D, E, noise=True, generator=generator),
        "random": lambda: RandomGate(E, generator=generator),
        "ensemble": lambda: mnn.EnsembleGate(D, E, 1, noise=True, generator=generator),
    }[kind]()
    layer, ids = mnn.MoE(gate, mnn.ExpertMLP(E, D, 6)), torch.arange(T) % 2
    if compiled:
        torch._dynamo.reset()
        layer = torch.compile(layer, backend=compiled)
    layer(torch.randn(T, D), ids).y.sum().backward()
    out = checkpoint(layer, torch.randn(T, D), ids, use_reentrant=False)
    with pytest.raises(RuntimeError, match="generator would draw other numbers"):
        out.y.sum().backward()
