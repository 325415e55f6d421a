"""The layer of experts: a gate, a policy and experts. The layers of the papers differ in these three parts.

    y_t = sum of weight_tk expert_(e_tk)(x_t) over the choices k of token t that the policy keeps

By number of the paper (001 tree COMET, 002 sparse ViT, 003 V-MoE, E^3 and THOR, 004 CompeteSMoE):

001  SoftmaxGate or TreeGate over all experts, NonzeroWeights; PermutedGate for COMET+; MultiGateMoE for several tasks
002  SoftmaxGate, then TopKGate(k=1) with TokenChoice, ExpertChoice or PriorityRouting; expert_dropout=0.1; ManualGate
003  TopKGate(order="softmax_topk", noise="vmoe") with TokenChoice(1.05, priority="max", multiple_of=4, group=tokens of
     8 images); EnsembleGate; RandomGate
004  CompetitionGate; TopKGate, also frozen or with a growing k; XMoEGate; StableGate; HyperRouterGate; Switch's router,
     which is TopKGate(k=1, order="softmax_topk", balance=0.01)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from moe_kernels._pytree import register
from moe_kernels.nn._output import OutputModule, collect
from moe_kernels.nn._recompute import refuse_reentrant
from moe_kernels.nn.experts import Experts
from moe_kernels.nn.gates import Gate, GateOutput
from moe_kernels.nn.local_search import LocalSearch
from moe_kernels.nn.policies import TokenChoice, nonzero_choices
from moe_kernels.ops._checks import check_choice, check_module, check_number
from moe_kernels.ops.combine import combine
from moe_kernels.ops.plan import make_plan
from moe_kernels.plan import RoutingPlan

Policy = Callable[[GateOutput, bool], tuple[RoutingPlan, Tensor]]
OUTPUTS = ("all", "tensor")


@dataclass(frozen=True)
class MoEOutput:
    """The output of a layer of experts.

    * y: (..., Dout); a MultiGateMoE has a tuple of these, one for each gate.
    * plan: the RoutingPlan.
    * gates: the output of each gate, before the policy.
    * losses: scalars by name, already weighted; add them to the task's loss.
    * records: detached tensors by name, which `statistics` returns unchanged.

    A registered pytree whose children are the fields in this order.

    Example:
        >>> out = MoE(TopKGate(16, 4, 2), ExpertMLP(4, 16, 32))(torch.randn(8, 16))
        >>> out.plan.kept.sum(), out.loss
        (tensor(16), tensor(0.))
    """

    y: Any
    plan: RoutingPlan
    gates: tuple[GateOutput, ...]
    losses: dict[str, Tensor] = field(default_factory=dict)
    records: dict[str, Tensor] = field(default_factory=dict)

    @property
    def statistics(self) -> dict[str, Tensor]:
        """Detached tensors by name: those of the gates ("task0.name" in a MultiGateMoE), the records, and those of the
        plan: "experts_per_token" (); "load" (E), rows of every expert over T; "dropped" (), dropped over requested.

        Computed at every read; a forward computes none.
        """
        prefixes = [f"task{index}." for index in range(len(self.gates))] if isinstance(self.y, tuple) else [""]
        named = zip(prefixes, self.gates, strict=True)
        found = {prefix + name: each for prefix, gate in named for name, each in gate.statistics.items()}
        return found | self.records | plan_statistics(self.plan)

    @property
    def loss(self) -> Tensor:
        """(): the sum of the losses, 0 if there are none."""
        return sum(self.losses.values(), torch.zeros((), device=self.plan.row_token.device))


register(MoEOutput)


class MoE(OutputModule):
    """A layer of experts with one gate.

        out = MoE(TopKGate(352, 16, 2), ExpertMLP(16, 352, 352, activation="relu"))(x)

    Args:
        gate: from nn.gates, with as many experts as `experts` has.
        experts: ExpertMLP or ExpertLayer.
        policy: one of nn.policies; None: TokenChoice(), which drops nothing.
        expert_dropout: probability that training sets an expert's weight to zero for a sample (paper 002, 10 %); the
            remaining weights are neither renormalised nor scaled. A sample is a row of x's first dimension.
        pass_through: add (1 - sum of the kept weights) x, so that a token without an expert stays as it is
            (StableMoE); needs Dout = D. Only for a layer without a residual around it. With an expert x + FF(LN(x)) of
            weight a, StableMoE computes a (x + FF(LN(x))) + (1 - a) x = x + a FF(LN(x)). A block with a residual
            computes the same without pass_through, so models.moe.MoEBlock passes pass_through=False.
        output: "all" returns a MoEOutput; "tensor" returns its y alone, for nn.Sequential and other code that takes a
            tensor. Losses and statistics of such layers are collected by `with nn.collect_outputs() as outputs`.

    Input: x (..., D), any number of leading dimensions; ids (...), for gates that use them. Output: MoEOutput with
    y (..., Dout). y is zero for a token that no expert kept: only the residual around the layer carries it.

    Checkpointing: torch.utils.checkpoint(layer, x, use_reentrant=False). With use_reentrant=True torch gives gradients
    to tensors alone; a direct call of a layer with output="all" raises RuntimeError there. A checkpointed function that
    returns the layer's output is not recognised, and its gradients are lost.

    Autocast: experts follow it as torch.nn.Linear does, and y has autocast's dtype. The gate computes in the dtype of
    its parameters, so that rounding does not change the choice. With pass_through, y is a sum with x and has their
    common dtype (torch.promote_types).

    Example:
        >>> layer = MoE(TopKGate(16, 4, 2, balance=0.01), ExpertMLP(4, 16, 32), TokenChoice(1.25))
        >>> out = layer(torch.randn(2, 8, 16))
        >>> out.y.shape, list(out.losses), sorted(out.statistics)
        (torch.Size([2, 8, 16]), ['balance'], ['dropped', 'experts_per_token', 'load'])
    """

    def __init__(
        self,
        gate: Gate,
        experts: Experts,
        policy: Policy | None = None,
        *,
        expert_dropout: float = 0.0,
        pass_through: bool = False,
        output: str = "all",
    ) -> None:
        super().__init__()
        check_choice("MoE", "output", output, OUTPUTS)
        _check_experts("MoE", [gate], experts)
        if policy is not None and not callable(policy):
            raise TypeError(f"MoE: policy must be one of nn.policies, got {type(policy).__name__}")
        self.gate, self.experts = gate, experts
        self.policy: Policy = policy or TokenChoice()
        self.expert_dropout = check_number("MoE", "expert_dropout", expert_dropout, 0, 1, "a rate")
        self.pass_through, self.output = pass_through, output

    def forward(self, x: Tensor, ids: Tensor | None = None, *, pass_through: bool | None = None) -> Any:
        """pass_through: replaces the layer's option for this call; None keeps it."""
        if self.output == "all":
            refuse_reentrant("MoE")
        through = self.pass_through if pass_through is None else pass_through
        tokens = x.reshape(prod(x.shape[:-1]), x.shape[-1])  # no -1: D may be 0
        output = self.gate(tokens, None if ids is None else ids.reshape(-1))
        plan, weights = self.policy(output, self.training)
        if self.expert_dropout and self.training:
            weights = weights * _expert_mask(self.expert_dropout, x, plan)
        y = self.experts(tokens, plan, weights)
        if through and y.shape[1] != tokens.shape[1]:
            raise ValueError(f"MoE: pass_through needs experts from D to D, got {tokens.shape[1]} and {y.shape[1]}")
        if through:
            y = y + (1 - (weights * (plan.slot_row >= 0)).sum(-1, keepdim=True)).to(x.dtype) * tokens
        found = MoEOutput(y.reshape(*x.shape[:-1], y.shape[-1]), plan, (output,), output.losses)
        if self.output == "all":
            return found
        collect(found)
        return found.y

    def extra_repr(self) -> str:
        return f"policy={self.policy}, expert_dropout={self.expert_dropout:g}, output={self.output!r}"


