"""Training on ranks, compared with one process: AdamW steps under DDP and FSDP2, checkpoints, the gradients' norm."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from moe_kernels import nn as mnn
from moe_kernels.nn.parallel import ExpertParallel, clip_grad_norm_, data_parallel
from moe_kernels.papers.train.ranks import average_gradients
from tests.helpers.ranks.exact import E, Model, T, full, group, mean_square, mlp, tokens, unfused

MAX_NORM = 0.5


def mesh_of(ep: str) -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // int(ep), int(ep)), mesh_dim_names=("dp", "ep"))


def one_model(parts: int) -> Model:
    """A model of one process; the capacity applies to each of `parts` groups of tokens, as if each were a rank's."""
    torch.manual_seed(0)
    model = Model(mlp()(mnn.TokenChoice(1.25, group=T // parts)))
    unfused(model.layer.experts)
    return model


def sharded(mesh: DeviceMesh) -> Model:
    torch.manual_seed(0)
    model = Model(mlp()(mnn.TokenChoice(1.25, group=group())))
    parallelize_module(model, mesh["ep"], {"layer.experts": ExpertParallel()})
    return model


def with_ddp(mesh: DeviceMesh) -> tuple[Model, nn.Module]:
    model = sharded(mesh)
    return model, data_parallel(model, mesh)


def with_fsdp(mesh: DeviceMesh) -> tuple[Model, nn.Module]:
    model = sharded(mesh)
    fully_shard(model.layer.experts, mesh=mesh["dp"])
    return model, fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


WRAPPED = {"ddp": with_ddp, "fsdp": with_fsdp}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, x: Tensor) -> list[float]:
    """Trains; returns the loss of each step, the mean over ranks."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = mean_square(model(x))
        loss.backward()
        clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def own_tokens() -> Tensor:
    return tokens().chunk(dist.get_world_size())[dist.get_rank()]


def five_steps(ep: str, kind: str) -> None:
    expected_model = one_model(dist.get_world_size())
    expected = train(expected_model, adamw(expected_model), 5, tokens())
    model, wrapped = WRAPPED[kind](mesh_of(ep))
    found = train(wrapped, adamw(model), 5, own_tokens())
    assert expected[4] < expected[0]
    for a, b in zip(found, expected, strict=True):
        assert abs(a - b) <= 1e-6 * abs(b), (found, expected)
    for (name, a), b in zip(model.named_parameters(), expected_model.parameters(), strict=True):
        torch.testing.assert_close(full(a), b, rtol=0, atol=1e-6, msg=name)


def sums_of_ranks(ep: str, kind: str) -> None:
    """Five AdamW steps give the parameters of one process that adds gradients rank by rank, bit for bit."""
    mesh = mesh_of(ep)
    one = one_model(dist.get_world_size())
    for owner, name in ((one.first, "forward"), (one.layer.gate.linear, "forward"), (one, "scaled")):
        setattr(owner, name, partial(_in_parts, mesh["ep"].size(), getattr(owner, name)))
    model, wrapped = WRAPPED[kind](mesh)
    if isinstance(wrapped, nn.parallel.DistributedDataParallel):
        wrapped.register_comm_hook(mesh, lambda mesh, bucket: _add_in_order(mesh, bucket))
    optimizers = adamw(one), adamw(model)
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in tokens().chunk(mesh["dp"].size()):
            (mean_square(one(part)) / mesh["dp"].size()).backward()
        mean_square(wrapped(own_tokens())).backward()
        for optimizer in optimizers:
            optimizer.step()
    for (name, a), b in zip(model.named_parameters(), one.parameters(), strict=True):
        assert torch.equal(full(a), b), name


def _in_parts(parts: int, call: Callable[..., Tensor], x: Tensor, *given: Tensor) -> Tensor:
    """call(x, *given), computed for the tokens of one rank at a time."""
    return torch.cat([call(each, *given) for each in x.chunk(parts)])


def _add_in_order(mesh: DeviceMesh, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The mean of a bucket over ranks, added in the order of one process, which runs one backward pass for each group
    of "ep" ranks: within a group from the last rank to the first, then the groups from first to last."""
    buffers = [torch.empty_like(bucket.buffer()) for _ in range(mesh.size())]
    dist.all_gather(buffers, bucket.buffer())
    ep = mesh["ep"].size()
    passes = [reduce(torch.add, reversed(buffers[start : start + ep])) for start in range(0, mesh.size(), ep)]
    mean: torch.futures.Future[Tensor] = torch.futures.Future()
    mean.set_result(reduce(torch.add, passes) / mesh.size())
    return mean


def narrow_fsdp() -> None:
    """With parameters gathered in bfloat16, gradients differ from one process in float32 by less than 2 % in norm."""
    mesh, one = mesh_of("2"), one_model(dist.get_world_size())
    mean_square(one(tokens())).backward()
    model, policy = sharded(mesh), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.layer.experts, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
    mean_square(model(own_tokens()).float()).backward()
    for (name, a), b in zip(model.named_parameters(), one.parameters(), strict=True):
        assert a.grad.dtype == torch.float32
        assert (full(a.grad) - b.grad).norm() < 0.02 * b.grad.norm(), name


def norm_of_one_process(kind: str) -> None:
    """Also if an expert has the largest gradients: then only the ranks that own this expert see the largest one."""
    mesh = mesh_of("2")
    for p, largest in ((2.0, None), (1.0, None), (float("inf"), None), (float("inf"), 0), (float("inf"), E - 1)):
        one = one_model(dist.get_world_size())
        mean_square(one(tokens())).backward()
        model, wrapped = WRAPPED[kind](mesh)
        mean_square(wrapped(own_tokens())).backward()
        if largest is not None:
            for a, b in zip(model.layer.experts.parameters(), one.layer.experts.parameters(), strict=True):
                b.grad[largest] *= 1000
                own = a.grad.to_local()
                first = mesh["ep"].get_local_rank() * (E // 2)
                first += mesh["dp"].get_local_rank() * len(own) if kind == "fsdp" else 0
                own[torch.arange(first, first + len(own)) == largest] *= 1000
        expected = torch.nn.utils.clip_grad_norm_(one.parameters(), MAX_NORM, p)
        assert expected > MAX_NORM
        found = clip_grad_norm_(model, MAX_NORM, p)
        assert type(found) is torch.Tensor
        assert found.shape == ()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        for a, b in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(full(a.grad), b.grad, rtol=1e-5, atol=1e-7)


def norm_without_gradients() -> None:
    assert clip_grad_norm_(sharded(mesh_of("2")), 1.0).item() == 0


def averaged_gradients(ep: str) -> None:
    """Over all ranks, or over those with the same experts; a missing gradient counts as 0."""
    mesh, rank, ranks = mesh_of(ep), dist.get_rank(), dist.get_world_size()
    model = sharded(mesh)
    for each in model.parameters():
        each.grad = torch.full_like(each, rank + 1.0)
    model.some, model.unused = (nn.Parameter(torch.ones(3)) for _ in range(2))
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    if rank == 1:
        model.some.grad = torch.full((3,), 6.0)
    own = range(rank % int(ep), ranks, int(ep))  # the ranks with the same experts
    if rank >= int(ep):
        model.layer.experts.b_out.grad = None
    average_gradients(model, mesh)
    assert model.unused.grad is None
    assert model.frozen.grad is None
    expected = {"some": 6 / ranks, "layer.experts.b_out": (own[0] + 1) / len(own)}
    for name, each in model.named_parameters():
        if name not in ("unused", "frozen"):
            every = own if ".experts." in name else range(ranks)
            mean = expected.get(name, sum(every) / len(every) + 1)
            local = each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad
            torch.testing.assert_close(local, torch.full_like(local, mean), msg=name)


def save(folder: str, kind: str) -> None:
    model, wrapped = WRAPPED[kind](mesh_of("2"))
    optimizer = adamw(model)
    train(wrapped, optimizer, 2, own_tokens())
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=Path(folder) / "checkpoint")
    losses = train(wrapped, optimizer, 3, own_tokens())
    if dist.get_rank() == 0:
        (Path(folder) / "losses").write_text(json.dumps(losses))


def go_on(folder: str) -> None:
    """Loads the checkpoint of `save` on fewer ranks; the next three losses are those of `save` up to rounding."""
    torch.manual_seed(1)
    model = Model(mlp()(mnn.TokenChoice(1.25, group=T // 4)))
    unfused(model.layer.experts)
    mesh, wrapped = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "ep")), model
    if dist.get_world_size() > 1:
        parallelize_module(model, mesh["ep"], {"layer.experts": ExpertParallel()})
        del model.layer.experts.forward  # set by `unfused`
        wrapped = data_parallel(model, mesh)
    optimizer = adamw(model)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=Path(folder) / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    expected = json.loads((Path(folder) / "losses").read_text())
    found = train(wrapped, optimizer, 3, own_tokens())
    for a, b in zip(found, expected, strict=True):
        assert abs(a - b) <= 1e-6 * abs(b), (found, expected)


def full_state() -> None:
    mesh = mesh_of(str(dist.get_world_size()))
    model = sharded(mesh)
    state = {name: full(each) for name, each in model.state_dict().items()}
    one = Model(mlp()(mnn.TokenChoice(1.25, group=group())))
    one.load_state_dict(state)
    unfused(one.layer.experts)
    assert torch.equal(one(own_tokens()), one(tokens()).chunk(dist.get_world_size())[dist.get_rank()])
    assert torch.equal(model(own_tokens()), one(own_tokens()))
    assert all(isinstance(each, DTensor) for name, each in model.state_dict().items() if ".experts." in name)


def dimensions(ep: str) -> None:
    one, model = one_model(1), sharded(mesh_of(ep))
    for (name, a), (other, b) in zip(one.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        assert a.shape == b.shape
        if ".experts." in name:
            assert b.to_local().shape[0] == a.shape[0] // int(ep)
