"""COMET fixed routing: its MLP on images, beside the dense MLP and the other models with which the paper compares it.

The paper trains 4 linear layers, with 100 to 3000 neurons in a hidden one, on CIFAR-10 for 100 epochs by SGD at a
learning rate of 1e-4 (1e-3 in appendix A.2, with momentum in A.6), without augmentation or schedule. The defaults here
are momentum, a higher rate and fewer epochs, for scikit-learn's digits.
The routing network is frozen, so by default its masks are computed once for every training and test image and stored,
one bit a neuron.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.nn.comet import ACTIVATIONS, CometMLP
from moe_kernels.ops.kwta import TIES, k_from_fraction, unpack_bits
from moe_kernels.ops.topk_gate import topk_gate
from moe_kernels.papers.models.comparison import MODELS, MoEMLP, ScoredMLP, comparison_mlp, tied_masks
from moe_kernels.papers.recipes import (
    Batch,
    Evaluation,
    Measures,
    Recipe,
    Routing,
    Splits,
    Task,
    accuracy,
    option,
    total_loss,
)

# (masks, rows). masks: for every hidden layer packed bits (samples, ceil(width / 32)), or None if unknown. rows: the
# row of the masks for each sample of a batch; None: row i belongs to sample i.
KnownMasks = tuple[Sequence[Tensor] | None, Tensor | None]


class Objective(NamedTuple):
    """Functions of the outputs (B, columns) and the targets of a batch: its loss () and its measures."""

    loss: Callable[[Tensor, Tensor], Tensor]
    measures: Callable[[Tensor, Tensor], Measures]


CLASSIFICATION = Objective(F.cross_entropy, accuracy)


@dataclass(frozen=True)
class Comet(Recipe):
    """Sides: models.comparison.MODELS."""

    SIDES: ClassVar[tuple[str, ...]] = MODELS
    UNUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {"standard": ("keep",), "l1": ("keep",)}

    sides: tuple[str, ...] = option(("standard", "comet"), "models to compare")
    width: tuple[int, ...] = option((500,), "neurons of a hidden layer; the paper: 100, 500, 1000, 3000", low=1)
    layers: int = option(4, "linear layers", low=2)
    keep: float = option(
        0.5, "keep fraction p, the share of active neurons; the paper: 0.1, 0.5, 0.9", low=0, high=1, sweep=True
    )
    activation: str = option(
        "tanh",
        "activation; the paper: tanh in its larger networks, softplus in its public code",
        choices=tuple(sorted(ACTIVATIONS)),
        sweep=True,
    )
    ties: str = option("index", "tie rule of kwta", choices=TIES)
    keep_masks: bool = option(True, "side comet: compute the masks of training and test samples once and store them")
    l1: float = option(1e-5, "side l1: coefficient of the sum of absolute weights; the paper gives no value", low=0)
    lr: float = option(0.01, "learning rate of SGD; the paper: 1e-4, 1e-3", low=0)
    momentum: float = option(0.9, "momentum of SGD; the paper: none, 0.9 in appendix A.6", low=0)
    check_steps: int = option(30, "steps of the agreement check of fast and reference backend; 0: none", low=0)

    def of_sides(self) -> dict[str, Recipe]:
        return {
            f"{side} {width}" if len(self.width) > 1 else side: replace(self, sides=(side,), width=(width,))
            for width in self.width
            for side in self.sides
        }

    def outputs(self, data: Splits) -> int:
        """Columns of the model's last layer."""
        return len(data.source.classes)

    def objective(self) -> Objective:
        return CLASSIFICATION

    def build(self, data: Splits, seed: int, steps: int) -> Task:
        x, _ = data.train
        (width,) = self.width
        model = comparison_mlp(
            self.side,
            x.shape[1],
            width,
            self.outputs(data),
            layers=self.layers,
            p=self.keep,
            activation=self.activation,
            ties=self.ties,
            seed=seed,
        ).to(x.device)
        optimiser = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), self.lr, self.momentum)
        if isinstance(model, MoEMLP):
            options: dict[str, Any] = {"with_routing": _with_top_expert(model), "objective": self.objective()}
            return classifier(model, optimiser, lambda batch: model(batch.tensors[0]), **options)
        known_masks = self._known_masks(model, x, data.test[0])
        widths = model.router.widths[1:]

        def with_routing(batch: Batch) -> tuple[Tensor, list[Routing]]:
            x = batch.tensors[0]
            bits, samples = known_masks(batch)
            if isinstance(model, ScoredMLP):
                logits, masks = model.with_masks(x)
                return logits, [Routing(mask, unit="neurons") for mask in masks]
            if bits is None and model.dense:
                return model(x), [Routing(mask, unit="neurons") for mask in model.masks(x)]
            if bits is None:
                bits = model.router(x)
            logits = model(x, bits, samples)
            used = bits if samples is None else [each[samples] for each in bits]
            masks = [unpack_bits(each, n) for each, n in zip(used, widths, strict=True)]
            return logits, [Routing(mask, unit="neurons") for mask in masks]

        def logits(batch: Batch) -> Tensor:
            return model(batch.tensors[0], *known_masks(batch))

        weights = [p for p in model.parameters() if p.dim() == 2]
        return classifier(
            model,
            optimiser,
            logits,
            with_routing=with_routing,
            predict_known=logits,
            penalty=(lambda: self.l1 * sum(w.abs().sum() for w in weights)) if self.side == "l1" else None,
            objective=self.objective(),
        )

    def _known_masks(self, model: CometMLP, x: Tensor, test: Tensor) -> Callable[[Batch], KnownMasks]:
        """A function batch -> KnownMasks.

        Bernoulli masking and example-tied dropout draw masks for each training sample. The paper does not say which
        neurons are active for other samples. As in the paper's public code, Bernoulli masking uses all neurons for
        them, and example-tied dropout the first k_from_fraction(p, width), its generalisation neurons.
        """
        (width,), hidden = self.width, self.layers - 1
        kept: list[Tensor] | None = None
        kept_of_test: list[Tensor] | None = None
        test_masks: list[Tensor] | None = None
        if self.side == "comet" and self.keep_masks and not model.dense:
            kept, kept_of_test = model.router.kept(x), model.router.kept(test)
        elif self.side in ("bernoulli", "tied"):
            always = k_from_fraction(self.keep, width) if self.side == "tied" else 0
            kept = [tied_masks(len(x), width, self.keep, always, x.device) for _ in range(hidden)]
            if always:
                test_masks = [tied_masks(1, width, 0.0, always, x.device)] * hidden

        def known_masks(batch: Batch) -> KnownMasks:
            if batch.rows is not None:
                return kept, None if kept is None else batch.rows
            count = len(batch.tensors[0])
            if test_masks is not None:
                return [each.expand(count, -1) for each in test_masks], None
            if kept_of_test is None or batch.start is None:
                return None, None
            return [layer[batch.start : batch.start + count] for layer in kept_of_test], None

        return known_masks


