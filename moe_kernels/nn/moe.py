"""The layer of experts: a gate, a policy and experts.

    y_t = sum of weight_tk expert_(e_tk)(x_t) over the choices k of token t that the policy keeps

Gates, policies and options of the papers (docs/guide/results.md has their titles):

COMET trees  SoftmaxGate, DSelectKGate or TreeGate with NonzeroWeights; PermutedGate for COMET+; MultiGateMoE for
             several tasks
sparse ViT   SoftmaxGate, then TopKGate(k=1) with TokenChoice, ExpertChoice or PriorityRouting; expert_dropout=0.1;
             ManualGate
V-MoE        TopKGate(order="softmax_topk", noise="vmoe") with TokenChoice(1.05, priority="max", multiple_of=4,
             group=tokens of 8 images); E^3: EnsembleGate; THOR: RandomGate
CompeteSMoE  CompetitionGate; TopKGate, also frozen or with a growing k; XMoEGate; StableGate; HyperRouterGate; Switch's
             router, which is TopKGate(k=1, order="softmax_topk", balance=0.01)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from moe_kernels._pytree import register
from moe_kernels.nn._invariance import add_share, refuse_random, total
from moe_kernels.nn._mask import call_with_mask, check_mask, count
from moe_kernels.nn._output import OutputModule, collect
from moe_kernels.nn._recompute import refuse_reentrant
from moe_kernels.nn.experts import Experts
from moe_kernels.nn.gates import Gate, GateOutput
from moe_kernels.nn.local_search import LocalSearch
from moe_kernels.nn.policies import TokenChoice, nonzero_choices, rows_in_use
from moe_kernels.ops._checks import check_choice, check_module, check_number
from moe_kernels.ops.combine import combine
from moe_kernels.ops.plan import make_plan
from moe_kernels.plan import RoutingPlan

Policy = Callable[..., tuple[RoutingPlan, Tensor]]  # of a GateOutput, a bool and, where a mask is given, mask=
OUTPUTS = ("all", "tensor")


@dataclass(frozen=True)
class MoEOutput:
    """The output of a layer of experts.

    * y: (..., Dout); of a MultiGateMoE a tuple with one y for each task.
    * plan: the RoutingPlan.
    * gates: the GateOutputs, one for each task, before a policy or search changes them.
    * losses: scalars by name, already weighted; add them to the task's loss.
    * records: detached tensors by name, which `statistics` returns unchanged. With a mask also the statistics of the
      plan, which count real tokens.

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
        """Detached tensors by name: the records, statistics of the gates ("task0.name" in a MultiGateMoE) and those of
        the plan: "experts_per_token" (), rows in use over T; "load" (E), each expert's rows over T; "dropped" (), the
        share of the requests that were dropped. Every read computes them anew.
        """
        prefixes = [f"task{index}." for index in range(len(self.gates))] if isinstance(self.y, tuple) else [""]
        named = zip(prefixes, self.gates, strict=True)
        found = {prefix + name: each for prefix, gate in named for name, each in gate.statistics.items()}
        return found | plan_statistics(self.plan) | self.records

    @property
    def loss(self) -> Tensor:
        """(): the sum of the losses, 0 if there are none."""
        return sum(self.losses.values(), torch.zeros((), device=self.plan.row_token.device))


register(MoEOutput)


