"""Figures of an evaluation that need all of its samples: routing, area under the ROC curve, calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_kernels.nn.utilisation import Utilisation
from moe_kernels.papers.recipes import Routing

Row = dict[str, float]  # one evaluation: step, epoch, losses, measures, routing, seconds of a step


def routing_columns(unit: str) -> tuple[str, ...]:
    """Names of the routing columns of a row. unit: "experts" or "neurons"."""
    return unit, "least load", "most load", f"dead {unit}", "entropy"


def area_under_roc(scores: Tensor, positive: Tensor) -> float:
    """Probability that a positive scores higher than a negative; equal scores count half.

    NaN if there are no positives or no negatives.

    For P positives and N negatives it is (sum of the positives' ranks - P (P + 1) / 2) / (P N); ranks count from 1, and
    equal scores get their mean rank.
    """
    _, inverse, counts = scores.unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    ranks = (ends - (counts.double() - 1) / 2)[inverse]
    total = int(positive.sum())
    others = len(scores) - total
    if not total or not others:
        return math.nan
    return ((ranks[positive].sum().item()) - total * (total + 1) / 2) / (total * others)


class RoutingStatistics:
    def __init__(self, device: torch.device) -> None:
        self.used: list[Utilisation] = []  # one for each layer, since layers may differ in their number of samples
        self.entropy: list[Tensor] = []  # by layer, summed over its samples
        self.routed: list[int] = []  # by layer: number of samples for which the router has a distribution
        self.device, self.unit = device, "experts"

    def add(self, layers: Sequence[Routing]) -> None:
        if not self.used:
            self.used = [Utilisation() for _ in layers]
            self.entropy, self.routed = [torch.zeros((), device=self.device) for _ in layers], [0] * len(layers)
        for number, layer in enumerate(layers):
            self.unit = layer.unit
            self.used[number].update([layer.active])
            if layer.probs is not None:
                self.entropy[number] += torch.special.entr(layer.probs.float()).sum()
                self.routed[number] += layer.probs.shape[:-1].numel()

    def row(self) -> Row:
        """The values of `routing_columns`, from all layers; {} if nothing was routed.

        If tokens are routed, "sample" here means a token.

            experts or neurons       number that a sample uses, mean over samples and layers
            least load, most load    least and largest share of the samples that use an expert or neuron
            dead experts or neurons  number that no sample uses, over all layers
            entropy                  mean entropy of the routers' distributions in nats; NaN if there are none

        If several layers have distributions, "entropy 1", "entropy 2", ... are their means.
        """
        if not self.used:
            return {}
        share = [layer for counted in self.used for layer in counted.share()]
        pairs = [(each.item(), count) for each, count in zip(self.entropy, self.routed, strict=True) if count]
        by_layer = {f"entropy {number}": total / count for number, (total, count) in enumerate(pairs, 1)}
        numbers = (
            sum(layer.sum().item() for layer in share) / len(share),
            min(layer.min().item() for layer in share),
            max(layer.max().item() for layer in share),
            float(sum(int((layer == 0).sum()) for layer in share)),
            sum(t for t, _ in pairs) / sum(c for _, c in pairs) if pairs else math.nan,
        )
        return dict(zip(routing_columns(self.unit), numbers, strict=True)) | (by_layer if len(by_layer) > 1 else {})


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = 15) -> float:
    """ECE: the mean over the samples of |mean confidence - accuracy| of the samples in the same of `bins` equal bins.

    confidence: (B,), the probability of the predicted class, from 0 to 1; 1 belongs to the last bin. correct: bool
    (B,). NaN without samples.

    Source: Guo et al. 2017, eq. 3, with the 15 bins of their experiments.
    """
    place = (confidence.double() * bins).long().clamp(max=bins - 1)
    surplus = torch.zeros(bins, dtype=torch.float64, device=confidence.device)
    surplus.index_add_(0, place, confidence.double() - correct.double())
    return surplus.abs().sum().item() / len(confidence) if len(confidence) else math.nan
