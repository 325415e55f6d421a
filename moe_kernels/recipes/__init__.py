"""Recipes: a paper's system with the paper's defaults, one small file each; `python -m moe_kernels train NAME` runs it.

recipes/<name>.py holds `class <Name>(Recipe)`, a frozen dataclass. Its fields are the options of the command line
(`option` gives help and limits), and `build` puts one side of the comparison together:

    build(data, seed, steps) -> Task(model, optimiser, loss, evaluate, predict, schedule, before_step)

The loop (moe_kernels.train) does the rest: batches, steps, learning rates, evaluation, checkpoints, log, table, plot.
A schedule is `step -> factor of the learning rate`, phases are `before_step(step)`: whatever happens during training is
a pure function of the step, or is kept in the state dict of model or optimiser. A checkpoint needs no more.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels.data import Images
from moe_kernels.nn.schedules import LearningRate, constant


class Batch(NamedTuple):
    """Rows of the training set (`rows` says which) or of the test set (`rows` is None)."""

    tensors: tuple[Tensor, ...]  # as the recipe's `splits` orders them: for images x (B, N), y (B)
    rows: Tensor | None
    start: int | None = None  # of the test set: the first of its rows; None: rows of no set, as FLOPs are counted on


class Splits(NamedTuple):
    """Training, validation and test tensors; the first dimension counts samples."""

    source: Any  # the data set: a Dataset of the kind that the recipe accepts
    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]
    valid: tuple[Tensor, ...] | None = None  # what chooses an evaluation; None: the data set has no such part


class Routing(NamedTuple):
    """Routing of one layer in a batch: experts a sample, load and entropy of the table."""

    active: Tensor  # bool (..., E): the experts that each sample or token used
    probs: Tensor | None = None  # (..., E): the router's distribution, whose entropy is reported; None: it has none
    weights: Tensor | None = None  # (..., E): of a gate that uses every expert; heat maps then show these
    unit: str = "experts"  # what E counts


# name -> (sum, weight), both () tensors or numbers; what is reported is the sum of sums over the sum of weights.
Measures = Mapping[str, tuple[Tensor, Tensor | float]]


class Evaluation(NamedTuple):
    """The evaluation of a batch in one forward. routing: one a layer; empty if nothing is routed.

    ranked: name -> (scores (B,), whether each is a positive (B,)); the area under the ROC curve over all batches is
        reported.
    """

    measures: Measures
    routing: Sequence[Routing] = ()
    ranked: Mapping[str, tuple[Tensor, Tensor]] = MappingProxyType({})


@dataclass
class Task:
    """One side of a comparison, ready to train. All functions are called on whole batches, under the task's own random
    state; none may wait for the device.

    loss: batch -> named () tensors (means over the steps are logged): "loss" is differentiated, "task" or
        "text" is the part of it that the data judge, the others are its regularisers, weighted.
    evaluate: batch -> Evaluation, of one forward. Called in eval mode without gradients.
    predict: the inputs of samples, without targets -> predictions; called in eval mode.
    predict_known: a batch of the test set -> the same, where something that training keeps of it, such as frozen masks,
        spares work.
    total: of the measures over all batches -> more of them, which are no mean over samples. The recipe's METRIC is one
        of either.
    schedule: step, counted from 0 -> factor of every group's learning rate in that step.
    before_step: called with every step before it is taken: phases, temperatures, expert counts.
    clip: largest norm of the gradient.
    grid: rows and columns of an image's patches, where what is routed are the tokens of images, each a class token and
        then its patches: heat maps of the experts are drawn from these.
    """

    model: nn.Module
    optimiser: torch.optim.Optimizer
    loss: Callable[[Batch], Mapping[str, Tensor]]
    evaluate: Callable[[Batch], Evaluation]
    predict: Callable[..., Any] | None = None
    schedule: LearningRate = constant
    before_step: Callable[[int], None] | None = None
    clip: float | None = None
    grid: tuple[int, int] | None = None
    predict_known: Callable[[Batch], Any] | None = None
    total: Callable[[dict[str, float]], dict[str, float]] | None = None

    def routing(self, batch: Batch) -> Sequence[Routing]:
        """Who the routers choose for a batch; in eval mode."""
        return self.evaluate(batch).routing


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    sweep: bool = False,
) -> Any:
    """A field of a recipe, and --name on the command line. A tuple takes several values; its first one tells the type.

    low, high: the least and the largest number allowed; every number must be finite.
    sweep: the command line takes several values, each of which is a variant of every side: see Recipe.variants.
    """
    metadata = {"help": help, "low": low, "high": high, "choices": choices, "sweep": sweep}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Recipe:
    """Options of every recipe. A subclass has other defaults, more fields, SIDES and `build`."""

    SIDES: ClassVar[tuple[str, ...]] = ()  # all sides; `sides` names those that a run compares
    ACCEPTS: ClassVar[type] = Images  # the kind of data set
    METRIC: ClassVar[str] = "accuracy"  # the measure that the table, the plot and the tuning go by
    HIGHER_IS_BETTER: ClassVar[bool] = True

    data: str = option("digits", "data set: digits, or a path to files of one")
    sides: tuple[str, ...] = option(("",), "what to compare; all get the same seeds, batches and number of steps")
    epochs: int = option(10, "passes over the training set", low=0)
    steps: int = option(0, "steps instead of epochs; 0: epochs", low=0)
    batch_size: int = option(32, "samples a step", low=1)
    lr: float = option(0.01, "learning rate", low=0)
    tune: tuple[float, ...] = option(
        (), "learning rates to choose from, for each side, on a held-out tenth of the training set", low=0
    )
    seed: int = option(0, "of weights, batches and everything else that is random; further seeds count up")
    eval_batch: int = option(1000, "samples at a time in evaluation", low=1)
    eval_rows: int = option(
        0, "test samples of an evaluation, a fixed random choice; 0: all, but no more than there are to train on", low=0
    )
    choose: str = option(
        "last",
        "which evaluation counts, and whose model is kept: the last, or the one that is best on the validation part "
        "(of a data set without one, a tenth of the training set)",
        choices=("last", "best"),
    )
    patience: int = option(
        0, "evaluations without a better one on the validation part, after which a run stops; 0: it never does", low=0
    )
    check_steps: int = option(5, "steps of the agreement check of fast and reference backend; 0: none", low=0)

    @property
    def side(self) -> str:
        """The one that `build` is to build."""
        (side,) = self.sides
        return side

    def variants(self) -> dict[str, Recipe]:
        """Name in the table -> a recipe of one side, and of one value of every option that was given several."""
        swept = self.swept()
        found: dict[str, Recipe] = {}
        for values in itertools.product(*swept.values()):
            chosen: dict[str, Any] = dict(zip(swept, values, strict=True))
            for side, each in replace(self, **chosen).of_sides().items():
                found[" ".join([side, *(f"{name}={value:g}" for name, value in chosen.items())])] = each
        return found

    def of_sides(self) -> dict[str, Recipe]:
        """Name in the table -> a recipe of one side, of a recipe whose options have one value each."""
        return {side: replace(self, sides=(side,)) for side in self.sides}

    def swept(self) -> dict[str, tuple[float, ...]]:
        """The options that were given several values: a run compares all of their combinations."""
        named = [each.name for each in fields(self) if each.metadata["sweep"]]
        return {name: getattr(self, name) for name in named if isinstance(getattr(self, name), tuple)}

    def splits(self, data: Any) -> Splits:
        """Training and test tensors of a data set of the kind ACCEPTS."""
        return Splits(data, data.train, data.test)

    def blank_splits(self, data: Any) -> Splits:
        """Splits of zeros in the shapes of `splits`, for `build` of a model that is then loaded.

        data: what moe_kernels.data.blank gives.
        """
        return self.splits(data)

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """The part of a batch that `Task.predict` takes."""
        return batch.tensors[:1]

    def build(self, data: Splits, seed: int, steps: int) -> Task:
        """`side` on the device of `data`, to be trained for `steps` steps. torch's generators are seeded already."""
        raise NotImplementedError


def accuracy(scores: Tensor, y: Tensor) -> Measures:
    """Accuracy and cross-entropy of logits or log probabilities (B, classes)."""
    nats = F.cross_entropy(scores, y, reduction="sum")
    return {"accuracy": ((scores.argmax(-1) == y).sum(), len(y)), "loss": (nats, len(y))}


def total_loss(task: Tensor, regularisers: Mapping[str, Tensor], name: str = "task") -> dict[str, Tensor]:
    """The result of Task.loss: the sum as "loss", the task's part as `name`, and every regulariser by its name."""
    return {"loss": sum(regularisers.values(), task), name: task, **regularisers}


def names() -> list[str]:
    """Every recipe of the package."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def find(name: str) -> type[Recipe]:
    """The recipe class of recipes/<name>.py.

    Raises:
        ValueError: no such recipe.
    """
    if name not in names():
        raise ValueError(f"there is no recipe {name!r}; there are {', '.join(names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    found = [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Recipe) and each.__module__ == module.__name__
    ]
    (recipe,) = found
    return recipe