class MultiGateMoE(OutputModule):
    """Experts shared by several tasks, each with its own gate (MMoE); an expert runs at most once for each token.

        y_task = sum over e of gate_task(x)_e expert_e(x)

    An expert whose weight for a token is exactly 0 in every task does not run for it. This is how dense-to-sparse
    training saves time. Paper 001 calls statistics["experts_per_token"] n/s.

    Args:
        gates: one for each task, all over the same experts; a gate given for several tasks runs once.
        experts: ExpertMLP or ExpertLayer.
        search: the permutation that all tasks share, the "+" of COMET+ (paper 001); None: none.

    Input: x (T, D); ids (T,), for gates that use them. Output: MoEOutput with y a tuple of (T, Dout). Losses and
    statistics of gates are named "task0.name"; the losses of a shared gate belong to its first task. With a search in
    training there is also the loss "permutation". The statistic "task0.gates" (T, E) holds the weights after the
    search. Autocast: as MoE. Source: paper 001, section 5.1; Ma et al. 2018.

    Example:
        >>> layer = MultiGateMoE([TopKGate(16, 4, 2), TopKGate(16, 4, 2)], ExpertMLP(4, 16, 32))
        >>> one, other = layer(torch.randn(8, 16)).y
        >>> one.shape, other.shape
        (torch.Size([8, 16]), torch.Size([8, 16]))
    """

    def __init__(self, gates: Sequence[Gate], experts: Experts, search: LocalSearch | None = None) -> None:
        super().__init__()
        if not gates:
            raise ValueError("MultiGateMoE: expected at least one gate, got none")
        _check_experts("MultiGateMoE", gates, experts)
        if search is not None:
            check_module("MultiGateMoE", "search", search, LocalSearch)
        self.gates, self.experts, self.search = nn.ModuleList(gates), experts, search

    def forward(self, x: Tensor, ids: Tensor | None = None) -> MoEOutput:
        refuse_reentrant("MultiGateMoE")
        by_gate = {gate: gate(x, ids) for gate in dict.fromkeys(self.gates)}
        outputs = [by_gate[gate] for gate in self.gates]
        gates, losses = [output.gates for output in outputs], {}
        k = sum(output.experts.shape[1] for output in by_gate.values())  # a token has at most so many experts
        if self.search is not None:
            permutation = self.search.permutation()
            if permutation is not None:
                k = self.experts.num_experts
            gates = [self.search.permute(each, permutation) for each in gates]
            if self.training:
                losses["permutation"] = self.search.regulariser(permutation)
        used = torch.stack([gate.detach() for gate in gates]).abs().sum(0)
        choices = nonzero_choices(used, k)
        plan = make_plan(choices, self.experts.num_experts, order="token")
        rows, slots = self.experts(x, plan, None, part="rows"), choices.clamp(min=0).long()
        y = tuple(combine(rows, plan, gate.gather(1, slots), backend=self.experts.backend) for gate in gates)
        first = {gate: f"task{index}" for index, gate in reversed([*enumerate(self.gates)])}  # the first task of a gate
        losses |= {f"{first[gate]}.{name}": loss for gate in by_gate for name, loss in by_gate[gate].losses.items()}
        records = {f"task{index}.gates": each.detach() for index, each in enumerate(gates)}
        return MoEOutput(y, plan, tuple(outputs), losses, records)


def plan_statistics(plan: RoutingPlan) -> dict[str, Tensor]:
    """The statistics of any plan: rows per token, rows of every expert over T, and the share of dropped requests."""
    tokens = max(plan.num_tokens, 1)
    rows = plan.kept.sum() / tokens
    return {"experts_per_token": rows, "load": plan.kept / tokens, "dropped": plan.dropped_share}


def _expert_mask(rate: float, x: Tensor, plan: RoutingPlan) -> Tensor:
    """(T, K): 0 if the expert of the slot is dropped for the token's sample, else 1."""
    samples = x.shape[0]
    kept = torch.rand(samples, plan.num_experts, device=x.device) >= rate
    token = torch.arange(plan.num_tokens, device=x.device)[:, None]
    # Choices without an expert (-1) read the last column; their weight is not used.
    return kept[token // max(plan.num_tokens // max(samples, 1), 1), plan.slot_expert]


def _check_experts(name: str, gates: Sequence[Gate], experts: Experts) -> None:
    check_module(name, "experts", experts, Experts)
    for gate in gates:
        check_module(name, "a gate", gate, Gate)
        if gate.num_experts != experts.num_experts:
            raise ValueError(f"{name}: the gate is over {gate.num_experts} experts, there are {experts.num_experts}")
