"""Layers whose experts are split over ranks; most checks compare them with one process, up to rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import moe_kernels as mk
from moe_kernels import nn as mnn
from moe_kernels.nn.parallel import ExpertParallel, GlobalPolicy
from tests.helpers.layers import Operators
from tests.helpers.ranks.exact import D, E, H, Model, T, full, mean_square, mesh_of_all, mlp, tokens


def same(
    layer: nn.Module,
    ids: Tensor | None = None,
    *,
    prepare: Callable[[nn.Module], Any] = lambda model: None,
    capacity: int | None = None,
) -> tuple[nn.Module, nn.Module]:
    """Compares outputs, dx and averaged gradients of the ranks with one process that has all tokens.

    prepare: is called with each model before its step. capacity: of ExpertParallel. Returns the model of one process
    and that of the ranks.
    """
    mesh, x = mesh_of_all(), tokens()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    one = copy.deepcopy(Model(layer))
    model = copy.deepcopy(one)
    parallelize_module(model, mesh["ep"], {"layer.experts": ExpertParallel(capacity)})
    results = []
    for each, part in ((one, slice(None)), (model, slice(rank * T // ranks, (rank + 1) * T // ranks))):
        prepare(each)
        torch.manual_seed(2)
        given = x[part].clone().requires_grad_()
        y = each(given, None if ids is None else ids[part])
        mean_square(y).backward()
        results.append((y.detach(), given.grad))
    (y, dx), (y_own, dx_own) = results
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y_own, y.chunk(ranks)[rank], **close)
    torch.testing.assert_close(dx_own / ranks, dx.chunk(ranks)[rank], **close)
    for (name, a), b in zip(model.named_parameters(), one.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is None:
            continue
        grad = full(a.grad)
        if ".experts." not in name:
            dist.all_reduce(grad.div_(ranks))
        torch.testing.assert_close(grad, b.grad, **close, msg=lambda text, name=name: f"{name}: {text}")
    return one, model


def experts(**options: Any) -> mnn.ExpertMLP:
    return mnn.ExpertMLP(E, D, H, **options)


def tree_gate() -> None:
    layer = mnn.MoE(mnn.TreeGate(D, E, 2, gamma=0.5), experts(), mnn.NonzeroWeights())
    torch.nn.init.uniform_(layer.gate.split_weight, -1, 1)
    _, model = same(layer)
    out = model.layer(tokens())
    assert 0 < out.plan.kept.sum() < T * E


def several_gates() -> None:
    gates = [mnn.TopKGate(D, E, 2), mnn.TreeGate(D, E, 1, gamma=0.5)]
    same(mnn.MultiGateMoE(gates, mnn.ExpertLayer(E, D, D)))


def local_search() -> None:
    """Training permutes gate weights by a soft matrix, evaluation by a permutation that is the same on all ranks."""
    layer = mnn.MultiGateMoE([mnn.TopKGate(D, E, 2)] * 2, mnn.ExpertLayer(E, D, D), mnn.LocalSearch(E, 10))
    one, model = same(layer)
    one.zero_grad()
    _, model = same(one.layer.eval())
    source = model.layer.search.source.clone()
    assert not torch.equal(source, torch.arange(E))
    dist.broadcast(source, 0)
    assert torch.equal(source, model.layer.search.source)


def competition() -> None:
    for through in (True, False):
        mlps = experts(activation="relu")
        gate = mnn.CompetitionGate(mnn.TopKGate(D, E, 2), mlps, rate=1.0, alpha=2.0, through_norms=through)
        layer = mnn.MoE(gate, mlps)
        one, model = same(layer)
        out, expected = model.layer(tokens()), one.layer(tokens())
        assert torch.equal(out.plan.slot_expert, expected.plan.slot_expert)
        for capacity in (None, T):
            same(layer, capacity=capacity)


def norms_of_uneven_batches() -> None:
    """Ranks have different numbers of tokens; rank 0 has none."""
    mlps = experts(activation="relu")
    x = tokens()
    expected = mlps.norms(x)
    parallelize_module(mlps, mesh_of_all()["ep"], ExpertParallel())
    rank = dist.get_rank()
    ends = [0, 0, 17, 30, T][: dist.get_world_size() + 1]
    own = slice(ends[rank], ends[rank + 1])
    torch.testing.assert_close(mlps.norms(x[own]), expected[own], rtol=1e-5, atol=1e-6)


def ensemble() -> None:
    ids = torch.arange(T) % 2
    same(mnn.MoE(mnn.EnsembleGate(D, E, 2, members=2), experts()), ids)


def thor() -> None:
    """In training each rank draws one expert for its batch; with equal seeds all ranks draw the same expert."""
    same(mnn.MoE(mnn.RandomGate(E), experts()))


def hash_gate() -> None:
    ids = torch.arange(T) * 7 % 31
    same(mnn.MoE(mnn.HashGate(31, E, frequencies=torch.arange(31)), experts()), ids)


def pass_through() -> None:
    same(mnn.MoE(mnn.StableGate(D, E, 31), experts(), pass_through=True), torch.arange(T) % 31)


def activation_checkpointing() -> None:
    def prepare(model: nn.Module) -> None:
        inner = model.layer.forward
        model.layer.forward = lambda *given: checkpoint(inner, *given, use_reentrant=False)

    for capacity in (None, T):
        same(mlp()(None), prepare=prepare, capacity=capacity)


def checkpointed_ties() -> None:
    """All logits are equal, and the recomputed forward pass must choose the same experts again."""
    layer = mlp()(mnn.TokenChoice(1.0))
    torch.nn.init.zeros_(layer.gate.linear.weight)
    parallelize_module(layer, mesh_of_all()["ep"], {"experts": ExpertParallel()})
    plain = copy.deepcopy(layer)
    x = tokens(T // 2).requires_grad_()
    checkpoint(layer, x, use_reentrant=False).y.sum().backward()
    dx, x.grad = x.grad, None
    plain(x).y.sum().backward()
    assert torch.equal(dx, x.grad)
    for a, b in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(a.grad), full(b.grad))


def autocast() -> None:
    mesh, x = mesh_of_all(), tokens()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    one = mlp()(mnn.TokenChoice(group=T // ranks))
    model = copy.deepcopy(one)
    parallelize_module(model, mesh["ep"], {"experts": ExpertParallel()})
    with torch.autocast("cpu", torch.bfloat16):
        expected, y = one(x).y, model(x.chunk(ranks)[rank]).y
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected.chunk(ranks)[rank], rtol=2e-2, atol=2e-2)
    expected.float().square().mean().backward()
    y.float().square().mean().backward()
    for a, b in zip(model.experts.parameters(), one.experts.parameters(), strict=True):
        assert a.grad.dtype == torch.float32
        torch.testing.assert_close(full(a.grad), b.grad, rtol=5e-2, atol=1e-3)


def uneven_batches() -> None:
    """Ranks have different numbers of tokens; rank 0 has none. The loss is a sum over tokens."""
    x, rank, ranks = tokens(), dist.get_rank(), dist.get_world_size()
    ends = [0, 0, 17, 30, T][: ranks + 1]
    layer = mlp()(None)
    for capacity in (None, T):
        one, model = copy.deepcopy(layer), copy.deepcopy(layer)
        parallelize_module(model, mesh_of_all()["ep"], {"experts": ExpertParallel(capacity)})
        own = slice(ends[rank], ends[rank + 1])
        expected, y = one(x[: ends[-1]]).y, model(x[own]).y
        torch.testing.assert_close(y, expected[own], rtol=1e-5, atol=1e-6)
        expected.square().sum().backward()
        y.square().sum().backward()
        for a, b in zip(model.experts.parameters(), one.experts.parameters(), strict=True):
            torch.testing.assert_close(ranks * full(a.grad), b.grad, rtol=1e-4, atol=1e-5)


def dropout() -> None:
    """Dropout runs after combine, on the token's rank, so the number of received rows does not change what it drops."""
    for layer in (mnn.MoE(mnn.TopKGate(D, E, 2), experts(dropout=0.5)), mlp()(None)):
        model = copy.deepcopy(layer)
        parallelize_module(model, mesh_of_all()["ep"], {"experts": ExpertParallel()})
        x = tokens(T if dist.get_rank() else T // 2)
        torch.manual_seed(3)
        y = model(x).y
        torch.manual_seed(3)
        torch.testing.assert_close(y, layer(x).y, rtol=1e-5, atol=1e-6)


def backend_of_the_experts() -> None:
    """It does all that ranks do with rows, but for plans."""
    for capacity in (None, T):
        mlps = experts(activation="relu", backend="reference")
        parallelize_module(mlps, mesh_of_all()["ep"], ExpertParallel(capacity))
        x, plan = tokens().requires_grad_(), mk.make_plan(torch.arange(T)[:, None] % E, E)
        with Operators() as seen:
            mlps(x, plan, torch.ones(T, 1)).sum().backward()
            mlps.norms(x)
        assert seen.names
        assert all(name.startswith(("make_plan", "plan_", "refuse_")) for name in seen.names), seen.names


def frozen_experts() -> None:
    layer = mlp()(None)
    layer.experts.requires_grad_(False)
    same(layer)


def balance_over_ranks() -> None:
    """With a process group a rank gets the loss of all tokens. Gradients are `ranks` times as large: DDP averages."""
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    generator = torch.Generator().manual_seed(4)
    every, noise = (torch.randn(T, E, generator=generator) for _ in range(2))
    losses = (
        lambda x, noise, group: mnn.importance_loss(x.softmax(-1), group),
        lambda x, noise, group: mnn.load_loss(x, x + noise / E, 2, 1 / E, group),
        lambda x, noise, group: mnn.balance_loss(
            x.softmax(-1), (x.argmax(-1)[:, None] == torch.arange(E)).sum(0), group
        ),
    )
    for loss in losses:
        own = every.chunk(ranks)[rank].clone().requires_grad_()
        all_of_them = every.clone().requires_grad_()
        expected, found = loss(all_of_them, noise, None), loss(own, noise.chunk(ranks)[rank], group)
        torch.testing.assert_close(found, expected)
        found.backward()
        expected.backward()
        torch.testing.assert_close(own.grad / ranks, all_of_them.grad.chunk(ranks)[rank], rtol=1e-4, atol=1e-7)
    gate = {"balance": 0.5, "importance": 0.25}
    torch.manual_seed(5)
    one = mnn.TopKGate(D, E, 2, **gate)
    part = mnn.TopKGate(D, E, 2, **gate, reduce=group)
    part.load_state_dict(one.state_dict())
    expected, found = one(tokens()).losses, part(tokens().chunk(ranks)[rank]).losses
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def masked_over_ranks() -> None:
    """Ranks with differently many real tokens: losses with a process group and GlobalPolicy are those of one process
    that has the real tokens alone."""
    ranks, rank, mesh = dist.get_world_size(), dist.get_rank(), mesh_of_all()["ep"]
    mask = torch.rand(T, generator=torch.Generator().manual_seed(5)) < torch.linspace(0, 1, T)
    x = torch.where(mask[:, None], tokens(), torch.nan)
    own, own_mask = x.chunk(ranks)[rank], mask.chunk(ranks)[rank]
    torch.manual_seed(6)
    one = mnn.TopKGate(D, E, 2, balance=0.5, importance=0.25)
    part = mnn.TopKGate(D, E, 2, balance=0.5, importance=0.25, reduce=dist.group.WORLD)
    part.load_state_dict(one.state_dict())
    expected, found = one(x[mask]), part(own, mask=own_mask)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=1e-7)
    expected.loss.backward()
    found.loss.backward()
    for mine, whole in zip(part.parameters(), one.parameters(), strict=True):
        dist.all_reduce(mine.grad)
        torch.testing.assert_close(mine.grad / ranks, whole.grad, rtol=1e-4, atol=1e-6)
    places = mask.cumsum(0)[rank * T // ranks : (rank + 1) * T // ranks][own_mask] - 1  # of own real tokens among all
    for policy in mnn.TokenChoice(0.75, order="token"), mnn.ExpertChoice(1.5), mnn.PriorityRouting(0.75):
        whole, weights = policy(one(x[mask]), True)
        plan, own_weights = GlobalPolicy(policy, mesh)(part(own, mask=own_mask), True, mask=own_mask)
        assert torch.equal(plan.slot_expert[own_mask], whole.slot_expert[places])
        assert (plan.slot_expert[~own_mask] == -1).all()
        torch.testing.assert_close(own_weights[own_mask], weights[places])
        assert torch.equal(plan.requested, whole.requested)
        assert torch.equal(plan.dropped, whole.dropped)


def compiled() -> None:
    """With a static capacity the layer is one graph."""
    _compiled(T, "aot_eager_default_partitioner")  # "aot_eager" would import torch._inductor
    layer = mlp()(None)
    parallelize_module(layer, mesh_of_all()["ep"], {"experts": ExpertParallel(1)})
    forward = torch.compile(lambda x: layer(x).y, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="ExpertParallel: capacity=1 is too small"):
        forward(tokens())


def compiled_around_the_exchange() -> None:
    """Without a static capacity the graph breaks once, at the exchange of rows."""
    from torch._dynamo.utils import counters

    _compiled(None, "eager")
    (reason,) = counters["graph_break"]
    assert "the host waits for the split sizes" in reason


def compiled_norms() -> None:
    """With a static capacity the norms of all experts are one graph: there the numbers of tokens are not compared."""
    mlps, x = experts(activation="relu"), tokens()
    expected = mlps.norms(x)
    parallelize_module(mlps, mesh_of_all()["ep"], ExpertParallel(T))
    found = torch.compile(lambda x: mlps.norms(x), backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def policy_of_all_ranks_in_graphs() -> None:
    """There the numbers of tokens are not compared."""
    policy, gate = GlobalPolicy(mnn.TokenChoice(1.0), mesh_of_all()["ep"]), mnn.TopKGate(D, E, 2)
    x = tokens().chunk(dist.get_world_size())[dist.get_rank()]

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        plan, weights = policy(gate(x), True)
        return plan.slot_expert, weights

    expected = run(x)
    found = torch.compile(run, backend="eager", fullgraph=True)(x)
    assert all(map(torch.equal, found, expected))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        slots, weights = run(mode.from_tensor(x))
    assert (slots.shape, weights.shape) == (expected[0].shape, expected[1].shape)


def _compiled(capacity: int | None, backend: str) -> None:
    x, layer = tokens(), mlp()(None)
    parallelize_module(layer, mesh_of_all()["ep"], {"experts": ExpertParallel(capacity)})
    forward = torch.compile(lambda x: layer(x).y, backend=backend, fullgraph=capacity is not None)
    expected = layer(x).y
    expected.square().sum().backward()
    grads = [full(each.grad).clone() for each in layer.parameters()]
    layer.zero_grad()
    y = forward(x)
    y.square().sum().backward()
    torch.testing.assert_close(y, expected)
    for each, grad in zip(layer.parameters(), grads, strict=True):
        torch.testing.assert_close(full(each.grad), grad, rtol=1e-5, atol=1e-5)
