"""Papers 002 and 003: sparse vision transformers on images, one layer of experts after another way of routing.

V-MoE takes its experts from the last blocks, capacity 1.05, and routes in groups of 8 images; E^3 is an ensemble of two
in one network. The sparse ViT of paper 002 trains dense, then its new sparse gates alone, then everything. Small models
here, so that CIFAR-10 fits a CPU; the defaults of the gates are the papers'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.models.moe import MoEViT
from moe_kernels.nn import schedules
from moe_kernels.nn.experts import ExpertMLP
from moe_kernels.nn.gates import EnsembleGate, RandomGate, SoftmaxGate, StagedGate, TopKGate
from moe_kernels.nn.gates.ensemble import ensemble_log_probs
from moe_kernels.nn.losses import batch_inverse_cv, batch_variation, inverse_cv, symmetric_kl
from moe_kernels.nn.moe import MoE, MoEOutput
from moe_kernels.nn.policies import ExpertChoice, PriorityRouting, TokenChoice
from moe_kernels.recipes import Batch, Measures, Recipe, Routing, Splits, Task, option

PAPER_002 = ("dense", "softmax", "sparsified", "token_choice", "expert_choice", "priority")
PAPER_003 = ("vmoe", "bpr", "bpr_sum", "e3", "thor")


@dataclass(frozen=True)
class VMoE(Recipe):
    """Sides of paper 002: dense, softmax, sparsified, token_choice, expert_choice, priority; of paper 003: vmoe, bpr,
    bpr_sum, e3, thor."""

    SIDES: ClassVar[tuple[str, ...]] = (*PAPER_002, *PAPER_003)

    sides: tuple[str, ...] = option(("dense", "vmoe", "bpr"), "ways of routing to compare")
    patch: int = option(4, "pixels of a patch's side; 2 for digits", low=1)
    dim: int = option(96, "width of the model; paper 002: 192", low=1)
    depth: int = option(4, "blocks; both papers: 6 and more", low=1)
    heads: int = option(4, "of attention", low=1)
    hidden: int = option(192, "hidden layer of an expert, and of a dense layer", low=1)
    moe_layers: int = option(2, "the last so many blocks have experts", low=0)
    experts: int = option(8, "of a layer; E^3: of all members together", low=2)
    k: int = option(1, "experts a token", low=1)
    members: int = option(2, "of E^3", low=2)
    group: int = option(8, "images whose tokens compete for capacity; 0: all of a batch", low=0)
    capacity: float = option(1.05, "capacity factor in training; lower it in evaluation with --capacity-eval", low=0)
    capacity_eval: float = option(1.05, "capacity factor in evaluation", low=0)
    balance: float = option(0.005, "weight of V-MoE's importance loss, and of its load loss", low=0)
    inverse_cv: float = option(0.01, "weight of both losses of the dense side `softmax` (paper 002)", low=0)
    expert_dropout: float = option(0.1, "of softmax and sparsified (paper 002)", low=0, high=1)
    distill: float = option(1.0, "weight of the distillation to the new gates of `sparsified`", low=0)
    consistency: float = option(1.0, "alpha of THOR", low=0)
    batch_size: int = option(64, "images a step", low=1)
    eval_batch: int = option(256, "images at a time in evaluation", low=1)
    lr: float = option(1e-3, "learning rate of Adam, cosine to zero", low=0)

    def build(self, data: Splits, seed: int, steps: int) -> Task:
        side, x = self.side, data.train[0]
        members = self.members if side == "e3" else 1
        model = MoEViT(
            data.source.image_shape,
            len(data.source.classes),
            lambda index: (
                self._layer(data.source.image_shape)
                if side != "dense" and index >= self.depth - self.moe_layers
                else None
            ),
            patch=self.patch,
            dim=self.dim,
            depth=self.depth,
            heads=self.heads,
            hidden=self.hidden,
            members=members,
        ).to(x.device)
        staged = [module for module in model.modules() if isinstance(module, StagedGate)]

        def loss(batch: Batch) -> dict[str, Tensor]:
            x, y = batch.tensors
            logits, outputs = model(x)
            task = F.cross_entropy(logits, y.repeat_interleave(members))
            extra = sum((out.loss for out in outputs), task.new_zeros(()))
            if side in ("softmax", "sparsified") and all(gate.stage == 1 for gate in staged):
                extra = extra + self.inverse_cv * sum(map(_inverse_cvs, _gates(outputs, len(x)))) / max(len(outputs), 1)
            if side == "thor":
                again, _ = model(x)
                extra = F.cross_entropy(again, y) + self.consistency * symmetric_kl(logits, again)
            return {"loss": task + extra, "task": task}

        def evaluate(batch: Batch) -> Measures:
            x, y = batch.tensors
            logits, outputs = model(x)
            log_probs = ensemble_log_probs(logits, members)
            found: dict[str, tuple[Tensor, Tensor | float]] = {
                "accuracy": ((log_probs.argmax(-1) == y).sum(), len(y)),
                "loss": (F.nll_loss(log_probs, y, reduction="sum"), len(y)),
            }
            if outputs:
                dropped = torch.stack([out.statistics["dropped"] for out in outputs]).mean()
                found["dropped"] = (dropped * len(y), len(y))
                variation = torch.stack([batch_variation(each) for each in _gates(outputs, len(x) * members)]).mean()
                found["batch variation"] = (variation * len(y), len(y))
            return found

        def routing(batch: Batch) -> list[Routing]:
            return [Routing(out.plan.used) for out in model(batch.tensors[0])[1]]

        def before_step(step: int) -> None:
            stage = 1 + (step >= steps // 2) + (step >= 3 * steps // 4)
            for gate in staged:
                gate.stage = stage
            if stage == 2:
                schedules.train_gates_alone(model)
            else:
                model.requires_grad_(True)

        return Task(
            model,
            torch.optim.Adam(model.parameters(), self.lr, fused=True),
            loss,
            evaluate,
            schedule=schedules.cosine(steps),
            before_step=before_step if staged else None,
            routing=routing if side != "dense" and self.moe_layers else None,
            clip=1.0,
            grid=model.embed.grid if side != "dense" and self.moe_layers else None,
        )

    def _layer(self, image_shape: tuple[int, int, int]) -> MoE:
        side, dim, count = self.side, self.dim, self.experts
        experts = ExpertMLP(count, dim, self.hidden)
        image = 1 + (image_shape[1] // self.patch) * (image_shape[2] // self.patch)  # tokens, the class token first
        group = self.group * image or None
        own = TokenChoice(
            self.capacity,
            factor_eval=self.capacity_eval,
            group=group and group * self.members,  # tiled ones, too
        )
        if side == "softmax":
            return MoE(SoftmaxGate(dim, count, noise=True), experts, expert_dropout=self.expert_dropout)
        if side == "sparsified":
            sparse = TopKGate(dim, count, self.k, order="softmax_topk", noise="vmoe")
            staged = StagedGate(SoftmaxGate(dim, count, noise=True), sparse, distill=self.distill)
            return MoE(staged, experts, expert_dropout=self.expert_dropout)
        if side == "token_choice":
            return MoE(
                TopKGate(dim, count, 1, order="softmax_topk", noise="vmoe"), experts, TokenChoice(1.0, group=group)
            )
        if side == "expert_choice":
            return MoE(SoftmaxGate(dim, count, noise=True), experts, ExpertChoice(1.0, group=image))
        if side == "priority":
            return MoE(SoftmaxGate(dim, count, noise=True), experts, PriorityRouting())
        if side == "e3":
            return MoE(EnsembleGate(dim, count, self.k, members=self.members, noise=True), experts, own)
        if side == "thor":
            return MoE(RandomGate(count), experts)
        priority = {"vmoe": None, "bpr": "max", "bpr_sum": "sum"}[side]
        gate = TopKGate(
            dim,
            count,
            self.k,
            order="softmax_topk",
            noise="vmoe",
            bias=False,
            importance=self.balance,
            load=self.balance,
        )
        policy = TokenChoice(
            self.capacity, factor_eval=self.capacity_eval, priority=priority, multiple_of=4, group=group
        )
        return MoE(gate, experts, policy)


def _gates(outputs: list[MoEOutput], images: int) -> list[Tensor]:
    """(B, S, E) of every layer."""
    return [out.gates[0].gates.unflatten(0, (images, -1)) for out in outputs]


def _inverse_cvs(gates: Tensor) -> Tensor:
    return inverse_cv(gates.flatten(0, 1)) + batch_inverse_cv(gates)
