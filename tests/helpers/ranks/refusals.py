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
    raises(ValueError, rf"ExpertParallel: capacity={enough - 1} is too small.*, {enough}$", lambda: few(tokens()))
    parallelize_module(layer, mesh_of_all()["ep"], {"experts": ExpertParallel(capacity=enough)})
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
