"""Paper 000: the COMET MLP on images, beside its dense twin and the paper's other comparison models.

The paper trains 4 layers of 100 to 3000 neurons on CIFAR-10 for 100 epochs by SGD at a learning rate of 1e-4 (1e-3 in
appendix A.2, with momentum in A.6), without augmentation, decay or schedule. The defaults here are a small network,
momentum and a higher rate, so that scikit-learn's digits reach their accuracy in seconds.
The routing network is frozen, so its masks are computed once for every training image and kept, a bit a neuron.
Where the mean image is far from zero, as in digits and MNIST, all scores share a part and some 3 % of the neurons never
win; on CIFAR-10, and on MNIST with its mean taken off, every neuron wins for some image.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from moe_kernels.models.mlp import comet_mlp
from moe_kernels.nn.comet import ACTIVATIONS
from moe_kernels.ops.kwta import TIES
from moe_kernels.recipes import Batch, Measures, Recipe, Routing, Splits, Task, option


@dataclass(frozen=True)
class Comet(Recipe):
    """Sides: standard (dense) and comet (kWTA, frozen routing), from the same initial weights."""

    SIDES: ClassVar[tuple[str, ...]] = ("standard", "comet")

    sides: tuple[str, ...] = option(("standard", "comet"), "models to compare")
    width: tuple[int, ...] = option((500,), "neurons of a hidden layer; the paper: 100, 500, 1000, 3000", low=1)
    layers: int = option(4, "linear layers", low=2)
    keep: float = option(0.5, "keep fraction of kWTA; the paper: 0.1, 0.5, 0.9")
    activation: str = option(
        "tanh", "the paper's in its larger networks; its public code has softplus", choices=tuple(sorted(ACTIVATIONS))
    )
    ties: str = option("index", "who wins a tie", choices=TIES)
    keep_masks: bool = option(True, "compute the frozen masks once and keep them")
    lr: float = option(0.01, "learning rate of SGD; the paper: 1e-4, 1e-3", low=0)
    momentum: float = option(0.9, "of SGD; the paper: none, but in appendix A.6", low=0)
    check_steps: int = option(30, "steps of the agreement check of fast and reference backend; 0: none", low=0)

    def variants(self) -> dict[str, Recipe]:
        return {
            f"{side} {width}" if len(self.width) > 1 else side: replace(self, sides=(side,), width=(width,))
            for width in self.width
            for side in self.sides
        }

    def build(self, data: Splits, seed: int, steps: int) -> Task:
        x, _ = data.train
        (width,) = self.width
        # Drawn on the CPU, so that one seed gives one network on every device; the same one for every side.
        model = comet_mlp(
            x.shape[1],
            width,
            len(data.source.classes),
            layers=self.layers,
            p=self.keep if self.side == "comet" else 1.0,
            activation=self.activation,
            ties=self.ties,
            seed=seed,
            device="cpu",
        ).to(x.device)
        kept = model.router.kept(x) if self.keep_masks and not model.dense else None

        def logits(batch: Batch) -> torch.Tensor:
            if kept is None or batch.rows is None:
                return model(batch.tensors[0])
            return model(batch.tensors[0], [layer.index_select(0, batch.rows) for layer in kept])

        return classifier(
            model,
            torch.optim.SGD(model.parameters(), self.lr, self.momentum),
            logits,
            routing=lambda batch: [Routing(mask) for mask in model.masks(batch.tensors[0])],
        )


def classifier(model: torch.nn.Module, optimiser: torch.optim.Optimizer, logits: Any, **rest: Any) -> Task:
    """A task whose batches are x, y: cross-entropy of logits(batch), judged by accuracy."""

    def loss(batch: Batch) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(logits(batch), batch.tensors[1])}

    def evaluate(batch: Batch) -> Measures:
        y, found = batch.tensors[1], logits(batch)
        loss = F.cross_entropy(found, y, reduction="sum")
        return {"accuracy": ((found.argmax(-1) == y).sum(), len(y)), "loss": (loss, len(y))}

    return Task(model, optimiser, loss, evaluate, **rest)
