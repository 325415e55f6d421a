"""Paper 000, section 4.2.2 and appendix A.3: COMET in the feed-forward layers of an MLP-Mixer.

The paper: depth 6, dim 512 and 3072, patch 4, p = 0.5, tanh; Adam at 1e-3 with a cosine over 500 epochs. Its base code
widens tokens by 4 and channels by 0.5, augments (RandAugment) and takes batches of 512; this one does not augment. The
defaults have its length: on the digits some 30 minutes of a CPU core, and --epochs 10 one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moe_kernels.models.mixer import Mixer
from moe_kernels.nn.comet import ACTIVATIONS
from moe_kernels.recipes import Recipe, Splits, Task, option
from moe_kernels.recipes.comet_vit import trained_by_adam


@dataclass(frozen=True)
class CometMixer(Recipe):
    """Sides: standard (dense) and comet, from the same initial weights."""

    SIDES: ClassVar[tuple[str, ...]] = ("standard", "comet")

    data: str = option("", "folder or file of CIFAR-10, CIFAR-100 or another set of images")
    sides: tuple[str, ...] = option(("standard", "comet"), "models to compare")
    epochs: int = option(500, "passes over the training set", low=0)
    batch_size: int = option(512, "samples a step", low=1)
    lr: float = option(1e-3, "learning rate of Adam, falling along a cosine", low=0)
    patch: int = option(4, "pixels a side of a patch", low=1)
    dim: int = option(512, "of a token; the paper: 512, 3072", low=1)
    depth: int = option(6, "blocks", low=1)
    expansion: tuple[float, ...] = option((4.0, 0.5), "hidden neurons over inputs, of tokens and of channels", low=0)
    keep: float = option(0.5, "keep fraction p", low=0, high=1, sweep=True)
    activation: str = option("tanh", "of the feed-forward layers", choices=tuple(sorted(ACTIVATIONS)))
    dropout: float = option(0.0, "rate", low=0, high=1)

    def build(self, data: Splits, seed: int, steps: int) -> Task:
        if len(self.expansion) != 2:
            raise ValueError(f"comet_mixer: expansion must be of tokens and of channels, got {self.expansion}")
        tokens, channels = self.expansion
        model = Mixer(
            data.source.image_shape,
            len(data.source.classes),
            patch=self.patch,
            dim=self.dim,
            depth=self.depth,
            expansion=(tokens, channels),
            p=self.keep if self.side == "comet" else 1.0,
            activation=self.activation,
            dropout=self.dropout,
        )
        return trained_by_adam(model.to(data.train[0].device), self.lr, steps)
