"""Layers under DistributedDataParallel or fully_shard, on one rank; most checks compare with the bare layer."""

from __future__ import annotations

import copy

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_kernels import nn as mnn

D, E, H, T, IDS = 8, 4, 8, 12, 9
X = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
TOKENS = torch.arange(T) % IDS


def stages():
    """By name: a function that makes a layer, and one that changes the layer before a step.

    In each layer some parameters get gradients in only some of the nine steps.
    """

    def by_itself(layer, step):
        pass  # the layer itself changes: LocalSearch after 3 steps, CompetitionGate by a random draw in each step

    def stable(layer, step):
        if step == 3:
            layer.gate.begin_stage_two()

    def staged(layer, step):
        layer.gate.stage = 1 + (step >= 3) + (step >= 6)

    def experts():
        return mnn.ExpertMLP(E, D, H)

    def competing():
        mlp = experts()
        router = mnn.TopKGate(D, E, 2, noise="jitter")
        coin = torch.Generator().manual_seed(0)
        return mnn.MoE(mnn.CompetitionGate(router, mlp, rate=0.5, coin=coin), mlp)

    def of(gate):
        return mnn.MoE(gate, experts())

    search = lambda: mnn.LocalSearch(E, 3)  # noqa: E731
    return {
        "permuted": (lambda: of(mnn.PermutedGate(mnn.SoftmaxGate(D, E), search())), by_itself),
        "tasks": (lambda: mnn.MultiGateMoE([mnn.SoftmaxGate(D, E)] * 2, experts(), search()), by_itself),
        "stable": (lambda: of(mnn.StableGate(D, E, IDS)), stable),
        "staged": (lambda: of(mnn.StagedGate(mnn.SoftmaxGate(D, E), mnn.TopKGate(D, E, 2), distill=0.1)), staged),
        "competition": (competing, by_itself),
    }


def steps(layer, call, change):
    """For each of nine steps the gradients by name, without those that are None or zero."""
    optimizer, found = torch.optim.SGD(layer.parameters(), 0.1), []
    for step in range(9):
        torch.manual_seed(step)
        change(layer, step)
        optimizer.zero_grad()
        out = call(X, TOKENS)
        y = sum(out.y) if isinstance(out.y, tuple) else out.y
        (y.square().sum() + out.loss).backward()
        found.append({name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None})
        optimizer.step()
    return [{name: each for name, each in step.items() if each.any()} for step in found]


def seeded(make):
    torch.manual_seed(0)
    layer = make()
    torch.manual_seed(5)
    return layer


def ddp(name: str) -> None:
    make, change = stages()[name]
    layer, got = seeded(make), seeded(make)
    expected = steps(layer, layer, change)
    found = steps(got, DistributedDataParallel(got), change)
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys(), (one.keys(), other.keys())
        for key in one:
            torch.testing.assert_close(one[key], other[key])


def gradients(layer):
    out = layer(X)
    y = sum(out.y) if isinstance(out.y, tuple) else out.y
    (y.square().sum() + out.loss).backward()
    full = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return out, {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in full.items()}


def sharded(make, *parts):
    """Applies fully_shard to `parts` and to the layer; the loss and the gradients change only by rounding."""
    expected = gradients(seeded(make))
    layer = seeded(make)
    for part in parts:
        fully_shard(layer.get_submodule(part))
    fully_shard(layer)
    found = gradients(layer)
    torch.testing.assert_close(found[0].loss, expected[0].loss)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient)


def root() -> None:
    sharded(plain)


def experts_and_root() -> None:
    sharded(plain, "experts")


def several_gates() -> None:
    sharded(tasks, "experts")


def competition() -> None:
    sharded(competing, "experts")


def plain():
    return mnn.MoE(mnn.TopKGate(D, E, 2, balance=0.1), mnn.ExpertMLP(E, D, H))


def tasks():
    return mnn.MultiGateMoE([mnn.SoftmaxGate(D, E), mnn.TopKGate(D, E, 2)], mnn.ExpertMLP(E, D, H))


def competing():
    experts = mnn.ExpertMLP(E, D, H)
    return mnn.MoE(mnn.CompetitionGate(mnn.TopKGate(D, E, 2), experts, rate=1), experts)


def narrowed() -> None:
    """A gate to which fully_shard was applied separately computes in float32, though the model's policy is bfloat16."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(D, D), mnn.MoE(mnn.TopKGate(D, E, 2), mnn.ExpertMLP(E, D, H)))
    router, seen = copy.deepcopy(model[1].gate), []
    fully_shard(model[1].gate)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model[1].gate.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    out = model(X)
    assert out.y.dtype == torch.bfloat16
    expected = router(seen[0])
    assert torch.equal(out.gates[0].experts, expected.experts)
    assert out.gates[0].weights.dtype == torch.float32
    torch.testing.assert_close(out.gates[0].weights, expected.weights)
    out.y.float().square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def made_on_meta() -> None:
    with torch.device("meta"):
        layer = mnn.MoE(mnn.TopKGate(D, E, 2), mnn.ExpertMLP(E, D, H))
    fully_shard(layer)
    layer.to_empty(device="cpu")
    for each in layer.modules():
        if hasattr(each, "reset_parameters"):
            each.reset_parameters()
    for name, parameter in layer.named_parameters():
        full = parameter.full_tensor()
        bound = (H if name in ("experts.w_out", "experts.b_out") else D) ** -0.5
        assert full.isfinite().all(), name
        assert bool(full.any()) == (name != "gate.linear.bias"), name
        assert full.abs().max() <= bound, name
    assert layer(X).y.isfinite().all()
