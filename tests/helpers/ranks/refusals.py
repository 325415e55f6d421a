"""Wrong use of ExpertParallel and GlobalPolicy raises an error on every rank."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from moe_kernels import nn as mnn
from moe_kernels.nn.parallel import ExpertParallel, GlobalPolicy
from moe_kernels.ops.plan import make_plan
from tests.helpers.ranks.exact import D, E, H, T, mesh_of_all, mlp, tokens


def raises(kind: type[Exception], text: str, call: Any) -> None:
    with pytest.raises(kind, match=text):
        call()


def meshes() -> None:
    mesh_2d = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "ep"))
    style, experts = ExpertParallel(), mnn.ExpertMLP(E, D, H)
    raises(ValueError, "ExpertParallel.*mesh of one dimension.*dp.*ep", lambda: style._apply(experts, mesh_2d))
    raises(ValueError, "mesh of one dimension", lambda: parallelize_module(experts, mesh_2d, style))
    raises(ValueError, "GlobalPolicy: expected a mesh of one dim", lambda: GlobalPolicy(mnn.ExpertChoice(), mesh_2d))
    odd = mnn.ExpertMLP(E + 1, D, H)
    raises(ValueError, "ExpertParallel: 2 ranks must divide.* 9", lambda: parallelize_module(odd, mesh_2d["ep"], style))
    assert not any(isinstance(each, DTensor) for each in odd.parameters())
    linear = nn.Linear(D, D)
    raises(TypeError, "ExpertParallel.*Experts, got Linear", lambda: parallelize_module(linear, mesh_2d["ep"], style))
    parallelize_module(experts, mesh_2d["ep"], style)
    raises(ValueError, "ExpertParallel.*already", lambda: parallelize_module(experts, mesh_2d["dp"], style))
    for bad in (0, -1):
        raises(ValueError, "capacity", lambda bad=bad: ExpertParallel(capacity=bad))
    raises(TypeError, "capacity", lambda: ExpertParallel(capacity=1.5))


def plans() -> None:
    experts, mesh, x = mnn.ExpertMLP(E, D, H), mesh_of_all()["ep"], tokens()
    parallelize_module(experts, mesh, ExpertParallel())
    chosen = torch.arange(T * 2).view(T, 2) % E
    few = make_plan(chosen % 4, 4)
    raises(ValueError, "ExpertParallel.*all 8 experts, got 4", lambda: experts(x, few, None))
    plan = make_plan(chosen, E)
    sharded_x = DTensor.from_local(x, mesh, [Shard(0)])
    raises(ValueError, "ExpertParallel.*plain tensors", lambda: experts(sharded_x, plan, None))
    sharded = dataclasses.replace(plan, kept=DTensor.from_local(plan.kept, mesh, [Shard(0)]))
    raises(ValueError, "ExpertParallel.*plain tensors", lambda: experts(x, sharded, None))
    meta = x.to("meta")
    raises(ValueError, "ExpertParallel: x and plan must be on one cpu.*meta", lambda: experts(meta, plan, None))
    raises(ValueError, "dispatch.*48", lambda: experts(x[:-1], plan, None))


def static_splits() -> None:
    torch.manual_seed(0)
    layer = mlp()(mnn.TokenChoice())
    enough = int(layer.policy(layer.gate(tokens()), True)[0].kept.max())
    few = copy.deepcopy(layer)
    parallelize_module(few, mesh_of_all()["ep"], {"experts": ExpertParallel(capacity=enough - 1)})
    message = rf"ExpertParallel: capacity={enough - 1} is too small.*, {enough} on rank 0 of the mesh"
    raises(ValueError, message, lambda: few(tokens()))
    parallelize_module(layer, mesh_of_all()["ep"], {"experts": ExpertParallel(capacity=enough)})
    assert layer(tokens()).y.isfinite().all()


def one_rank_with_too_many_rows() -> None:
    """The other ranks, which own none of these rows' experts, raise too, and then all of them can go on."""
    experts, ranks = mnn.ExpertMLP(E, D, H), dist.get_world_size()
    parallelize_module(experts, mesh_of_all()["ep"], ExpertParallel(capacity=3))
    for rank in range(ranks):
        rows = 5 if dist.get_rank() == rank else 2
        x, plan = tokens(rows), make_plan(torch.zeros(rows, 1, dtype=torch.int64), E)
        raises(
            ValueError, f"capacity=3 is too small.*, 5 on rank {rank} of", lambda x=x, plan=plan: experts(x, plan, None)
        )
    x = tokens(dist.get_rank())  # without norms, ranks may have different numbers of tokens
    assert experts(x, make_plan(torch.arange(len(x))[:, None], E), None).shape == x.shape


