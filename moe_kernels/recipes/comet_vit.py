"""Paper 000, section 4.2.2 and appendix A.3: COMET in the feed-forward layers of a vision transformer.

The paper: depth 6, 8 heads, dim 512, hidden 512, 3072 and 6144, patch 4, dropout 0.1, p = 0.5, tanh; Adam at 1e-4 with
a cosine over 200 epochs of CIFAR-10, SVHN, CIFAR-100 and Tiny ImageNet. Its base code augments (RandAugment) and takes
batches of 512; this one does not augment. The defaults have its length: on the digits some 100 minutes of a CPU core,
and --epochs 2 a few.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from moe_kernels.models.transformer import ROUTER_INPUTS, watched_masks
from moe_kernels.models.vit import ViT
from moe_kernels.nn.comet import ACTIVATIONS
from moe_kernels.nn.schedules import cosine
from moe_kernels.recipes import Batch, Evaluation, Recipe, Routing, Splits, Task, accuracy, option
from moe_kernels.recipes.comet import classifier


@dataclass(frozen=True)
class CometViT(Recipe):
    """Sides: standard (dense) and comet, from the same initial weights."""

    SIDES: ClassVar[tuple[str, ...]] = ("standard", "comet")

    data: str = option("", "folder or file of CIFAR-10, CIFAR-100 or another set of images")
    sides: tuple[str, ...] = option(("standard", "comet"), "models to compare")
    epochs: int = option(200, "passes over the training set", low=0)
    batch_size: int = option(512, "samples a step", low=1)
    lr: float = option(1e-4, "learning rate of Adam, falling along a cosine", low=0)
    patch: int = option(4, "pixels a side of a patch", low=1)
    dim: int = option(512, "of a token", low=1)
    depth: int = option(6, "blocks", low=1)
    heads: int = option(8, "of attention", low=1)
    hidden: int = option(3072, "neurons of a feed-forward layer; the paper: 512, 3072, 6144", low=1)
    keep: float = option(0.5, "keep fraction p", low=0, high=1, sweep=True)
    activation: str = option("tanh", "of the feed-forward layers", choices=tuple(sorted(ACTIVATIONS)))
    dropout: float = option(0.1, "rate, also of the embedding", low=0, high=1)
    router_input: str = option("layer", "what the frozen routing sees", choices=ROUTER_INPUTS)

    def build(self, data: Splits, seed: int, steps: int) -> Task:
        return trained_by_adam(self._model(data).to(data.train[0].device), self.lr, steps)

    def _model(self, data: Splits) -> torch.nn.Module:
        return ViT(
            data.source.image_shape,
            len(data.source.classes),
            patch=self.patch,
            dim=self.dim,
            depth=self.depth,
            heads=self.heads,
            hidden=self.hidden,
            p=self.keep if self.side == "comet" else 1.0,
            activation=self.activation,
            dropout=self.dropout,
            router_input=self.router_input,
        )


def trained_by_adam(model: torch.nn.Module, lr: float, steps: int) -> Task:
    """A classifier of images by Adam and a cosine."""
    task = classifier(
        model,
        torch.optim.Adam(model.parameters(), lr, fused=True),
        lambda batch: model(batch.tensors[0]),
        schedule=cosine(steps),
    )

    def evaluate(batch: Batch) -> Evaluation:
        with watched_masks(model) as masks:
            measures = accuracy(model(batch.tensors[0]), batch.tensors[1])
        return Evaluation(measures, [Routing(mask, unit="neurons") for mask in masks])

    return replace(task, evaluate=evaluate)
