"""n ranks, each with a part of the tokens, compared with one process that has all tokens."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import moe_kernels as mk
from moe_kernels import nn as mnn
from moe_kernels.nn.experts import Experts
from moe_kernels.nn.parallel import ExpertParallel, GlobalPolicy

T, D, H, E = 48, 12, 20, 8


class Model(nn.Module):
    """scale * (h + layer(h)) with h = first(x), so that gradients flow on to a layer below the experts."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(D, D), layer
        self.scale = nn.Parameter(torch.ones(1))  # one element: with fully_shard only one rank has it

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        h = self.first(x)
        y = self.layer(h, ids).y
        return self.scaled(h + (sum(y) if isinstance(y, tuple) else y))

    def scaled(self, x: Tensor) -> Tensor:
        return self.scale * x


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def tokens(total: int = T) -> Tensor:
    return torch.randn(total, D, generator=torch.Generator().manual_seed(1))


def unfused(experts: Experts) -> None:
    """Makes the experts run unfused, as expert-parallel ones do: the fused kernel adds in another order."""
    experts.forward = lambda x, plan, weights: Experts.forward(experts, x, plan, weights)


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def mean_square(y: Tensor) -> Tensor:
    return y.square().sum(-1).mean()


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """y, dx and the parameters' gradients by name."""
    x = x.clone().requires_grad_()
    y = model(x)
    mean_square(y).backward()
    found = {name: full(each.grad) for name, each in model.named_parameters() if each.grad is not None}
    return y.detach(), x.grad, found


def agree(make: Callable[[object], mnn.MoE], one_policy: object, policy: object, capacity: int | None = None) -> None:
    """Compares y, dx and the experts' gradients with one process bit for bit, other gradients up to rounding.

    make(one_policy) makes the layer of one process; the ranks' layer has `policy` instead. The loss is the mean over
    tokens of |y|^2. A rank's loss is the mean over its own tokens, so its dx is `ranks` times that of one process.
    """
    mesh, x = mesh_of_all(), tokens()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = Model(make(one_policy))
    twin = copy.deepcopy(model)
    twin.layer.policy = policy
    unfused(model.layer.experts)
    y, dx, expected = gradients(model, x)

    parallelize_module(twin, mesh["ep"], {"layer.experts": ExpertParallel(capacity=capacity)})
    own = x.chunk(ranks)[rank]
    y_own, dx_own, found = gradients(twin, own)
    assert torch.equal(y_own, y.chunk(ranks)[rank])
    assert torch.equal(dx_own, ranks * dx.chunk(ranks)[rank])
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        if ".experts." in name:
            assert torch.equal(grad, expected[name]), name
        else:
            dist.all_reduce(grad)
            torch.testing.assert_close(grad / ranks, expected[name], rtol=1e-5, atol=1e-6)


def mlp(k: int = 2, order: str = "topk_softmax", activation: str = "gelu") -> Callable[[object], mnn.MoE]:
    return lambda policy: mnn.MoE(
        mnn.TopKGate(D, E, k, order=order), mnn.ExpertMLP(E, D, H, activation=activation), policy
    )


def group() -> int:
    return T // dist.get_world_size()


def _expert_choice(policy: object) -> mnn.MoE:
    return mnn.MoE(mnn.SoftmaxGate(D, E), mnn.ExpertMLP(E, D, H), policy)


def _one_layer(policy: object) -> mnn.MoE:
    return mnn.MoE(mnn.TopKGate(D, E, 2), mnn.ExpertLayer(E, D, D), policy)


