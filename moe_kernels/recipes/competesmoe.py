"""Paper 004: CompeteSMoE and its rivals as character-level language models.

The paper trains 6 layers of 264 and 8 of 352 on enwik8 and text8 with 16 experts, two a token, for a budget of a GPU.
Here a small GPT with a layer of experts in every block, or in every second one (GLaM's pattern); bits per character of
the test text, the same budget for all. On few steps the competition is behind: it takes steps from the language model
that pay later, if at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.models.moe import MoEGPT
from moe_kernels.nn import schedules
from moe_kernels.nn.experts import ExpertMLP
from moe_kernels.nn.gates import (
    CompetitionGate,
    Gate,
    HyperRouterGate,
    RandomGate,
    StableGate,
    TopKGate,
    XMoEGate,
)
from moe_kernels.nn.losses import symmetric_kl
from moe_kernels.nn.moe import MoE
from moe_kernels.nn.policies import TokenChoice
from moe_kernels.recipes import Batch, Measures, Routing, Splits, Task, option
from moe_kernels.recipes._text import TextRecipe, bits, characters

SIDES = ("dense", "smoe", "fixed", "dropout", "switch", "xmoe", "stable", "hyper", "thor", "compete")


@dataclass(frozen=True)
class CompeteSMoE(TextRecipe):
    """Sides: dense, smoe, fixed (SMoE-Fixed), dropout (SMoE-Dropout), switch, xmoe, stable, hyper, thor, compete."""

    SIDES: ClassVar[tuple[str, ...]] = SIDES

    sides: tuple[str, ...] = option(("smoe", "fixed", "compete"), "gates to compare")
    steps: int = option(800, "steps instead of epochs; 0: epochs", low=0)
    dim: int = option(128, "width of the model", low=1)
    hidden: int = option(128, "hidden layer of an expert; the paper: the width of the model", low=1)
    depth: int = option(4, "blocks", low=1)
    moe_every: int = option(1, "blocks to one with experts, the last of them: 1 as in Switch here, 2 as in GLaM", low=1)
    heads: int = option(4, "of attention", low=1)
    experts: int = option(16, "of a layer", low=2)
    k: int = option(2, "experts a token", low=1)
    rate: float = option(
        0.05, "lambda: share of the steps in which a layer's experts compete; the paper: 0.03 to 0.09", low=0, high=1
    )
    alpha: float = option(1.0, "weight of the router's loss in those steps; the paper: 1 to 5", low=0)
    balance: float = option(
        0.01, "weight of the balance loss of smoe and switch; the paper's competition has none", low=0
    )
    consistency: float = option(1.0, "alpha of THOR", low=0)
    model_dropout: float = option(0.1, "of embeddings, attention and feed-forward layers", low=0, high=1)
    batch_size: int = option(16, "windows a step", low=1)
    lr: float = option(7e-4, "learning rate of Adam, after a tenth of the steps of warm-up", low=0)

    def build(self, data: Splits, seed: int, steps: int) -> Task:
        windows, side = data.train[0], self.side
        vocabulary = len(data.source.vocabulary)
        # Dense of the same width in use: a token goes through k experts' hidden units.
        model = MoEGPT(
            vocabulary,
            self.length,
            lambda index: None if side == "dense" or (index + 1) % self.moe_every else self._layer(vocabulary),
            dim=self.dim,
            depth=self.depth,
            heads=self.heads,
            hidden=self.k * self.hidden,
            dropout=self.model_dropout,
        ).to(windows.device)
        gates = [module for module in model.modules() if isinstance(module, Gate)]

        def loss(batch: Batch) -> dict[str, Tensor]:
            x, y = characters(batch)
            logits, outputs = model(x)
            text = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            extra = sum((out.loss for out in outputs), text.new_zeros(()))
            if side == "thor":
                again, _ = model(x)
                extra = F.cross_entropy(again.flatten(0, 1), y.flatten())
                extra = extra + self.consistency * symmetric_kl(logits.flatten(0, 1), again.flatten(0, 1))
            return {"loss": text + extra, "text": text}

        def evaluate(batch: Batch) -> Measures:
            x, y = characters(batch)
            return bits(model(x)[0], y)

        def routing(batch: Batch) -> list[Routing]:
            return [Routing(out.plan.used) for out in model(characters(batch)[0])[1]]

        def before_step(step: int) -> None:
            for gate in gates:
                if side == "dropout" and isinstance(gate, TopKGate):
                    gate.k = schedules.growing_k(step, steps, self.k, self.experts)
                if isinstance(gate, StableGate) and step >= steps // 10:
                    gate.begin_stage_two()

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return Task(
            model,
            torch.optim.Adam(trained, self.lr, fused=True),
            loss,
            evaluate,
            schedule=schedules.warmup(max(steps // 10, 1)),
            before_step=before_step,
            routing=routing if side != "dense" else None,
            clip=0.25,
        )

    def _layer(self, vocabulary: int) -> MoE:
        side, dim, experts = self.side, self.dim, self.experts
        mlps = ExpertMLP(experts, dim, self.hidden, activation="relu")
        if side == "compete":
            return MoE(CompetitionGate(TopKGate(dim, experts, self.k), mlps, rate=self.rate, alpha=self.alpha), mlps)
        if side == "switch":
            gate: Gate = TopKGate(dim, experts, 1, order="softmax_topk", balance=self.balance)
            return MoE(gate, mlps, TokenChoice(1.25, factor_eval=2.0))
        if side == "stable":
            return MoE(StableGate(dim, experts, vocabulary), mlps, TokenChoice(2.0))
        if side == "smoe":
            gate = TopKGate(dim, experts, self.k, balance=self.balance)
        elif side in ("fixed", "dropout"):
            gate = TopKGate(dim, experts, self.k).requires_grad_(False)
        elif side == "xmoe":
            gate = XMoEGate(dim, experts, self.k)
        elif side == "hyper":
            gate = HyperRouterGate(dim, experts, self.k)
        else:
            gate = RandomGate(experts)
        return MoE(gate, mlps)
