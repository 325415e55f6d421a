"""Paper 000, section 4.3 and appendix A.4: COMET in the feed-forward layers of a GPT, here on bytes.

The paper: GPT-2 in three sizes on WikiText and CodeParrot with the GPT-2 tokenizer; AdamW at 5e-4, weight decay 0.1,
1000 steps of warm-up and a cosine, batches of 256, p = 0.5, tanh, at most 3 epochs or 24 hours. The defaults here are a
small network and few steps, for tiny_shakespeare on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.models.gpt import GPT
from moe_kernels.models.transformer import ROUTER_INPUTS, watched_masks
from moe_kernels.nn.comet import ACTIVATIONS
from moe_kernels.nn.schedules import cosine, warmup
from moe_kernels.recipes import Batch, Evaluation, Routing, Splits, Task, option, total_loss
from moe_kernels.recipes._text import TextRecipe, bits, characters


@dataclass(frozen=True)
class CometGPT(TextRecipe):
    """Sides: standard (dense) and comet, from the same initial weights. Judged by bits a character (byte)."""

    SIDES: ClassVar[tuple[str, ...]] = ("standard", "comet")

    sides: tuple[str, ...] = option(("standard", "comet"), "models to compare")
    epochs: int = option(3, "passes over the training text", low=0)
    batch_size: int = option(32, "windows a step; the paper: 256", low=1)
    lr: float = option(5e-4, "learning rate of AdamW, after the warm-up falling along a cosine", low=0)
    weight_decay: float = option(0.1, "of AdamW, on matrices and embeddings", low=0)
    warmup: int = option(100, "steps of warm-up; the paper: 1000", low=0)
    dim: int = option(128, "of a token; the paper: 768, 1024, 1280", low=1)
    depth: int = option(4, "blocks; the paper: 12, 24, 36", low=1)
    heads: int = option(4, "of attention; the paper: 12, 16, 20", low=1)
    keep: float = option(0.5, "keep fraction p", low=0, high=1, sweep=True)
    activation: str = option("tanh", "of the feed-forward layers", choices=tuple(sorted(ACTIVATIONS)))
    dropout: float = option(0.0, "rate; GPT-2: 0.1", low=0, high=1)
    router_input: str = option("layer", "what the frozen routing sees", choices=ROUTER_INPUTS)

    def build(self, data: Splits, seed: int, steps: int) -> Task:
        model = GPT(
            len(data.source.vocabulary),
            self.length,
            dim=self.dim,
            depth=self.depth,
            heads=self.heads,
            p=self.keep if self.side == "comet" else 1.0,
            activation=self.activation,
            dropout=self.dropout,
            router_input=self.router_input,
        ).to(data.train[0].device)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]

        def loss(batch: Batch) -> dict[str, Tensor]:
            x, y = characters(batch)
            return total_loss(F.cross_entropy(model(x).flatten(0, 1), y.flatten()), {}, "text")

        def evaluate(batch: Batch) -> Evaluation:
            x, y = characters(batch)
            with watched_masks(model) as masks:
                measures = bits(model(x), y)
            return Evaluation(measures, [Routing(mask, unit="neurons") for mask in masks])

        return Task(
            model,
            torch.optim.AdamW(groups, self.lr, fused=True),
            loss,
            evaluate,
            predict=model,
            schedule=warmup(self.warmup, cosine(steps - self.warmup)),
            clip=1.0,
        )
