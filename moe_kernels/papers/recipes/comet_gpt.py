"""COMET fixed routing, section 4.3 and appendix A.4: COMET in the feed-forward layers of a GPT, here on bytes.

The paper: GPT-2 in three sizes on WikiText and CodeParrot with the GPT-2 tokenizer; AdamW at 5e-4, weight decay 0.1,
1000 steps of warm-up and a cosine, batches of 256, p = 0.5, tanh, at most 3 epochs or 24 hours. The defaults here are a
small network and small batches, for Tiny Shakespeare on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.nn.schedules import cosine, warmup
from moe_kernels.papers.models.gpt import GPT
from moe_kernels.papers.models.transformer import ROUTER_INPUTS
from moe_kernels.papers.recipes import Batch, Measures, Splits, Task, option, total_loss
from moe_kernels.papers.recipes._comet import CometLayers, with_masks
from moe_kernels.papers.recipes._text import TextRecipe, bits, characters


@dataclass(frozen=True)
class CometGPT(CometLayers, TextRecipe):
    """Sides: standard (dense) and comet. With router_input "layer" both start from the same weights."""

    epochs: int = option(3, "passes over the training text", low=0)
    batch_size: int = option(32, "windows of a step; the paper: 256", low=1)
    lr: float = option(5e-4, "learning rate of AdamW, after the warm-up falling along a cosine", low=0)
    weight_decay: float = option(0.1, "weight decay of matrices and embeddings", low=0)
    warmup: int = option(100, "steps of warm-up; the paper: 1000", low=0)
    dim: int = option(128, "width of a token; the paper: 768, 1024, 1280", low=1)
    depth: int = option(4, "blocks; the paper: 12, 24, 36", low=1)
    heads: int = option(4, "heads of attention; the paper: 12, 16, 20", low=1)
    dropout: float = option(0.0, "dropout rate; GPT-2: 0.1", low=0, high=1)
    router_input: str = option(
        "layer",
        "what the frozen routing reads: each feed-forward layer's input, or the embedded tokens",
        choices=ROUTER_INPUTS,
    )

    def build(self, data: Splits, seed: int, steps: int) -> Task:
        sizes: dict[str, Any] = {
            "dim": self.dim,
            "depth": self.depth,
            "heads": self.heads,
            "router_input": self.router_input,
        }
        model = GPT(len(data.source.vocabulary), self.length, **sizes, **self.layer_options())
        model.to(data.train[0].device)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]

        def loss(batch: Batch) -> dict[str, Tensor]:
            x, y = characters(batch)
            return total_loss(F.cross_entropy(model(x).flatten(0, 1), y.flatten()), {}, "text")

        def measures(batch: Batch) -> Measures:
            x, y = characters(batch)
            return bits(model(x), y)

        return Task(
            model,
            torch.optim.AdamW(groups, self.lr, fused=True),
            loss,
            with_masks(model, measures),
            predict=model,
            schedule=warmup(self.warmup, cosine(steps - self.warmup)),
            clip=1.0,
        )
