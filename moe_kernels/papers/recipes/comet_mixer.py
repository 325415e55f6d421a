"""COMET fixed routing, section 4.2.2 and appendix A.3: COMET in the feed-forward layers of an MLP-Mixer.

The paper: depth 6, dim 512 and 3072, patch 4, p = 0.5, tanh; Adam at 1e-3 with a cosine over 500 epochs. The code that
the paper builds on has batches of 512 and augments images (RandAugment); this recipe does not augment. The defaults
have the paper's 500 epochs: on digits 30 minutes of a CPU core, 1 minute with --epochs 10.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from moe_kernels.papers.models.mixer import Mixer
from moe_kernels.papers.recipes import option
from moe_kernels.papers.recipes._comet import CometImages


@dataclass(frozen=True)
class CometMixer(CometImages):
    """Sides: standard (dense) and comet, from the same initial weights."""

    epochs: int = option(500, "passes over the training set", low=0)
    dim: int = option(512, "width of a token; the paper: 512, 3072", low=1, sweep=True)
    expansion: tuple[float, ...] = option(
        (4.0, 0.5), "hidden neurons for each patch in token mixing, and for each channel in channel mixing", low=0
    )

    def network(self, image_shape: tuple[int, int, int], classes: int, **options: Any) -> nn.Module:
        if len(self.expansion) != 2:
            raise ValueError(f"comet_mixer: expansion must be two numbers, tokens and channels; got {self.expansion}")
        tokens, channels = self.expansion
        return Mixer(image_shape, classes, expansion=(tokens, channels), **options)