# By name: the arguments of `agree`.
CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "dropless": lambda: (mlp(), mnn.TokenChoice(group=group()), mnn.TokenChoice()),
    "three_choices": lambda: (mlp(3, activation="swiglu"), mnn.TokenChoice(), mnn.TokenChoice()),
    "one_choice": lambda: (mlp(1, "softmax_topk"), mnn.TokenChoice(), mnn.TokenChoice()),
    "priority": lambda: (mlp(), *(mnn.TokenChoice(1.0, priority="max", group=each) for each in (group(), None))),
    "capacity": lambda: (mlp(), mnn.TokenChoice(1.25, group=group()), mnn.TokenChoice(1.25), -(-group() * 10 // 32)),
    "room": lambda: (mlp(3), mnn.TokenChoice(group=group()), mnn.TokenChoice(), group()),
    "expert_choice": lambda: (_expert_choice, mnn.ExpertChoice(2.0, group=group()), mnn.ExpertChoice(2.0)),
    "one_layer": lambda: (_one_layer, mnn.TokenChoice(group=group()), mnn.TokenChoice()),
}


def batch_invariant() -> None:
    """In the mode batch_invariant one process has the bits of several ranks with any parts of the tokens: y, dx and the
    gate's weights of whole layers. Gradients of the experts are sums over tokens, in another order."""
    mesh, ranks, rank = mesh_of_all(), dist.get_world_size(), dist.get_rank()
    experts = 12  # divisible by two, three and four ranks
    for layer in (
        lambda: mnn.MoE(
            mnn.TopKGate(D, experts, 3, order="softmax_topk"), mnn.ExpertMLP(experts, D, H), pass_through=True
        ),
        lambda: mnn.MoE(mnn.SoftmaxGate(D, experts), mnn.ExpertMLP(experts, D, H, activation="swiglu")),
        lambda: mnn.MoE(mnn.TreeGate(D, experts, 2), mnn.ExpertLayer(experts, D, D), mnn.NonzeroWeights()),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            one = layer().to(dtype)
            several = copy.deepcopy(one)
            x = tokens(67).to(dtype)
            parts = [1, 20, 0, 30][:ranks]
            parts[-1] = 67 - sum(parts[:-1])
            parallelize_module(several, mesh["ep"], {"experts": ExpertParallel()})

            def results(model: nn.Module, part: Tensor) -> tuple[Tensor, ...]:
                part = part.clone().requires_grad_()
                with mk.batch_invariant():
                    out = model(part)
                (out.y.float().square().sum() + out.gates[0].weights[:, 0].sum()).backward()
                return out.y.detach(), out.gates[0].weights.detach(), part.grad

            expected = [each.split(parts)[rank] for each in results(one, x)]
            found = results(several, x.split(parts)[rank])
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
            for own, other in zip(one.experts.parameters(), several.experts.parameters(), strict=True):
                torch.testing.assert_close(full(other.grad) * ranks, own.grad, rtol=1e-2, atol=1e-2)


def case(name: str) -> None:
    agree(*CASES[name]())


def global_choice() -> None:
    """GlobalPolicy routes the tokens of all ranks together; `requested` and `dropped` count requests of all ranks."""
    mesh = mesh_of_all()["ep"]
    for policy, gate in (
        (mnn.ExpertChoice(2.0), mnn.SoftmaxGate(D, E)),
        (mnn.PriorityRouting(), mnn.SoftmaxGate(D, E)),
        (mnn.TokenChoice(1.0), mnn.TopKGate(D, E, 1, order="softmax_topk")),
        (mnn.TokenChoice(), mnn.TopKGate(D, E, 3)),
        (mnn.TokenChoice(0.8, order="token"), mnn.TopKGate(D, E, 2)),
        (mnn.NonzeroWeights(), mnn.TreeGate(D, E, 2, gamma=0.05)),
    ):
        agree(
            lambda policy, gate=gate: mnn.MoE(gate, mnn.ExpertMLP(E, D, H), policy), policy, GlobalPolicy(policy, mesh)
        )
        x = tokens()
        one, _ = policy(gate(x), True)
        plan, _ = GlobalPolicy(policy, mesh)(gate(x.chunk(mesh.size())[dist.get_rank()]), True)
        assert torch.equal(plan.requested, one.requested)
        assert torch.equal(plan.dropped, one.dropped)


def random_shapes() -> None:
    """Experts without a gate, with random sizes, policies and gate weights."""
    generator, ranks, rank = random.Random(dist.get_world_size()), dist.get_world_size(), dist.get_rank()
    mesh = mesh_of_all()["ep"]
    policies = {
        "dropless": mnn.TokenChoice,
        "static": mnn.TokenChoice,
        "capacity": partial(mnn.TokenChoice, 1.0),
        "by priority": partial(mnn.TokenChoice, 1.0, priority="max"),
        "expert choice": partial(mnn.ExpertChoice, 2.0),
    }
    for case in range(20):
        sizes = [4, 7, 33, 128], [5, 16, 72], [4, 8, 32], [1, 3, 40], [1, 2, 4]
        dim, hidden, count, own, k = map(generator.choice, sizes)
        kind = generator.choice(list(policies))
        torch.manual_seed(case)
        one = mnn.ExpertMLP(count, dim, hidden, activation=generator.choice(["gelu", "relu", "swiglu"]))
        sharded = copy.deepcopy(one)
        unfused(one)
        parallelize_module(sharded, mesh, ExpertParallel(own if kind == "static" else None))
        scores = torch.randn(own * ranks, count).softmax(-1)
        weights, experts = scores.topk(k)
        gate = mnn.GateOutput.of_gates(scores)
        if kind != "expert choice":
            gate = mnn.GateOutput(weights, experts.to(torch.int32), count)
        x, grad = torch.randn(2, own * ranks, dim)
        part, policy = slice(rank * own, (rank + 1) * own), policies[kind](group=own)
        expected = _results(one, policy, gate, x, grad, slice(None))
        found = _results(sharded, policy, gate, x, grad, part)
        for name, each in found.items():
            target = expected[name][part] if name in ("y", "dx", "dweights") else expected[name] / ranks
            assert torch.equal(each, target), (name, kind, dim, hidden, count, own, k)


def _results(
    experts: Experts, policy: Any, gate: mnn.GateOutput, x: Tensor, grad: Tensor, part: slice
) -> dict[str, Tensor]:
    """By name: the output for the tokens `part`, and the gradients of x, the gate weights and the parameters."""
    x, weights = (each[part].clone().requires_grad_() for each in (x, gate.weights))
    plan, kept = policy(mnn.GateOutput(weights, gate.experts[part], gate.num_experts, gate.dense), True)
    y = experts(x, plan, kept)
    y.backward(grad[part])
    found = {name: full(each.grad) for name, each in experts.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, "dweights": weights.grad, **found}