def _with_top_expert(model: MoEMLP) -> Callable[[Batch], tuple[Tensor, list[Routing]]]:
    """A function batch -> outputs (B, columns), and a Routing with each sample's expert and router probabilities."""

    def with_routing(batch: Batch) -> tuple[Tensor, list[Routing]]:
        scores = model.logits(batch.tensors[0])
        _, experts = topk_gate(scores, 1)
        active = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, experts.long(), True)
        return model(batch.tensors[0], scores), [Routing(active, scores.softmax(-1))]

    return with_routing


def classifier(
    model: torch.nn.Module,
    optimiser: torch.optim.Optimizer,
    logits: Callable[[Batch], Tensor],
    *,
    penalty: Callable[[], Any] | None = None,
    with_routing: Callable[[Batch], tuple[Tensor, Sequence[Routing]]] | None = None,
    objective: Objective = CLASSIFICATION,
    **rest: Any,
) -> Task:
    """A task on batches x, y. The objective computes loss and measures from the logits and y.

    penalty: returns the term "l1" that is added to the loss.
    with_routing: batch -> logits and routing, from one forward pass; None: evaluations report no routing.
    """

    def loss(batch: Batch) -> dict[str, Tensor]:
        task = objective.loss(logits(batch), batch.tensors[1])
        return total_loss(task, {} if penalty is None else {"l1": penalty()})

    def evaluate(batch: Batch) -> Evaluation:
        outputs, routing = with_routing(batch) if with_routing is not None else (logits(batch), ())
        return Evaluation(objective.measures(outputs, batch.tensors[1]), routing)

    return Task(model, optimiser, loss, evaluate, predict=model, **rest)
