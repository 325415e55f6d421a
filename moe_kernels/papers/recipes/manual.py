"""The sparse ViT, Table 6: is routing by hand (five experts, two similar digits each) better than a learned gate?

The network has one transformer layer. In the first half of the steps, side `manual` routes all tokens by the label of
their image. Then the experts are frozen, as in the paper, and the gate learns together with the rest of the network.
`shuffled` is the control with random pairs of digits. Evaluation has no labels and always uses the learned gate, which
`manual` and `shuffled` train only in the second half of the steps.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.nn.experts import ExpertMLP
from moe_kernels.nn.gates import Gate, ManualGate, StagedGate, TopKGate
from moe_kernels.nn.gates.manual import MNIST
from moe_kernels.nn.moe import MoE
from moe_kernels.nn.schedules import cosine
from moe_kernels.papers.models.moe import MoEViT
from moe_kernels.papers.recipes import Batch, Evaluation, Recipe, Splits, Task, accuracy, option, total_loss
from moe_kernels.papers.recipes._routers import forward_with_routing, regularisers


@dataclass(frozen=True)
class Manual(Recipe):
    """Sides: learned (by the gate), manual (by pairs of similar digits, then the gate), shuffled (random pairs)."""

    SIDES: ClassVar[tuple[str, ...]] = ("learned", "manual", "shuffled")

    sides: tuple[str, ...] = option(("learned", "manual", "shuffled"), "ways of routing to compare")
    patch: int = option(2, "pixels of a patch's side; for MNIST 4 or 7", low=1)
    dim: int = option(64, "width of the model", low=1)
    heads: int = option(4, "heads of attention", low=1)
    hidden: int = option(64, "neurons of an expert", low=1)
    batch_size: int = option(64, "images of a step", low=1)
    lr: float = option(1e-3, "learning rate of Adam, falling along a cosine to zero", low=0)

    def build(self, data: Splits, seed: int, steps: int) -> Task:
        classes, image_shape = len(data.source.classes), data.source.image_shape
        if classes != len(MNIST):
            raise ValueError(f"manual: expected ten classes (digits), {data.source.name} has {classes}")
        by_hand = list(MNIST)
        if self.side == "shuffled":
            random.Random(seed).shuffle(by_hand)
        learned = TopKGate(self.dim, 5, 1, order="softmax_topk", noise="vmoe", balance=0.01)
        gate: Gate = learned
        if self.side != "learned":
            gate = StagedGate(ManualGate(by_hand), learned, second_in_evaluation=True)
        moe = MoE(gate, ExpertMLP(5, self.dim, self.hidden))
        model = MoEViT(
            image_shape, classes, lambda index: moe, patch=self.patch, dim=self.dim, depth=1, heads=self.heads
        ).to(data.train[0].device)

        def loss(batch: Batch) -> dict[str, Tensor]:
            x, y = batch.tensors
            logits, (out,) = model(x, y)
            return total_loss(F.cross_entropy(logits, y), regularisers([out]))

        def evaluate(batch: Batch) -> Evaluation:
            x, y = batch.tensors
            logits, _, routing = forward_with_routing(model, x)
            return Evaluation(accuracy(logits, y), routing)

        def before_step(step: int) -> None:
            if isinstance(gate, StagedGate):
                gate.stage = 1 if step < steps // 2 else 2
                moe.experts.requires_grad_(gate.stage == 1)

        return Task(
            model,
            torch.optim.Adam(model.parameters(), self.lr, fused=True),
            loss,
            evaluate,
            predict=lambda x: model(x)[0],
            schedule=cosine(steps),
            before_step=before_step,
            grid=model.embed.grid,
        )
