"""Recipes on text. By default a model predicts each character (byte) of a window from the earlier ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from moe_kernels.papers.data import Text
from moe_kernels.papers.recipes import Batch, Measures, Recipe, Splits, option

IGNORED = -100  # a target that adds nothing to the loss; the default ignore_index of F.cross_entropy


@dataclass(frozen=True)
class TextRecipe(Recipe):
    """By default a sample is a window of length + 1 characters, and METRIC is bits a character."""

    ACCEPTS: ClassVar[type] = Text
    METRIC: ClassVar[str] = "bits"
    HIGHER_IS_BETTER: ClassVar[bool] = False

    data: str = option("", "path to text: enwik8, text8, Tiny Shakespeare, WikiText, another .txt or .txt.gz")
    eval_batch: int = option(64, "windows of a batch in evaluation", low=1)
    length: int = option(128, "characters that the model reads in a window; GPT-2: 1024 tokens", low=2)

    def splits(self, data: Any) -> Splits:
        valid = (data.windows("valid", self.length),) if len(data.valid_tokens) > self.length else None
        return Splits(data, (data.windows("train", self.length),), (data.windows("test", self.length),), valid)

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return characters(batch)[:1]


def characters(batch: Batch) -> tuple[Tensor, Tensor]:
    """Inputs (B, length), and as targets (B, length) the character after each of them."""
    windows = batch.tensors[0].long()
    return windows[:, :-1], windows[:, 1:]


def bits(logits: Tensor, y: Tensor) -> Measures:
    """Measure "bits": mean cross-entropy of logits (B, S, vocabulary) in bits, over targets y (B, S) except IGNORED."""
    nats = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum", ignore_index=IGNORED)
    return {"bits": (nats / math.log(2), (y != IGNORED).sum())}
