"""TopKGate(balance_rate=...) on several ranks against one process."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_kernels import nn as mnn

D, E, K, T = 8, 6, 2, 24


def steps(kind: str) -> None:
    """Three steps of two micro-batches. DDP overwrites buffers by rank 0's before each forward."""
    torch.manual_seed(0)
    alone = mnn.MoE(mnn.TopKGate(D, E, K, balance_rate=0.1), mnn.ExpertMLP(E, D, 5), output="tensor")
    model = copy.deepcopy(alone)
    wrapped = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        expected = torch.zeros(E)
        for _ in range(2):
            x = torch.randn(ranks, T, D, generator=generator)
            wrapped(x[rank]).sum().backward()
            with torch.no_grad():
                expected += torch.bincount(alone.gate(x.flatten(0, 1)).experts.flatten(), minlength=E)
        with torch.no_grad():
            wrapped.eval()(x[rank])  # counts nothing, though DDP broadcasts
        wrapped.train()
        mnn.update_biases(wrapped)
        change = 0.1 * (expected.mean() - expected).sign()
        alone.gate.balance_bias += change
        assert torch.equal(model.gate.balance_bias, alone.gate.balance_bias), (step, expected)
        assert not model.gate.loads.any()
    assert model.gate.balance_bias.any()


def loads_are_the_truth() -> None:
    """The bias follows what `loads` holds, whoever wrote it."""
    gate = mnn.TopKGate(D, E, K, balance_rate=0.1)
    gate(torch.randn(T, D))
    gate.loads.copy_(torch.tensor([6.0, 0, 0, 0, 0, 0]) * (1 + dist.get_rank()))
    gate.update_bias()
    assert torch.equal(gate.balance_bias, 0.1 * torch.tensor([-1.0, 1, 1, 1, 1, 1]))
    gate(torch.randn(T, D))
    gate.loads.zero_()
    gate.update_bias()
    assert torch.equal(gate.balance_bias, 0.1 * torch.tensor([-1.0, 1, 1, 1, 1, 1]))
