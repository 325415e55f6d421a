"""COMET in the feed-forward layers of a transformer or Mixer: options and functions that several recipes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from moe_kernels.nn.comet import ACTIVATIONS
from moe_kernels.nn.schedules import cosine
from moe_kernels.papers.models.transformer import record_masks
from moe_kernels.papers.recipes import Batch, Evaluation, Measures, Recipe, Routing, Splits, Task, accuracy, option
from moe_kernels.papers.recipes.comet import classifier


@dataclass(frozen=True)
class CometLayers(Recipe):
    """Sides: standard (dense) and comet."""

    SIDES: ClassVar[tuple[str, ...]] = ("standard", "comet")
    UNUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {"standard": ("keep",)}

    sides: tuple[str, ...] = option(SIDES, "models to compare")
    keep: float = option(0.5, "keep fraction p", low=0, high=1, sweep=True)
    activation: str = option(
        "tanh", "activation of the feed-forward layers", choices=tuple(sorted(ACTIVATIONS)), sweep=True
    )
    dropout: float = option(0.0, "dropout rate", low=0, high=1)

    def layer_options(self) -> dict[str, Any]:
        """Arguments of the model; keep fraction 1 makes it dense."""
        p = self.keep if self.side == "comet" else 1.0
        return {"p": p, "activation": self.activation, "dropout": self.dropout}


@dataclass(frozen=True)
class CometImages(CometLayers):
    """Classifies images in patches; trained by Adam with a cosine schedule. `network` makes the model."""

    data: str = option("", "folder or file of CIFAR-10, CIFAR-100 or another set of images")
    batch_size: int = option(512, "samples of a step", low=1)
    lr: float = option(1e-3, "learning rate of Adam, falling along a cosine", low=0)
    patch: int = option(4, "pixels of a patch's side", low=1)
    dim: int = option(512, "width of a token", low=1)
    depth: int = option(6, "blocks", low=1)

    def network(self, image_shape: tuple[int, int, int], classes: int, **options: Any) -> nn.Module:
        raise NotImplementedError

    def build(self, data: Splits, seed: int, steps: int) -> Task:
        sizes = {"patch": self.patch, "dim": self.dim, "depth": self.depth}
        model = self.network(data.source.image_shape, len(data.source.classes), **sizes, **self.layer_options())
        model.to(data.train[0].device)
        optimiser = torch.optim.Adam(model.parameters(), self.lr, fused=True)
        task = classifier(model, optimiser, lambda batch: model(batch.tensors[0]), schedule=cosine(steps))
        evaluate = with_masks(model, lambda batch: accuracy(model(batch.tensors[0]), batch.tensors[1]))
        return replace(task, evaluate=evaluate)


def with_masks(model: nn.Module, measures: Callable[[Batch], Measures]) -> Callable[[Batch], Evaluation]:
    """A function for Task.evaluate. `measures` must apply the model once; the masks of this pass are the routing."""

    def evaluate(batch: Batch) -> Evaluation:
        with record_masks(model) as masks:
            found = measures(batch)
        return Evaluation(found, [Routing(mask, unit="neurons") for mask in masks])

    return evaluate
