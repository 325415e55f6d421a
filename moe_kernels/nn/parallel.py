"""Experts across processes, on torch.distributed: every rank owns E / n experts and sends rows to the ranks of theirs.

    mesh = init_device_mesh("cuda", (dp, ep), mesh_dim_names=("dp", "ep"))
    parallelize_module(model, mesh["ep"], {"blocks.*.moe.experts": ExpertParallel()})

    plan      of the rank's own tokens over all E experts: gate and policy run as in one process
    counts    kept (E) to the owners, while dispatch gathers the rows            one all-to-all
    rows      (R, D) to the owners, grouped by expert                            one all-to-all
    experts   the owner's plan, K = 1, groups what arrived by expert             sender by sender within an expert
    outputs   (R, Dout) back in the same order, then combine and dropout         one all-to-all

Every rank decides for its own tokens alone. One process with TokenChoice(group=T // n) or ExpertChoice(group=T // n)
is the definition of n ranks of T / n tokens: float32 outputs, gradients of x and gradients of the experts are equal bit
for bit, at a power of two of ranks. Where nothing is dropped, TokenChoice() needs no group for that. `GlobalPolicy`
decides for the tokens of all ranks.

Gradients: an expert receives those of the tokens of all n ranks, times 1 / n. That is the mean over ranks, which DDP
and FSDP2 compute for the other parameters. Average the experts' over the data-parallel dimension of the mesh alone.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from moe_kernels.nn.experts import ExpertMLP, Experts
from moe_kernels.nn.gates import GateOutput
from moe_kernels.nn.moe import Policy
from moe_kernels.ops._autocast import as_autocast
from moe_kernels.ops._checks import check_int, check_module
from moe_kernels.ops.combine import combine
from moe_kernels.ops.dispatch import dispatch
from moe_kernels.ops.plan import make_plan
from moe_kernels.plan import RoutingPlan


class ExpertParallel(ParallelStyle):
    """Shards the experts of an ExpertMLP or ExpertLayer over a mesh of one dimension, in place.

    Parameters become DTensors, Shard(0), under the same names. With n ranks, rank r owns experts r E / n to
    (r + 1) E / n. All ranks must call the layer equally often, forward and backward, also with no tokens at all.

    Args:
        capacity: None: the splits of the exchange follow the plan; the host waits once a forward pass to learn them.
            C: every rank sends C places to every expert. No wait and static shapes, for CUDA graphs and one graph of
            torch.compile; a place without a row costs bytes but no product. The plan must keep at most C rows of an
            expert: TokenChoice(factor) keeps expert_capacity(T, K, E, factor), ExpertChoice likewise. `norms` then
            takes as many tokens on every rank.

    Data parallelism: `data_parallel(model, mesh)`, which is DDP, or fully_shard(experts, mesh=mesh["dp"]) and then
    fully_shard(model) over all ranks. fully_shard's hooks run in forward: direct calls of `rows` or `norms` of the
    experts need torch.distributed.fsdp.register_fsdp_forward_method(experts, "rows").
    Optimizers: foreach and fused ones reject DTensors beside other parameters: use two groups of parameters.

    Raises:
        TypeError: the module is no Experts. ValueError: the mesh has several dimensions, its ranks do not divide the
        experts, or the parameters are DTensors already. In forward ValueError: a plan of another number of experts or
        from another device, DTensors in it, or more rows of an expert than `capacity` (on a GPU a device-side assert,
        which the host does not wait for).
    """

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        if capacity is not None:
            check_int("ExpertParallel", "capacity", capacity, 1, 2**31 - 1, "places of an expert for every rank")
        self.capacity = capacity

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_module("ExpertParallel", "the module", module, Experts)
        assert isinstance(module, Experts)
        _check_mesh("ExpertParallel", device_mesh)
        if module.num_experts % device_mesh.size():
            count = device_mesh.size()
            raise ValueError(f"ExpertParallel: {count} ranks must divide the experts, got {module.num_experts}")
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                raise ValueError(
                    f"ExpertParallel: {name} is sharded over {parameter.device_mesh} already; expected plain parameters"
                )
            shard = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(shard, parameter.requires_grad))
        module.exchange = Exchange(device_mesh, self.capacity)
        return module


@dataclass(frozen=True)
class Exchange:
    """Rows to the owners of their experts and back; see the module's docstring."""

    mesh: DeviceMesh
    capacity: int | None = None

    def __call__(self, experts: Experts, x: Tensor, plan: RoutingPlan) -> Tensor:
        """(R, Dout): every expert's outputs for the rows of this rank's plan, zeros past the rows in use."""
        self._check(experts, x, plan)
        (x,) = as_autocast(x)  # narrow rows travel
        plan = replace(plan, slot_row=plan.slot_row.sort(-1).values)  # dx sums in the order of rows, as grouped_gemm's
        if self.capacity is not None:
            return self._static(experts, x, plan, self.capacity)
        return self._uneven(experts, x, plan)

    @torch.compiler.disable(reason="ExpertParallel: the host waits for the split sizes")
    def _uneven(self, experts: Experts, x: Tensor, plan: RoutingPlan) -> Tensor:
        arriving = self._all_to_all(plan.kept)
        rows = dispatch(x, plan, backend=experts.backend)
        arriving = collectives.wait_tensor(arriving)  # (n E / n): of every rank, rows for each expert here
        counts = torch.stack([plan.kept, arriving]).unflatten(1, (self.mesh.size(), -1))
        leave, arrive = counts.sum(-1).tolist()
        arrived = collectives.wait_tensor(self._all_to_all(rows[: sum(leave)], arrive, leave))
        expert = self._local(experts, arriving).repeat_interleave(arriving, output_size=arrived.shape[0])
        out = self._all_to_all(self._outputs(experts, arrived, expert), leave, arrive)
        return F.pad(collectives.wait_tensor(out), (0, 0, 0, plan.num_rows - sum(leave)))

    def _static(self, experts: Experts, x: Tensor, plan: RoutingPlan, capacity: int) -> Tensor:
        arriving = self._all_to_all(plan.kept)
        padded = plan.to_padded(dispatch(x, plan, backend=experts.backend), capacity)
        arrived = collectives.wait_tensor(self._all_to_all(padded.flatten(0, 1)))
        arriving = collectives.wait_tensor(arriving)[:, None]
        place = torch.arange(capacity, dtype=torch.int32, device=x.device)
        expert = torch.where(place < arriving, self._local(experts, arriving)[:, None], -1)
        out = self._all_to_all(self._outputs(experts, arrived, expert.flatten()))
        return plan.from_padded(collectives.wait_tensor(out).unflatten(0, (experts.num_experts, capacity)))

    def norms(self, experts: ExpertMLP, x: Tensor) -> Tensor:
        """(T, E): the norms of all experts' outputs for x (T, D).

        No weights travel: a rank sends its tokens to every other one, (n - 1) T D, and receives T (E - E / n) norms.
        """
        (x,) = as_autocast(x)
        leave = [x.shape[0]] * self.mesh.size()
        arrive = leave if self.capacity else self._tokens(x)
        arrived = collectives.wait_tensor(self._all_to_all(x.repeat(len(leave), 1), arrive, leave))
        home = collectives.wait_tensor(self._all_to_all(experts.own_norms(arrived), leave, arrive))
        return home.unflatten(0, (len(leave), -1)).transpose(0, 1).flatten(1)

    @torch.compiler.disable(reason="ExpertParallel: the host waits for the number of tokens of every rank")
    def _tokens(self, x: Tensor) -> list[int]:
        tokens = torch.full((self.mesh.size(),), x.shape[0], dtype=torch.int32, device=x.device)
        return collectives.wait_tensor(self._all_to_all(tokens)).tolist()

    def own(self, parameter: Tensor | None) -> Tensor | None:
        """The part of a parameter that this rank owns; its gradient is multiplied by 1 / n."""
        if isinstance(parameter, DTensor):
            if parameter.device_mesh.ndim != 1:
                raise ValueError(
                    "ExpertParallel: fully_shard has not gathered the experts' parameters; call forward, or "
                    "torch.distributed.fsdp.register_fsdp_forward_method(experts, name) for `rows` and `norms`"
                )
            parameter = parameter.to_local()
        return None if parameter is None else _Mean.apply(parameter, self.mesh.size())

    def _outputs(self, experts: Experts, arrived: Tensor, expert: Tensor) -> Tensor:
        """(R', Dout) of rows that arrived (R', D), in their order; expert (R',) here, -1: a place without a row."""
        plan = make_plan(expert[:, None], experts.num_experts // self.mesh.size())
        return combine(experts.outputs(arrived, plan), plan, backend=experts.backend)

    def _local(self, experts: Experts, like: Tensor) -> Tensor:
        """(E,): for every rank in turn, the experts here, counted from 0."""
        count = experts.num_experts // self.mesh.size()
        return torch.arange(count, dtype=torch.int32, device=like.device).repeat(self.mesh.size())

    def _all_to_all(self, x: Tensor, arrive: list[int] | None = None, leave: list[int] | None = None) -> Tensor:
        """x split by `leave` goes to the ranks, what they sent comes back split by `arrive`; None: in equal parts."""
        return collectives.all_to_all_single_autograd(x.contiguous(), arrive, leave, self.mesh)

    def _check(self, experts: Experts, x: Tensor, plan: RoutingPlan) -> None:
        if plan.num_experts != experts.num_experts:
            raise ValueError(
                f"ExpertParallel: expected a plan over all {experts.num_experts} experts, got {plan.num_experts}"
            )
        if any(isinstance(each, DTensor) for each in (x, plan.kept, plan.row_token)):
            raise ValueError("ExpertParallel: x and plan must be this rank's own plain tensors, got DTensors")
        if x.device.type != self.mesh.device_type or plan.kept.device != x.device:
            devices = f"x on {x.device} and a plan on {plan.kept.device}"
            raise ValueError(f"ExpertParallel: the mesh is of {self.mesh.device_type}, got {devices}")
        if self.capacity is None:
            return
        fits = (plan.kept <= self.capacity).all()
        message = f"ExpertParallel: capacity={self.capacity} is too small: the plan keeps more rows of an expert"
        if x.is_cpu and not torch.compiler.is_compiling():
            if not fits:
                raise ValueError(f"{message}, {int(plan.kept.max())}")
        else:
            torch._assert_async(fits, message)

    def __deepcopy__(self, memo: Any) -> Exchange:
        return self  # process groups are not copied


class _Mean(torch.autograd.Function):
    """The identity; the gradient is divided by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.ranks, None


class GlobalPolicy:
    """A policy for the tokens of all ranks: every rank keeps its part of the plan of one process with all tokens.

        MoE(gate, experts, GlobalPolicy(ExpertChoice(2.0), mesh["ep"]))

    For expert choice or priority routing over the global batch (Zhou et al. 2022; paper 002) and for a capacity that
    all ranks share. What travels: gate weights and experts, T K each, one all-gather each. Every rank computes the
    whole plan. All ranks must have as many tokens. Gradients reach this rank's own gate alone, as they do in one
    process: a token's weight depends on its own logits, and which tokens an expert keeps is a constant. The plan's
    `requested` and `dropped` count the tokens of all ranks. An expert's rows come in the order of tokens: where one
    process has another order (TokenChoice with a capacity and K > 1), the experts' gradients agree within rounding.

    Args:
        policy: any of nn.policies.
        mesh: of one dimension.
    """

    def __init__(self, policy: Policy, mesh: DeviceMesh) -> None:
        _check_mesh("GlobalPolicy", mesh)
        self.policy, self.mesh = policy, mesh

    def __call__(self, gate: GateOutput, training: bool) -> tuple[RoutingPlan, Tensor]:
        tokens = gate.weights.shape[0]
        own = slice(self.mesh.get_local_rank() * tokens, (self.mesh.get_local_rank() + 1) * tokens)
        weights, experts = (
            DTensor.from_local(each.detach(), self.mesh, [Shard(0)]).full_tensor()
            for each in (gate.weights, gate.experts)
        )
        weights = torch.cat([weights[: own.start], gate.weights, weights[own.stop :]])
        plan, weights = self.policy(replace(gate, weights=weights, experts=experts), training)
        capacity = None if plan.num_rows == plan.slot_row.numel() else plan.num_rows // plan.num_experts
        kept = make_plan(plan.slot_expert[own].contiguous(), plan.num_experts, capacity=capacity, order="token")
        return replace(kept, requested=plan.requested, dropped=plan.dropped), weights[own]

    def __repr__(self) -> str:
        return f"GlobalPolicy({self.policy})"


def _check_mesh(name: str, mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or mesh.shape
        raise ValueError(f"{name}: expected a mesh of one dimension, such as mesh['ep'], got {names}")


def data_parallel(model: nn.Module, mesh: DeviceMesh, **options: Any) -> DistributedDataParallel:
    """DDP of a model with sharded experts; `mesh` holds all ranks, such as ("dp", "ep").

    Gradients of the experts are averaged over the ranks that own the same experts, the others over all ranks.
    options: of DistributedDataParallel. FSDP2 needs no such function: see ExpertParallel. DistributedDataParallel with
    device_mesh=mesh["dp"] averages the same, but torch 2.13 loses the DTensors from named_parameters after a forward.
    """
    sharded = {name: each for name, each in model.named_parameters() if isinstance(each, DTensor)}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(sharded))
    for parameter in sharded.values():
        names = set(mesh.mesh_dim_names or ()) - set(parameter.device_mesh.mesh_dim_names or ())
        groups = [mesh.get_group(name) for name in sorted(names)]
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(_average, groups))
    return DistributedDataParallel(model, **options)


def _average(groups: list[dist.ProcessGroup], parameter: Tensor) -> None:
    """The gradient's mean over the ranks of all groups, in place."""
    assert isinstance(parameter.grad, DTensor)
    grad = parameter.grad.to_local()
    for group in groups:
        dist.all_reduce(grad.div_(group.size()), group=group)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """The norm () of all gradients as in one process; scales them so that it is at most max_norm.

    The function of that name in torch.nn.utils fails for parameters of several meshes. Here norms are computed for each
    mesh, then combined. Gradients must have been averaged over data-parallel ranks before, and all ranks must call it.
    """
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        if parameter.grad is not None:
            groups[parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None].append(parameter)
    norms = []
    for mesh, parameters in groups.items():
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = _largest(grads, mesh) if norm_type == inf else get_total_norm(grads, norm_type)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = get_total_norm(norms, norm_type)
    for parameters in groups.values():
        clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _largest(grads: list[Tensor], mesh: DeviceMesh | None) -> Tensor:
    """The largest absolute value. torch has none of an empty tensor, and with fully_shard a rank may hold no part."""
    parts = [each.to_local() if isinstance(each, DTensor) else each for each in grads]
    largest = torch.stack([parts[0].new_zeros(()), *(each.abs().amax() for each in parts if each.numel())]).amax()
    for group in mesh.get_all_groups() if mesh is not None else ():
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return largest
