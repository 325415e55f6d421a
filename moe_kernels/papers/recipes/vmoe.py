"""The sparse ViT and V-MoE, with E^3 and THOR, on images, with several ways of routing.

V-MoE selects every second block, counted from the last, and puts experts into the last two of these ("last-2") or into
all ("every-2", here --moe-layers 99). By default V-MoE has two choices a token and capacity factor 1.05, and routes in
groups of 8 images. `bpr` and `bpr_sum` add Batch Prioritized Routing, by a token's largest or summed weight. E^3 is an
ensemble of two members in one network, with V-MoE's capacity and losses. With several values of --capacity-eval the
last evaluation measures V-MoE and BPR at each of them, with tokens in the order of their position, of their weight
(BPR) and at random, the control of BPR; the first value is that of all other evaluations. The sparse ViT has experts
in every block. Side `sparsified` trains with dense gates, then only its new sparse gates, then everything. `matched`
is a dense model so wide that it has at least as many parameters as `token_choice`. The default sizes are small, for
CIFAR-10 on a CPU. The sparse ViT also pretrains by MAE; this recipe does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.nn import schedules
from moe_kernels.nn.experts import ExpertMLP
from moe_kernels.nn.gates import EnsembleGate, RandomGate, SoftmaxGate, StagedGate, TopKGate
from moe_kernels.nn.gates.ensemble import ensemble_log_probs
from moe_kernels.nn.losses import batch_inverse_cv, batch_variation, inverse_cv
from moe_kernels.nn.moe import MoE, MoEOutput
from moe_kernels.nn.policies import ExpertChoice, PriorityRouting, TokenChoice
from moe_kernels.nn.schedules import LearningRate
from moe_kernels.papers.models.moe import MoEViT
from moe_kernels.papers.recipes import Batch, Evaluation, Recipe, Splits, Task, accuracy, option, total_loss
from moe_kernels.papers.recipes._routers import (
    experts_off,
    forward_with_routing,
    modules_of,
    policies,
    regularisers,
    second_pass,
)

# Of the table, with "batch-wise variation" and Table 5 of the sparse ViT and the comparison of E^3 with its members.
COLUMNS: tuple[str, ...] = (
    "test loss",
    "test ECE",
    "test dropped",
    "test batch variation",
    "test accuracy without experts",
)
COLUMNS += tuple(f"test member {member} {name}" for name in ("accuracy", "loss", "ECE") for member in (1, 2))
ORDERS = {"by position": None, "by weight": "max", "at random": "random"}  # of tokens, at a low capacity
SPARSE_VIT = ("dense", "matched", "softmax", "sparsified", "token_choice", "expert_choice", "priority")
V_MOE = ("vmoe", "bpr", "bpr_sum", "e3", "thor")
DENSE = ("dense", "matched")
SWEPT = ("experts", "k", "members", "capacity", "expert_dropout")


def _unused(side: str) -> tuple[str, ...]:
    """The swept options that do not affect a side."""
    used = {"experts"} if side != "dense" else set()
    used |= {"k", "capacity"} if side in ("vmoe", "bpr", "bpr_sum", "e3") else set()
    used |= {"members"} if side == "e3" else {"expert_dropout"} if side in ("softmax", "sparsified") else set()
    return tuple(name for name in SWEPT if name not in used)


@dataclass(frozen=True)
class VMoE(Recipe):
    """Sides: SPARSE_VIT and V_MOE."""

    SIDES: ClassVar[tuple[str, ...]] = (*SPARSE_VIT, *V_MOE)
    UNUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {side: _unused(side) for side in (*SPARSE_VIT, *V_MOE)}

    sides: tuple[str, ...] = option(("dense", "vmoe", "bpr"), "ways of routing to compare")
    patch: int = option(4, "pixels of a patch's side; 2 for digits", low=1)
    dim: int = option(96, "width of the model; the sparse ViT: 192", low=1)
    depth: int = option(4, "blocks; both papers: 6 and more", low=1)
    heads: int = option(4, "heads of attention", low=1)
    hidden: int = option(192, "neurons of an expert, and of a dense feed-forward layer", low=1, sweep=True)
    moe_every: int = option(
        0, "every n-th block has experts, counted from the last; 0: 1 in the sparse ViT, 2 in V-MoE", low=0
    )
    moe_layers: int = option(
        -1,
        "only the last so many of the blocks of --moe-every have experts; -1: all in the sparse ViT, 2 in V-MoE",
        low=-1,
    )
    experts: int = option(8, "experts of a layer; E^3: of all members together; the sparse ViT: 4", low=2, sweep=True)
    k: int = option(2, "choices a token of V-MoE, BPR and E^3; the sparse ViT: 1", low=1, sweep=True)
    members: int = option(2, "members of E^3", low=2, sweep=True)
    group: int = option(8, "images whose tokens share the capacity; 0: all of a batch", low=0)
    capacity: float = option(1.05, "capacity factor of V-MoE, BPR and E^3 in training", low=0, sweep=True)
    capacity_eval: tuple[float, ...] = option(
        (1.05,),
        "capacity factor of V-MoE, BPR and E^3 in evaluation; several: vmoe and bpr are also measured at each of them",
        low=0,
    )
    balance: float = option(0.005, "weight of the importance loss and of the load loss of V-MoE, BPR and E^3", low=0)
    token_balance: float = option(0.01, "weight of the balance loss of token_choice (Switch's)", low=0)
    inverse_cv: float = option(0.01, "weight of the two inverse CV losses of softmax and sparsified", low=0)
    expert_dropout: float = option(
        0.0, "chance to drop an expert, of softmax and sparsified; the sparse ViT: 0.1", low=0, high=1, sweep=True
    )
    experts_off: bool = option(False, "also evaluate without experts (the sparse ViT, Table 5)")
    last_rate: float = option(
        0.3, "sparsified: its last phase begins at this multiple of --lr; each phase has a cosine of its own", low=0
    )
    distill: float = option(1.0, "weight of the distillation to the new gates of sparsified", low=0)
    consistency: float = option(1.0, "alpha, weight of THOR's consistency loss", low=0)
    batch_size: int = option(64, "images of a step", low=1)
    eval_batch: int = option(256, "images of a batch in evaluation", low=1)
    lr: float = option(1e-3, "learning rate of Adam, falling along a cosine to zero", low=0)

    @property
    def capacities(self) -> tuple[float, ...]:
        """`capacity_eval`, which is a number in the description of models that were saved before it took several."""
        return self.capacity_eval if isinstance(self.capacity_eval, tuple) else (self.capacity_eval,)

    def curves(self) -> dict[str, dict[float, str]]:
        values = self.capacities if len(self.capacities) > 1 else ()
        named = {order: {value: f"test accuracy {order} at {value:g}" for value in values} for order in ORDERS}
        return named if values else {}

    def columns(self) -> tuple[str, ...]:
        return (*COLUMNS, *(name for curve in self.curves().values() for name in curve.values()))

    def build(self, data: Splits, seed: int, steps: int) -> Task:
        side, x = self.side, data.train[0]
        members = self.members if side == "e3" else 1
        model = self._model(data, self._matched_dim(data) if side == "matched" else self.dim).to(x.device)
        staged = modules_of(model, StagedGate)

        def loss(batch: Batch) -> dict[str, Tensor]:
            x, y = batch.tensors
            logits, outputs = model(x)
            task = F.cross_entropy(logits, y.repeat_interleave(members))
            extra = regularisers(outputs)
            if side in ("softmax", "sparsified") and outputs and all(gate.stage == 1 for gate in staged):
                by_layer = torch.stack([_inverse_cvs(gates) for gates in _gates(outputs, len(x))])
                extra["inverse cv"] = self.inverse_cv * by_layer.mean()
            if side == "thor":
                extra |= second_pass(logits, model(x)[0], y, self.consistency)
            return total_loss(task, extra)

        def predict(x: Tensor) -> Tensor:
            return ensemble_log_probs(model(x)[0], members)

        def evaluate(batch: Batch) -> Evaluation:
            x, y = batch.tensors
            logits, outputs, routing = forward_with_routing(model, x)
            log_probs = ensemble_log_probs(logits, members)
            found = dict(accuracy(log_probs, y))
            calibrated = {"ECE": confidence(log_probs, y)}
            for member, own in enumerate(logits.log_softmax(-1).unflatten(0, (-1, members)).unbind(1), 1):
                if members > 1:
                    found |= {f"member {member} {name}": each for name, each in accuracy(own, y).items()}
                    calibrated[f"member {member} ECE"] = confidence(own, y)
            if self.experts_off and outputs:
                with experts_off(model):
                    found["accuracy without experts"] = accuracy(predict(x), y)["accuracy"]
            if outputs:
                dropped = torch.stack([out.statistics["dropped"] for out in outputs]).mean()
                found["dropped"] = (dropped * len(y), len(y))
                variation = torch.stack([batch_variation(each) for each in _gates(outputs, len(x) * members)]).mean()
                found["batch variation"] = (variation * len(y), len(y))
            return Evaluation(found, routing, calibrated=calibrated)

        def at_capacities(batch: Batch) -> dict[str, tuple[Tensor, Tensor | float]]:
            x, y = batch.tensors
            found: dict[str, tuple[Tensor, Tensor | float]] = {}
            for order, priority in ORDERS.items():
                for value in self.capacities:
                    with policies(model, factor_eval=value, priority=priority):
                        right = (model(x)[0].argmax(-1) == y).sum()
                    found[f"accuracy {order} at {value:g}"] = (right, len(y))
            return found

        def dropped(x: Tensor) -> dict[str, Tensor]:
            """The share of a patch's choices, over the layers, that the two lowest of the capacities drop."""
            shares = {}
            for order, priority in ORDERS.items():
                for value in sorted(self.capacities)[:2]:
                    with policies(model, factor_eval=value, priority=priority):
                        lost = torch.stack([(out.plan.slot_row < 0).float().mean(-1) for out in model(x)[1]]).mean(0)
                    shares[f"{order}, {value:g}"] = lost.unflatten(0, (len(x), -1))[:, 1:].unflatten(
                        1, model.embed.grid
                    )
            return shares

        low = side in ("vmoe", "bpr", "bpr_sum") and len(self.capacities) > 1

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
            predict=predict,
            schedule=in_phases(steps, self.last_rate) if staged else schedules.cosine(steps),
            before_step=before_step if staged else None,
            clip=1.0,
            last=at_capacities if low else None,
            dropped=dropped if low else None,
            grid=model.embed.grid if side not in DENSE and self.moe_layers else None,
        )

    def _model(self, data: Splits, dim: int) -> MoEViT:
        expert_blocks = self._expert_blocks() if self.side not in DENSE else ()
        return MoEViT(
            data.source.image_shape,
            len(data.source.classes),
            lambda index: self._layer(data.source.image_shape) if index in expert_blocks else None,
            patch=self.patch,
            dim=dim,
            depth=self.depth,
            heads=self.heads,
            hidden=self.hidden * dim // self.dim,
            members=self.members if self.side == "e3" else 1,
        )

    def _expert_blocks(self) -> tuple[int, ...]:
        sparse_vit = self.side in SPARSE_VIT
        every = self.moe_every or (1 if sparse_vit else 2)
        count = self.moe_layers if self.moe_layers >= 0 else self.depth if sparse_vit else 2
        blocks = [index for index in range(self.depth) if (self.depth - 1 - index) % every == 0]
        return tuple(blocks[len(blocks) - min(count, len(blocks)) :])

    def _matched_dim(self, data: Splits) -> int:
        """The first of the widths dim, dim + heads, .. with at least as many parameters as token_choice."""

        def parameters(recipe: VMoE, dim: int) -> int:
            with torch.device("meta"):
                return sum(each.numel() for each in recipe._model(data, dim).parameters())

        target, dim = parameters(replace(self, sides=("token_choice",)), self.dim), self.dim
        while parameters(self, dim) < target:
            dim += self.heads
        return dim

    def _layer(self, image_shape: tuple[int, int, int]) -> MoE:
        side, dim, count = self.side, self.dim, self.experts
        experts = ExpertMLP(count, dim, self.hidden)
        tokens = 1 + (image_shape[1] // self.patch) * (image_shape[2] // self.patch)  # a class token and the patches
        group = self.group * tokens or None
        policy = TokenChoice(
            self.capacity,
            factor_eval=self.capacities[0],
            priority={"bpr": "max", "bpr_sum": "sum"}.get(side),
            group=group and group * (self.members if side == "e3" else 1),  # E^3 repeats the tokens for its members
            multiple_of=4,
        )
        losses: dict[str, Any] = {"importance": self.balance, "load": self.balance}
        if side == "softmax":
            return MoE(SoftmaxGate(dim, count, noise=True), experts, expert_dropout=self.expert_dropout)
        if side == "sparsified":
            sparse = TopKGate(dim, count, 1, order="softmax_topk", noise="vmoe")
            staged = StagedGate(SoftmaxGate(dim, count, noise=True), sparse, distill=self.distill)
            return MoE(staged, experts, expert_dropout=self.expert_dropout)
        if side == "token_choice":
            top = TopKGate(dim, count, 1, order="softmax_topk", noise="vmoe", balance=self.token_balance)
            return MoE(top, experts, TokenChoice(1.0, group=group))
        if side == "expert_choice":
            return MoE(SoftmaxGate(dim, count, noise=True), experts, ExpertChoice(1.0, group=tokens))
        if side == "priority":
            return MoE(SoftmaxGate(dim, count, noise=True), experts, PriorityRouting())
        if side == "e3":
            return MoE(EnsembleGate(dim, count, self.k, members=self.members, noise=True, **losses), experts, policy)
        if side == "thor":
            return MoE(RandomGate(count), experts)
        vmoe = TopKGate(dim, count, self.k, order="softmax_topk", noise="vmoe", bias=False, **losses)
        return MoE(vmoe, experts, policy)


def in_phases(steps: int, last: float) -> LearningRate:
    """A cosine from 1 to 0 for each phase of side `sparsified`, a half and two quarters of the steps; the last: `last`.

    With one cosine over all steps the last phase, which trains the experts with their sparse gates, would get less than
    0.15 of the learning rate.
    """
    ends = (steps // 2, 3 * steps // 4, steps)

    def factor(step: int) -> float:
        phase = (step >= ends[0]) + (step >= ends[1])
        begin = (0, *ends)[phase]
        return (1.0, 1.0, last)[phase] * schedules.cosine(ends[phase] - begin)(step - begin)

    return factor


def confidence(log_probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The probability of the predicted class (B,), and whether it is right (B,)."""
    best, predicted = log_probs.max(-1)
    return best.exp(), predicted == y


def _gates(outputs: list[MoEOutput], images: int) -> list[Tensor]:
    """The gates (images, tokens of an image, E) of every layer."""
    return [out.gates[0].gates.unflatten(0, (images, -1)) for out in outputs]


def _inverse_cvs(gates: Tensor) -> Tensor:
    return inverse_cv(gates.flatten(0, 1)) + batch_inverse_cv(gates)