class MoE(OutputModule):
    """A layer of experts with one gate.

        out = MoE(TopKGate(352, 16, 2), ExpertMLP(16, 352, 352, activation="relu"))(x)

    Args:
        gate: a Gate with as many experts as `experts` has.
        experts: ExpertMLP or ExpertLayer.
        policy: one of nn.policies, or another callable with their interface; None: TokenChoice(), which drops nothing.
        expert_dropout: probability that training sets an expert's weight to zero for a sample (0.1 in the sparse ViT);
            the remaining weights are neither renormalised nor scaled. A sample is an entry of x's first dimension.
        pass_through: whether (1 - sum of the kept weights) x is added to y, so that y = x for a token without an
            expert; needs Dout = D. StableMoE adds this term to experts that contain a residual.
        output: "all" returns a MoEOutput; "tensor" returns its y alone, for nn.Sequential and other code that takes a
            tensor. `with nn.collect_outputs() as outputs` collects the MoEOutputs of such layers.

    Input: x (..., D), any number of leading dimensions; ids (...), for gates that use them; mask (...) bool, True for
    real tokens, None if all are; a tokenizer's attention_mask needs .bool(). Output: MoEOutput with y (..., Dout).
    Without pass_through y is zero for a token without an expert. A masked token has no expert and is in no capacity,
    loss or statistic: real tokens get what they would get in a batch without the masked ones, whatever those hold.

    Checkpointing: torch.utils.checkpoint(layer, x, use_reentrant=False). With use_reentrant=True torch gives gradients
    to tensors alone, so a layer with output="all" raises RuntimeError if the checkpoint calls it directly. If the
    checkpoint calls a function that returns the MoEOutput, there is no error, but gradients are lost.

    Autocast acts on the experts as on torch.nn.Linear, and y has autocast's dtype. The gate computes in the dtype of
    its parameters, so that rounding does not change the choice. With pass_through, y has the common dtype
    (torch.promote_types) of x and the experts' outputs.

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
            raise TypeError(f"MoE: policy must be callable, such as nn.TokenChoice(), got {type(policy).__name__}")
        self.gate, self.experts = gate, experts
        self.policy: Policy = policy or TokenChoice()
        self.expert_dropout = check_number("MoE", "expert_dropout", expert_dropout, 0, 1, "a rate")
        self.pass_through, self.output = pass_through, output

    def forward(
        self,
        x: Tensor,
        ids: Tensor | None = None,
        mask: Tensor | None = None,
        pass_through: bool | None = None,
    ) -> Any:
        """pass_through: replaces the layer's `pass_through` for this call; None keeps it."""
        if self.output == "all":
            refuse_reentrant("MoE")
        through = self.pass_through if pass_through is None else pass_through
        tokens = x.reshape(prod(x.shape[:-1]), x.shape[-1])  # D may be 0, for which -1 is ambiguous
        ids = None if ids is None else ids.reshape(-1)
        if mask is None:
            output = self.gate(tokens, ids)
            plan, weights = self.policy(output, self.training)
        else:
            check_mask("MoE", mask, x.shape[:-1], x.device)
            mask = mask.reshape(-1)
            output = call_with_mask("MoE", self.gate, tokens, ids, mask=mask)
            plan, weights = call_with_mask("MoE", self.policy, output, self.training, mask=mask)
        if self.expert_dropout and self.training:
            refuse_random("MoE", f"expert_dropout={self.expert_dropout:g}")
            weights = weights * _expert_mask(self.expert_dropout, x, plan)
        y = self.experts(tokens, plan, weights)
        if through and y.shape[1] != tokens.shape[1]:
            raise ValueError(f"MoE: pass_through needs experts from D to D, got {tokens.shape[1]} and {y.shape[1]}")
        if through:
            y = add_share(y, 1 - total(weights * (plan.slot_row >= 0), -1), tokens)
        records = {} if mask is None else plan_statistics(plan, mask)
        found = MoEOutput(y.reshape(*x.shape[:-1], y.shape[-1]), plan, (output,), output.losses, records)
        if self.output == "all":
            return found
        collect(found)
        return found.y

    def extra_repr(self) -> str:
        return f"policy={self.policy}, expert_dropout={self.expert_dropout:g}, output={self.output!r}"


