"""CompeteSMoE and its baselines as character-level language models.

The paper trains 6 layers of width 264 and 8 of 352 on enwik8 and text8, with 16 experts and two choices a token. As in
the paper, the learning rate falls as 1 / sqrt(t) after a warm-up, there is no balance loss by default, and the test
result is that of the evaluation with the lowest validation loss. The model is a small GPT with experts in every block,
or in every second one as in GLaM. Differences from the paper: pre-norm blocks with one residual around each layer,
shorter windows, fewer steps. The entropies in the table are those of the routers' softmax, also by layer (appendix
C.5, Table 10), "competitions" the share of steps and layers in which experts compete, "competition time" the share of
the time that this adds (the paper: 10 %).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

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
from moe_kernels.nn.moe import MoE
from moe_kernels.nn.policies import TokenChoice
from moe_kernels.papers.models.moe import MoEGPT
from moe_kernels.papers.recipes import Batch, Evaluation, Splits, Task, option, total_loss
from moe_kernels.papers.recipes._routers import forward_with_routing, modules_of, regularisers, second_pass
from moe_kernels.papers.recipes._text import TextRecipe, bits, characters

SIDES = ("dense", "smoe", "fixed", "dropout", "switch", "xmoe", "stable", "hyper", "thor", "compete")


@dataclass(frozen=True)
class CompeteSMoE(TextRecipe):
    """Sides: see SIDES. "fixed" is SMoE-Fixed, "dropout" SMoE-Dropout, "compete" CompeteSMoE."""

    SIDES: ClassVar[tuple[str, ...]] = SIDES
    UNUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {
        side: (*(() if side == "compete" else ("rate", "alpha")), *(() if side in ("smoe", "switch") else ("balance",)))
        for side in SIDES
    }

    sides: tuple[str, ...] = option(("smoe", "fixed", "compete"), "gates to compare")
    steps: int = option(800, "steps instead of epochs; 0: epochs", low=0)
    dim: int = option(128, "width of the model; the paper: 264, 352", low=1)
    hidden: int = option(128, "neurons of an expert; the paper: the width of the model", low=1)
    depth: int = option(4, "blocks; the paper: 3 (tiny), 6 (small), 8 (medium)", low=1)
    architecture: str = option(
        "switch",
        "switch: experts in every block; glam: experts in every second block, a gated layer (GEGLU) in the others, and "
        "relative positions",
        choices=("switch", "glam"),
    )
    moe_every: int = option(0, "every n-th block has experts; 0: 1 for switch, 2 for glam", low=0)
    heads: int = option(4, "heads of attention", low=1)
    experts: int = option(16, "experts of a layer", low=2, sweep=True)
    k: int = option(
        2, "experts a token; switch, stable and thor: always 1; dropout: at first, then more", low=1, sweep=True
    )
    rate: float = option(
        0.05,
        "side compete, lambda: share of the steps in which the experts of a layer compete; the paper: 0.03 to 0.09",
        low=0,
        high=1,
        sweep=True,
    )
    rate_schedule: str = option(
        "constant",
        "lambda over the steps: constant (--rate), or falling as 2 / (2 + sqrt(i + 1)) after i thousand steps, as in "
        "the published code",
        choices=("constant", "falling"),
    )
    alpha: float = option(
        1.0, "side compete: weight of the router's loss in competitions; the paper: 1 to 5", low=0, sweep=True
    )
    balance: float = option(0.0, "weight of the balance loss of smoe and switch; the paper has none", low=0, sweep=True)
    xmoe_score: str = option(
        "learned",
        "score of xmoe: cosine; learned (cosine after a normalisation layer, with a learnable temperature, as in the "
        "paper); code (as in the published code)",
        choices=("learned", "code", "cosine"),
    )
    consistency: float = option(1.0, "alpha, weight of THOR's consistency loss", low=0)
    model_dropout: float = option(0.1, "dropout of embeddings, attention and feed-forward layers", low=0, high=1)
    batch_size: int = option(16, "windows of a step", low=1)
    lr: float = option(
        7e-4, "learning rate of Adam after a warm-up of a tenth of the steps; then it falls as 1 / sqrt(t)", low=0
    )
    choose: str = option(
        "best",
        "the evaluation to report, and its model to keep: the last, or the best on the validation text",
        choices=("last", "best"),
    )

    def columns(self) -> tuple[str, ...]:
        return "valid bits", "competitions", "competition time"

    def build(self, data: Splits, seed: int, steps: int) -> Task:
        windows, side = data.train[0], self.side
        vocabulary = len(data.source.vocabulary)
        glam = self.architecture == "glam"
        every = self.moe_every or 1 + glam
        model = MoEGPT(
            vocabulary,
            self.length,
            lambda index: None if side == "dense" or (index + 1) % every else self._layer(vocabulary),
            dim=self.dim,
            depth=self.depth,
            heads=self.heads,
            hidden=self.k * self.hidden,
            dropout=self.model_dropout,
            activation="geglu" if glam else "relu",
            relative=glam,
        ).to(windows.device)
        gates = modules_of(model, Gate)

        def loss(batch: Batch) -> dict[str, Tensor]:
            x, y = characters(batch)
            logits, outputs = model(x)
            text = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            if side != "thor":
                return total_loss(text, regularisers(outputs), "text")
            first, again = (each.flatten(0, 1) for each in (logits, model(x)[0]))
            return total_loss(text, second_pass(first, again, y.flatten(), self.consistency), "text")

        def evaluate(batch: Batch) -> Evaluation:
            x, y = characters(batch)
            logits, _, routing = forward_with_routing(model, x)
            return Evaluation(bits(logits, y), routing)

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
            predict=lambda x: model(x)[0],
            schedule=schedules.inverse_root(steps // 10),
            before_step=before_step,
            clip=0.25,
        )

    def _layer(self, vocabulary: int) -> MoE:
        side, dim, experts = self.side, self.dim, self.experts
        mlps = ExpertMLP(experts, dim, self.hidden, activation="relu")
        if side == "compete":
            rate = schedules.falling_rate if self.rate_schedule == "falling" else self.rate
            return MoE(CompetitionGate(TopKGate(dim, experts, self.k), mlps, rate=rate, alpha=self.alpha), mlps)
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
            gate = XMoEGate(dim, experts, self.k, score=self.xmoe_score)
        elif side == "hyper":
            gate = HyperRouterGate(dim, experts, self.k)
        else:
            gate = RandomGate(experts)
        return MoE(gate, mlps)
