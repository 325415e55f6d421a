"""Gates in layers that torch.utils.checkpoint recomputes."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moe_kernels.nn as mnn
from moe_kernels.nn import _recompute
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


def test_what_is_drawn_after_a_competition_is_drawn_again():
    """The coin takes a number of torch's generator in the repeated forward too, so dropout keeps its masks."""
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        experts = mnn.ExpertMLP(E, D, 6)
        layer = mnn.MoE(CompetitionGate(mnn.TopKGate(D, E, 2), experts, rate=0.5), experts, output="tensor")

        def call(x, layer=layer):
            return torch.nn.functional.dropout(layer(x), 0.5)

        x = torch.randn(T, D, requires_grad=True)
        (checkpoint(call, x, use_reentrant=False) if again else call(x)).square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


# Each gate calls one function, at which torch breaks its graph; what AOTAutograd does around it needs one gate.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "compiled"),
    [(kind, how) for kind in ("topk", "softmax", "random", "ensemble") for how in (None, "eager")]
    + [("topk", "aot_eager")],
)
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


def gate_of(kind: str):
    if kind == "search":
        pytest.importorskip("scipy", reason="hardening needs scipy")
        return PermutedGate(mnn.SoftmaxGate(D, E), mnn.LocalSearch(E, 40, noise=0.1)), mnn.ExpertMLP(E, D, 6)
    experts = mnn.ExpertMLP(E, D, 6)
    coin = torch.Generator().manual_seed(3) if kind == "own coin" else None
    rate = (lambda step: float(step % 3 == 1)) if kind == "rate of steps" else 0.5
    return CompetitionGate(mnn.TopKGate(D, E, 2), experts, rate=rate, coin=coin), experts


class Twice(torch.nn.Module):
    """A layer that runs twice in one forward."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.tanh() + self.layer(x))


def passes(layer, run, count: int) -> list[torch.Tensor]:
    """The gradients of `count` forwards that all run before one backward each, the last forward's first."""
    torch.manual_seed(0)
    xs = [torch.randn(T, D, requires_grad=True) for _ in range(count)]
    ys = [run(layer, x) for x in xs]
    for y in reversed(ys):
        y.square().sum().backward()
    return [each.grad for each in (*xs, *layer.parameters()) if each.grad is not None]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("shape", ["once", "twice"])
@pytest.mark.parametrize("kind", ["search", "coin", "own coin", "rate of steps"])
def test_several_forwards_before_a_backward(kind, shape, reentrant):
    """Each repeated forward takes its own step: its temperature, or whether experts compete."""
    torch.manual_seed(5)
    gate, experts = gate_of(kind)
    layer = mnn.MoE(gate, experts, output="tensor")
    layer = Twice(layer) if shape == "twice" else layer
    other = copy.deepcopy(layer)
    want = passes(layer, lambda call, x: call(x), 6)
    got = passes(other, lambda call, x: checkpoint(call, x, use_reentrant=reentrant), 6)
    assert len(got) == len(want)
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("kind", ["search", "own coin"])
def test_a_checkpoint_in_a_reentrant_one_is_right_for_one_forward_before_a_backward(kind):
    def nested(call, x):
        return checkpoint(lambda x: checkpoint(call, x, use_reentrant=False), x, use_reentrant=True)

    torch.manual_seed(5)
    gate, experts = gate_of(kind)
    layer = mnn.MoE(gate, experts, output="tensor")
    other = copy.deepcopy(layer)
    for _ in range(4):
        want = passes(layer, lambda call, x: call(x), 1)
        got = passes(other, nested, 1)
        assert len(got) == len(want)
        for one, two in zip(got, want, strict=True):
            torch.testing.assert_close(one, two)
    first, _ = (nested(other, torch.randn(T, D, requires_grad=True)) for _ in range(2))
    name = "LocalSearch" if kind == "search" else "CompetitionGate"
    with pytest.raises(
        RuntimeError, match=f"^{name}: a checkpoint repeats a forward in backward, 2 forwards ran before"
    ):
        first.sum().backward()


@pytest.mark.parametrize("kind", ["search", "own coin"])
def test_a_repeated_forward_that_may_be_any_of_several_is_refused_by_name(kind, monkeypatch):
    """As in checkpoints of other packages, where torch's objects for a checkpointed call are missing."""
    monkeypatch.setattr(_recompute, "_checkpointed_call", lambda: (None, False))
    gate, experts = gate_of(kind)
    layer = mnn.MoE(gate, experts, output="tensor")
    for _ in range(3):  # one forward, one backward
        checkpoint(layer, torch.randn(T, D, requires_grad=True), use_reentrant=False).sum().backward()
    first, _ = (checkpoint(layer, torch.randn(T, D, requires_grad=True), use_reentrant=False) for _ in range(2))
    name = "LocalSearch" if kind == "search" else "CompetitionGate"
    with pytest.raises(
        RuntimeError, match=f"{name}: a checkpoint repeats a forward in backward, 2 forwards ran before"
    ):
        first.sum().backward()


def test_what_is_remembered_goes_with_the_graph():
    gate, experts = gate_of("own coin")
    layer = mnn.MoE(gate, experts, output="tensor")
    y = checkpoint(layer, torch.randn(T, D, requires_grad=True), use_reentrant=False)
    copy.deepcopy(layer)
    del y
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, _recompute._CheckpointFrame)]