class MultiGateMoE(OutputModule):
    """Experts that several tasks share, with a gate for each task (MMoE).

        y_task = sum over e of gate_task(x)_e expert_e(x)

    An expert runs at most once for each token, and not at all if its weight for the token is exactly 0 in every task.
    The plan has R = T min(E, the sum of the gates' K) rows; in eager mode on the CPU it has only the rows in use.

    Args:
        gates: one for each task, all over the same experts; a gate given for several tasks runs once.
        experts: ExpertMLP or ExpertLayer.
        search: the permutation that all tasks share, the "+" of COMET+ (COMET trees), or None.

    Input: x (T, D); ids (T,), for gates that use them; mask (T,), as in MoE. Output: MoEOutput with y a tuple of
    (T, Dout). Losses and
    statistics of gates are named "task0.name"; losses of a gate of several tasks have the name of its first task. In
    training a search adds the loss "permutation". The statistic "task0.gates" (T, E) is the weights after the search.
    Autocast: as in MoE. Source: COMET trees, section 5.1; Ma et al. 2018.

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

    def forward(self, x: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> MoEOutput:
        refuse_reentrant("MultiGateMoE")
        if mask is not None:
            check_mask("MultiGateMoE", mask, x.shape[:-1], x.device)
        by_gate = {gate: call_with_mask("MultiGateMoE", gate, x, ids, mask=mask) for gate in dict.fromkeys(self.gates)}
        outputs = [by_gate[gate] for gate in self.gates]
        gates, losses = [output.gates for output in outputs], {}
        k = sum(output.experts.shape[1] for output in by_gate.values())  # a token has at most k experts
        if self.search is not None:
            permutation = self.search.permutation()
            if permutation is not None:
                k = self.experts.num_experts
            gates = [self.search.permute(each, permutation) for each in gates]
            if self.training:
                losses["permutation"] = self.search.regulariser(permutation)
        used = torch.stack([gate.detach() for gate in gates]).abs().sum(0)
        choices = nonzero_choices(used, k)
        plan = rows_in_use(make_plan(choices, self.experts.num_experts, order="token"))
        rows, slots = self.experts(x, plan, None, part="rows"), choices.clamp(min=0).long()
        y = tuple(combine(rows, plan, gate.gather(1, slots), backend=self.experts.backend) for gate in gates)
        first = {gate: f"task{index}" for index, gate in reversed([*enumerate(self.gates)])}  # the first task of a gate
        losses |= {f"{first[gate]}.{name}": loss for gate in by_gate for name, loss in by_gate[gate].losses.items()}
        records = {f"task{index}.gates": each.detach() for index, each in enumerate(gates)}
        records |= {} if mask is None else plan_statistics(plan, mask)
        return MoEOutput(y, plan, tuple(outputs), losses, records)


def plan_statistics(plan: RoutingPlan, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Statistics of a plan: rows per token, rows of every expert over T, and the share of dropped requests.

    mask (T,): T is the number of real tokens."""
    tokens = max(plan.num_tokens, 1) if mask is None else count(mask, torch.get_default_dtype())
    rows = plan.kept.sum() / tokens
    return {"experts_per_token": rows, "load": plan.kept / tokens, "dropped": plan.dropped_share}


def _expert_mask(rate: float, x: Tensor, plan: RoutingPlan) -> Tensor:
    """(T, K) bool: False if the expert of a choice is dropped for the token's sample."""
    samples = x.shape[0]
    kept = torch.rand(samples, plan.num_experts, device=x.device) >= rate
    token = torch.arange(plan.num_tokens, device=x.device)[:, None]
    # Choices without an expert (-1) read the last column; their weights are not used.
    return kept[token // max(plan.num_tokens // max(samples, 1), 1), plan.slot_expert]


def _check_experts(name: str, gates: Sequence[Gate], experts: Experts) -> None:
    check_module(name, "experts", experts, Experts)
    for gate in gates:
        check_module(name, "a gate", gate, Gate)
        if gate.num_experts != experts.num_experts:
            raise ValueError(
                f"{name}: a gate must have as many experts as `experts`, {experts.num_experts}; got {gate.num_experts}"
            )
