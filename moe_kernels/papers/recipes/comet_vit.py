"""COMET fixed routing, section 4.2.2 and appendix A.3: COMET in the feed-forward layers of a vision transformer.

The paper: depth 6, 8 heads, dim 512, hidden 512, 3072 and 6144, patch 4, dropout 0.1, p = 0.5, tanh; Adam at 1e-4 with
a cosine over 200 epochs of CIFAR-10, SVHN, CIFAR-100 and Tiny ImageNet. The code that the paper builds on has batches
of 512 and augments images (RandAugment); this recipe does not augment. The defaults have the paper's 200 epochs: on
digits 100 minutes of a CPU core; --epochs 2 is enough to try.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from moe_kernels.papers.models.transformer import ROUTER_INPUTS
from moe_kernels.papers.models.vit import ViT
from moe_kernels.papers.recipes import option
from moe_kernels.papers.recipes._comet import CometImages


@dataclass(frozen=True)
class CometViT(CometImages):
    """Sides: standard (dense) and comet. Initial weights are equal, except the head's with router_input "embedding"."""

    epochs: int = option(200, "passes over the training set", low=0)
    lr: float = option(1e-4, "learning rate of Adam, falling along a cosine", low=0)
    heads: int = option(8, "heads of attention", low=1)
    hidden: int = option(3072, "neurons of a feed-forward layer; the paper: 512, 3072, 6144", low=1, sweep=True)
    dropout: float = option(0.1, "dropout rate, also of the embedding", low=0, high=1)
    router_input: str = option(
        "layer",
        "what the frozen routing reads: each feed-forward layer's input, or the embedded patches",
        choices=ROUTER_INPUTS,
    )

    def network(self, image_shape: tuple[int, int, int], classes: int, **options: Any) -> nn.Module:
        own: dict[str, Any] = {"heads": self.heads, "hidden": self.hidden, "router_input": self.router_input}
        return ViT(image_shape, classes, **own, **options)
