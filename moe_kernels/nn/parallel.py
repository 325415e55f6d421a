"""Experts across processes, on torch.distributed: each of n ranks owns E / n experts and gets their rows.

    mesh = init_device_mesh("cuda", (dp, ep), mesh_dim_names=("dp", "ep"))
    parallelize_module(model, mesh["ep"], {"blocks.*.moe.experts": ExpertParallel()})

    plan      gate and policy plan the rank's own tokens over all E experts, as in one process
    counts    plan.kept (E) is sent to the owners, while dispatch gathers the rows   one all-to-all
    rows      are sent to the owners, grouped by expert                              one all-to-all
    experts   a plan with K = 1 groups the received rows by expert, those of an expert by sending rank
    outputs   are sent back in the order in which the rows came                      one all-to-all

A rank routes only its own tokens. n ranks with T / n tokens each and TokenChoice or ExpertChoice compute what one
process computes for the T tokens with that policy and group=T // n; if nothing is dropped, TokenChoice needs no group.
Results agree within rounding. For a loss that is a mean over tokens, a rank's gradient of x is n times that of one
process. `GlobalPolicy` routes the tokens of all ranks together.

The gradient of an expert is summed over the tokens of all n ranks and divided by n. This is the mean over ranks, which
DDP and FSDP2 compute for the other parameters. So average the experts' gradients only over the data-parallel dimension
of the mesh.
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
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from moe_kernels import sizes
from moe_kernels.nn._mask import call_with_mask
from moe_kernels.nn.experts import ExpertMLP, Experts
from moe_kernels.nn.gates import GateOutput
from moe_kernels.nn.moe import Policy
from moe_kernels.nn.policies import rows_in_use
from moe_kernels.ops._autocast import as_autocast
from moe_kernels.ops._checks import check_int, check_module
from moe_kernels.ops.combine import combine
from moe_kernels.ops.dispatch import dispatch
from moe_kernels.ops.plan import make_plan
from moe_kernels.plan import RoutingPlan


class ExpertParallel(ParallelStyle):
    """Shards the experts of an ExpertMLP or ExpertLayer over a mesh of one dimension, in place.

    Parameters become DTensors, Shard(0), under the same names. With n ranks, rank r owns experts r E / n to
    (r + 1) E / n - 1. All ranks must call the layer equally often, forward and backward, even ranks without tokens.

    Args:
        capacity: None: every rank sends the rows of its plan, and the host waits for their counts.
            C >= 1: every rank sends C rows to every expert, padded if there are fewer. Shapes are static and the host
            waits for no GPU, as CUDA graphs and torch.compile(fullgraph=True) need; padding is sent but not multiplied.
            The plan must keep at most C rows for an expert: TokenChoice(factor) keeps at most
            expert_capacity(T, K, E, factor), ExpertChoice(factor) round(T factor / E), for a rank's T tokens. All
            ranks need the same C, so compute it from the largest T; `norms` also needs the same T on every rank.

    Data parallelism: `data_parallel(model, mesh)`, which is DDP, or fully_shard(experts, mesh=mesh["dp"]) and then
    fully_shard(model) over all ranks. fully_shard's hooks run in forward: direct calls of `rows` or `norms` of the
    experts need torch.distributed.fsdp.register_fsdp_forward_method(experts, name).
    Optimizers: foreach and fused optimizers reject a parameter group with both DTensors and plain tensors; use two.

    Raises:
        TypeError: the module is not an Experts, or capacity is no int.
        ValueError: the mesh has several dimensions, its ranks do not divide the experts, the parameters are DTensors
            already, capacity < 1, or ranks have different capacities. In forward: the plan has another number of
            experts; x or the plan is on another device than the mesh or holds DTensors.
            With a capacity also, on all ranks: the plan of one of them keeps more than `capacity` rows for an expert;
            in `norms` (competition) ranks have different T. On a GPU these two are asserts, for which the host does not
            wait. In torch.compile the first is an assert on that rank alone, and T is not checked: if it differs, a
            rank aborts, or all wait until the timeout. Compile the layer on all ranks or on none.
    """

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        if capacity is not None:
            check_int("ExpertParallel", "capacity", capacity, 1, 2**31 - 1, "rows from a rank to an expert")
        self.capacity = capacity

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_module("ExpertParallel", "the module", module, Experts)
        assert isinstance(module, Experts)
        _check_mesh("ExpertParallel", device_mesh)
        if module.num_experts % device_mesh.size():
            count = device_mesh.size()
            raise ValueError(f"ExpertParallel: {count} ranks must divide the experts, got {module.num_experts}")
        _check_capacities(device_mesh, self.capacity)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                raise ValueError(
                    f"ExpertParallel: {name} is sharded over {parameter.device_mesh} already; expected plain parameters"
                )
            shard = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(shard, parameter.requires_grad))
        module.exchange = Exchange(device_mesh, self.capacity)
        return module


@dataclass
class Exchange:
    """Sends rows to the owners of their experts and the outputs back; see the module's docstring."""

    mesh: DeviceMesh
    capacity: int | None = None
    last_tokens: int = 0  # the T that all ranks had in the last call of `norms` with a capacity

    def __call__(self, experts: Experts, x: Tensor, plan: RoutingPlan) -> Tensor:
        """(R, Dout): the experts' outputs for the rows of this rank's plan, zeros past the rows in use."""
        self._check(experts, x, plan)
        (x,) = as_autocast(x)
        # With slot_row sorted, dispatch's backward sums a token's rows in ascending order, as grouped_gemm's does.
        plan = replace(plan, slot_row=plan.slot_row.sort(-1).values)
        if self.capacity is not None:
            return self._static(experts, x, plan, self.capacity)
        return self._uneven(experts, x, plan)

    @torch.compiler.disable(reason="ExpertParallel: the host waits for the split sizes")
    def _uneven(self, experts: Experts, x: Tensor, plan: RoutingPlan) -> Tensor:
        counts = self._all_to_all(plan.kept)
        rows = dispatch(x, plan, backend=experts.backend)
        counts = collectives.wait_tensor(counts)  # (E,): rows from each rank for each local expert
        splits = torch.stack([plan.kept, counts]).unflatten(1, (self.mesh.size(), -1))
        send, receive = splits.sum(-1).tolist()
        received = collectives.wait_tensor(self._all_to_all(rows[: sum(send)], receive, send))
        expert = self._local(experts, counts).repeat_interleave(counts, output_size=received.shape[0])
        out = self._all_to_all(self._outputs(experts, received, expert), send, receive)
        return F.pad(collectives.wait_tensor(out), (0, 0, 0, plan.num_rows - sum(send)))

    def _static(self, experts: Experts, x: Tensor, plan: RoutingPlan, capacity: int) -> Tensor:
        counts = self._all_to_all(self._kept(plan, capacity))
        padded = plan.to_padded(dispatch(x, plan, backend=experts.backend), capacity)
        received = collectives.wait_tensor(self._all_to_all(padded.flatten(0, 1)))
        counts = collectives.wait_tensor(counts)
        if _raises(x):
            self._check_counts(counts, capacity)
        position = torch.arange(capacity, dtype=torch.int32, device=x.device)
        expert = torch.where(position < counts[:, None], self._local(experts, counts)[:, None], -1)
        out = self._all_to_all(self._outputs(experts, received, expert.flatten()))
        return plan.from_padded(collectives.wait_tensor(out).unflatten(0, (experts.num_experts, capacity)))

    def _kept(self, plan: RoutingPlan, capacity: int) -> Tensor:
        """(E,): the rows of each expert. If one has too many, minus their number, so that all ranks get to know it."""
        if not _raises(plan.kept):
            torch._assert_async((plan.kept <= capacity).all(), _too_small(capacity))
            return plan.kept
        largest = plan.kept.max()
        return plan.kept if largest <= capacity else (-largest).expand_as(plan.kept)

    def _check_counts(self, counts: Tensor, capacity: int) -> None:
        """counts (E,): what `_kept` of each rank returned for this rank's experts. Raises on all ranks or on none."""
        least, place = counts.min(0)
        if least < 0:
            rank = int(place) // (len(counts) // self.mesh.size())
            raise ValueError(f"{_too_small(capacity)}, {-int(least)} on rank {rank} of the mesh")

    def norms(self, experts: ExpertMLP, x: Tensor, winners: int | None = None) -> Tensor:
        """(T, E): the norms of all experts' outputs for x (T, D). winners: as in expert_norms.

        A rank sends its T tokens to all others, (n - 1) T D elements, and receives T (E - E / n) of the norms.
        """
        (x,) = as_autocast(x)
        send = [x.shape[0]] * self.mesh.size()
        if self.capacity is None:
            receive = self._token_counts(x)
            received = collectives.wait_tensor(self._all_to_all(x.repeat(len(send), 1), receive, send))
        else:
            receive, received = send, self._tokens_of_all(x, self.capacity)
        norms = collectives.wait_tensor(self._all_to_all(experts.own_norms(received, winners), send, receive))
        return norms.unflatten(0, (len(send), -1)).transpose(0, 1).flatten(1)

    @torch.compiler.disable(reason="ExpertParallel: the host waits for the number of tokens of every rank")
    def _token_counts(self, x: Tensor) -> list[int]:
        return collectives.wait_tensor(self._send_count(x)).tolist()

    def _send_count(self, x: Tensor) -> Tensor:
        """(n,): the number of tokens of every rank."""
        return self._all_to_all(torch.full((self.mesh.size(),), x.shape[0], dtype=torch.int32, device=x.device))

    def _tokens_of_all(self, x: Tensor, capacity: int) -> Tensor:
        """(n T, D): the tokens of all ranks. Raises on all ranks, or on none, if they have different T.

        No rank knows beforehand whether T has changed on another one, and in a collective with different sizes a rank
        aborts. So all send as many rows as all had in the last call, while their T are in flight: the host waits once.
        If T has changed on all ranks alike, they send again.
        """
        ranks, tokens = self.mesh.size(), x.shape[0]
        if torch.compiler.is_compiling():
            return collectives.wait_tensor(self._all_to_all(x.repeat(ranks, 1)))
        counts = self._send_count(x)
        message = f"ExpertParallel: with capacity={capacity}, norms need the same number of tokens on all ranks"
        if not x.is_cpu:
            torch._assert_async((collectives.wait_tensor(counts) == tokens).all(), message)
            return collectives.wait_tensor(self._all_to_all(x.repeat(ranks, 1)))
        rows = x if tokens == self.last_tokens else x.new_zeros(self.last_tokens, x.shape[1])
        received = collectives.wait_tensor(self._all_to_all(rows.repeat(ranks, 1)))
        found = collectives.wait_tensor(counts).tolist()
        if len(set(found)) > 1:
            raise ValueError(
                f"{message}; got {found}, in the order of ranks. Give all ranks as many tokens, or set no capacity"
            )
        if tokens == self.last_tokens:
            return received
        self.last_tokens = tokens
        return collectives.wait_tensor(self._all_to_all(x.repeat(ranks, 1)))

    def own(self, parameter: Tensor | None) -> Tensor | None:
        """The part of a parameter that this rank owns; its gradient is divided by n."""
        if isinstance(parameter, DTensor):
            if parameter.device_mesh.ndim != 1:
                raise ValueError(
                    "ExpertParallel: fully_shard has not gathered the experts' parameters; call forward, or "
                    "torch.distributed.fsdp.register_fsdp_forward_method(experts, name) for `rows` and `norms`"
                )
            parameter = parameter.to_local()
        return None if parameter is None else _DivideGradient.apply(parameter, self.mesh.size())

    def _outputs(self, experts: Experts, received: Tensor, expert: Tensor) -> Tensor:
        """(R', Dout): outputs of the rows `received` (R', D). expert (R',): each row's local expert, -1 for padding."""
        plan = make_plan(expert[:, None], experts.num_experts // self.mesh.size())
        return combine(experts.outputs(received, plan), plan, backend=experts.backend)

    def _local(self, experts: Experts, like: Tensor) -> Tensor:
        """(E,): the local experts 0 .. E / n - 1, repeated for each sending rank, on the device of `like`."""
        count = experts.num_experts // self.mesh.size()
        return torch.arange(count, dtype=torch.int32, device=like.device).repeat(self.mesh.size())

    def _all_to_all(self, x: Tensor, receive: list[int] | None = None, send: list[int] | None = None) -> Tensor:
        """Sends send[r] rows of x to each rank r, returns receive[r] rows from each rank r. None: equal parts."""
        return collectives.all_to_all_single_autograd(x.contiguous(), receive, send, self.mesh)

    def _check(self, experts: Experts, x: Tensor, plan: RoutingPlan) -> None:
        if plan.num_experts != experts.num_experts:
            raise ValueError(
                f"ExpertParallel: expected a plan over all {experts.num_experts} experts, got {plan.num_experts}"
            )
        if any(isinstance(each, DTensor) for each in (x, plan.kept, plan.row_token)):
            raise ValueError("ExpertParallel: x and plan must be this rank's own plain tensors, got DTensors")
        if x.device.type != self.mesh.device_type or plan.kept.device != x.device:
            devices = f"x on {x.device} and a plan on {plan.kept.device}"
            raise ValueError(f"ExpertParallel: x and plan must be on one {self.mesh.device_type} device, got {devices}")

    def __deepcopy__(self, memo: Any) -> Exchange:
        return self  # process groups are not copied


def _raises(x: Tensor) -> bool:
    """Whether a check of values raises ValueError. Else it is an assert: a host that reads a GPU's values waits."""
    return x.is_cpu and not torch.compiler.is_compiling()


def _too_small(capacity: int) -> str:
    return f"ExpertParallel: capacity={capacity} is too small for the largest number of rows per expert"


class _DivideGradient(torch.autograd.Function):
    """The identity; the gradient is divided by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.ranks, None


class GlobalPolicy:
    """A policy that routes the tokens of all ranks together: each rank takes its part of one plan for all tokens.

        MoE(gate, experts, GlobalPolicy(ExpertChoice(2.0), mesh["ep"]))

    Use it for expert choice or priority routing over the global batch (Zhou et al. 2022; the sparse ViT), or for a
    capacity that all ranks share. Two all-gathers exchange the gate's weights and experts, T K elements of each from a
    rank; then every rank computes the whole plan. All ranks must have the same number of tokens: else all raise
    ValueError, on CPUs outside torch.compile, where another all-gather compares the numbers. The plan's `requested` and
    `dropped` count the requests of all ranks.

    Gradients flow only to the weights of this rank's tokens, since a token's weight depends on its own logits only and
    the choice of tokens has no gradient. An expert's rows are in the order of tokens. One process orders them otherwise
    for TokenChoice with a priority, or with order="choice" (the default with a capacity) and K > 1; the experts'
    gradients then agree within rounding.

    Args:
        policy: any of nn.policies.
        mesh: a mesh of one dimension.
    """

    def __init__(self, policy: Policy, mesh: DeviceMesh) -> None:
        _check_mesh("GlobalPolicy", mesh)
        self.policy, self.mesh = policy, mesh

    def __call__(self, gate: GateOutput, training: bool, mask: Tensor | None = None) -> tuple[RoutingPlan, Tensor]:
        tokens = gate.weights.shape[0]
        if not torch.compiler.is_compiling():
            self._check_tokens(tokens)
        own = slice(self.mesh.get_local_rank() * tokens, (self.mesh.get_local_rank() + 1) * tokens)
        weights, experts = (
            DTensor.from_local(each.detach(), self.mesh, [Shard(0)]).full_tensor()
            for each in (gate.weights, gate.experts)
        )
        weights = torch.cat([weights[: own.start], gate.weights, weights[own.stop :]])
        if mask is not None:
            mask = DTensor.from_local(mask, self.mesh, [Shard(0)]).full_tensor()
        everyone = replace(gate, weights=weights, experts=experts)
        plan, weights = call_with_mask("GlobalPolicy", self.policy, everyone, training, mask=mask)
        # slot_expert is -1 for dropped choices, so a capacity only makes this rank's plan shorter. Where the number of
        # rows in use can be read, none is needed. Else num_rows is min(T K, E capacity), T the tokens of all ranks.
        shortened = sizes.has_values(plan.kept) or plan.num_rows == plan.slot_row.numel()
        capacity = None if shortened else plan.num_rows // plan.num_experts
        kept = make_plan(plan.slot_expert[own].contiguous(), plan.num_experts, capacity=capacity, order="token")
        kept = rows_in_use(kept)
        return replace(kept, requested=plan.requested, dropped=plan.dropped), weights[own]

    def _check_tokens(self, tokens: int) -> None:
        """Raises on all ranks, or on none, if their numbers of tokens differ. On a GPU the host would have to wait."""
        own = torch.tensor([tokens], device=self.mesh.device_type)
        if isinstance(own, FakeTensor) or not own.is_cpu:
            return
        found = DTensor.from_local(own, self.mesh, [Shard(0)]).full_tensor().tolist()
        if len(set(found)) > 1:
            raise ValueError(
                f"GlobalPolicy: all ranks need the same number of tokens, got {found}, in the order of ranks; drop or "
                "pad the last batch"
            )

    def __repr__(self) -> str:
        return f"GlobalPolicy({self.policy})"


def _check_mesh(name: str, mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or mesh.shape
        raise ValueError(f"{name}: expected a mesh of one dimension, such as mesh['ep'], got {names}")


def _check_capacities(mesh: DeviceMesh, capacity: int | None) -> None:
    """Raises on all ranks, or on none, if their capacities differ, as those made from a rank's own T do."""
    own = torch.tensor([capacity or 0], device=mesh.device_type)
    if isinstance(own, FakeTensor):
        return
    found = [each or None for each in DTensor.from_local(own, mesh, [Shard(0)]).full_tensor().tolist()]
    if len(set(found)) > 1:
        raise ValueError(
            f"ExpertParallel: capacity must be the same on all ranks, got {found}, in the order of ranks; compute it "
            "from the largest number of tokens of a rank"
        )


def data_parallel(model: nn.Module, mesh: DeviceMesh, **options: Any) -> DistributedDataParallel:
    """DistributedDataParallel (DDP) of a model with sharded experts. mesh: all ranks, such as mesh["dp", "ep"].

    Gradients of the experts are averaged over the ranks that own the same experts, all other gradients over all ranks.
    options: arguments of DDP. FSDP2 does not need this function: see ExpertParallel.
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
    """Replaces the parameter's gradient by its mean over the ranks of all groups."""
    assert isinstance(parameter.grad, DTensor)
    grad = parameter.grad.to_local()
    for group in groups:
        dist.all_reduce(grad.div_(group.size()), group=group)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Returns the norm () of all gradients, as in one process. If it exceeds max_norm, scales gradients to max_norm.

    `torch.nn.utils.clip_grad_norm_` fails for parameters of several meshes. Call this function on all ranks, after the
    gradients are averaged over the data-parallel ranks.
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
    """Largest absolute gradient of a mesh. With fully_shard a rank's part may be empty, for which amax fails."""
    parts = [each.to_local() if isinstance(each, DTensor) else each for each in grads]
    largest = torch.stack([parts[0].new_zeros(()), *(each.abs().amax() for each in parts if each.numel())]).amax()
    for group in mesh.get_all_groups() if mesh is not None else ():
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return largest