def capacities_of_their_own() -> None:
    """Also if only one rank has a capacity. The experts remain as they were."""
    experts, mesh = mnn.ExpertMLP(E, D, H), mesh_of_all()["ep"]
    for capacities in ([6, 7, 8, 9], [None, 9, None, None]):
        style = ExpertParallel(capacities[dist.get_rank()])
        message = rf"ExpertParallel: capacity must be the same on all ranks, got \[{str(capacities)[1:-1]}\]"
        raises(ValueError, message, lambda style=style: parallelize_module(experts, mesh, style))
    assert not any(isinstance(each, DTensor) for each in experts.parameters())


def norms_of_uneven_batches_with_a_capacity() -> None:
    """A competition is refused on all ranks, and all of them can go on with equal batches."""
    experts, ranks = mnn.ExpertMLP(E, D, H, activation="relu"), dist.get_world_size()
    gate = mnn.CompetitionGate(mnn.TopKGate(D, E, 2), experts, rate=1.0)
    layer, expected = mnn.MoE(gate, experts), experts.norms(tokens())
    parallelize_module(layer, mesh_of_all()["ep"], {"experts": ExpertParallel(capacity=T)})
    for counts in (list(range(ranks)), [T] * (ranks - 1) + [0]):
        x, listed = tokens(counts[dist.get_rank()]), str(counts)[1:-1]
        message = rf"ExpertParallel: with capacity={T}, norms need the same number of tokens .*got \[{listed}\]"
        for call in (layer, layer.experts.norms):
            raises(ValueError, message, lambda call=call, x=x: call(x))
        for count in (T, 5, 0, 0, 5):  # the number may change if it changes on all ranks
            torch.testing.assert_close(experts.norms(tokens()[:count]), expected[:count], rtol=1e-5, atol=1e-6)


def a_global_policy_of_uneven_batches() -> None:
    """It is refused on all ranks, and all of them can go on with equal batches."""
    ranks, mesh = dist.get_world_size(), mesh_of_all()["ep"]
    policy = GlobalPolicy(mnn.policies.TokenChoice(1.0), mesh)
    layer = mnn.MoE(mnn.TopKGate(D, E, 2), mnn.ExpertMLP(E, D, H), policy)
    counts = [T] * (ranks - 1) + [T - 1]
    message = rf"GlobalPolicy: all ranks need the same number of tokens, got \[{str(counts)[1:-1]}\]"
    raises(ValueError, message, lambda: layer(tokens(counts[dist.get_rank()])))
    assert layer(tokens()).y.isfinite().all()


def unsharded_methods() -> None:
    """A direct call of `norms` needs register_fsdp_forward_method if fully_shard was applied to the experts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "ep"))
    experts, x = mnn.ExpertMLP(E, D, H, activation="relu"), tokens()
    expected = experts.norms(x)
    parallelize_module(experts, mesh["ep"], ExpertParallel())
    fully_shard(experts, mesh=mesh["dp"])
    raises(ValueError, "register_fsdp_forward_method", lambda: experts.norms(x))
    torch.distributed.fsdp.register_fsdp_forward_method(experts, "norms")
    torch.testing.assert_close(experts.norms(x), expected, rtol=1e-5, atol=1e-6)
