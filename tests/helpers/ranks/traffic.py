"""The collectives of a layer on several ranks send the bytes that bench.exchange_model predicts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from bench import exchange
from bench.exchange import TrafficCounter
from bench.exchange_model import exchange_bytes, norm_bytes
from moe_kernels import nn as mnn
from moe_kernels.nn.parallel import ExpertParallel
from tests.helpers.ranks.exact import D, E, H, T, group, mesh_of_all, mlp, tokens

OUT = 7  # length of an output, unlike that of a row


def _traffic(layer: mnn.MoE, x: Tensor) -> tuple[TrafficCounter, TrafficCounter]:
    with TrafficCounter() as forward:
        y = layer(x).y
    with TrafficCounter() as backward:
        y.square().sum().backward()
    return forward, backward


def uneven() -> None:
    x = tokens().chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    layer = mnn.MoE(mnn.TopKGate(D, E, 2), mnn.ExpertMLP(E, D, H, OUT), mnn.TokenChoice(1.25))
    parallelize_module(layer, mesh_of_all()["ep"], {"experts": ExpertParallel()})
    forward, backward = _traffic(layer, x)
    kept = layer.policy(layer.gate(x), True)[0].kept
    kept_by_rank = [torch.empty_like(kept) for _ in range(dist.get_world_size())]
    dist.all_gather(kept_by_rank, kept)
    expected = exchange_bytes(torch.stack(kept_by_rank).unflatten(1, (dist.get_world_size(), -1)).sum(-1), D, OUT, 4, E)
    assert forward.sent == expected.sent_forward[dist.get_rank()], (forward.sent, expected)
    assert backward.sent == expected.sent_backward[dist.get_rank()], (backward.sent, expected)
    assert (forward.calls, backward.calls) == (3, 2)


def static() -> None:
    """With a static capacity a rank sends to each expert as many rows as the capacity, padded if there are fewer."""
    ranks, places = dist.get_world_size(), 2 * group()
    x = tokens().chunk(ranks)[dist.get_rank()].clone().requires_grad_()
    layer = mlp()(None)
    parallelize_module(layer, mesh_of_all()["ep"], {"experts": ExpertParallel(places)})
    forward, backward = _traffic(layer, x)
    expected = exchange_bytes(torch.full((ranks, ranks), E // ranks * places), D, D, 4, E)
    assert forward.sent == expected.sent_forward[dist.get_rank()]
    assert backward.sent == expected.sent_backward[dist.get_rank()]
    assert (forward.calls, backward.calls) == (3, 2)


def norms() -> None:
    experts = mnn.ExpertMLP(E, D, H, activation="relu")
    parallelize_module(experts, mesh_of_all()["ep"], ExpertParallel())
    x = tokens(T // dist.get_world_size())
    with TrafficCounter() as moved:
        experts.norms(x)
    assert moved.sent == norm_bytes(dist.get_world_size(), len(x), D, E, 4)


def counter() -> None:
    """A rank sends its part of an all-gather to n - 1 ranks, and n - 1 of n parts of a reduce-scatter."""
    mesh, n = mesh_of_all()["ep"], dist.get_world_size()
    with TrafficCounter() as gathered:
        DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local()
    assert (gathered.sent, gathered.calls) == (3 * 4 * 4 * (n - 1), 1)
    with TrafficCounter() as scattered:
        DTensor.from_local(torch.ones(3 * n, 4), mesh, [Partial()]).redistribute(mesh, [Shard(0)]).to_local()
    assert (scattered.sent, scattered.calls) == (3 * 4 * 4 * (n - 1), 1)


def contenders() -> None:
    """bench.exchange.measure finds that its implementations agree, and two of them send the predicted bytes."""
    size = exchange.Size(tokens=64, dim=16, hidden=16, experts=4)
    lines = exchange.measure(size, 0.05, peers=False)
    assert [line.contender for line in lines][::2] == ["ExpertParallel", "DTensor: gather tokens, scatter sums"]
    for line in lines:
        assert line.predicted in (None, line.sent)
        assert line.forward > 0
        assert line.training > 0
    assert sum(line.predicted is not None for line in lines) == 2
