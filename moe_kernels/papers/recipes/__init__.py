"""Recipes: the papers' systems, one file each; `python -m moe_kernels train NAME` runs one.

recipes/<name>.py defines one subclass of Recipe, a frozen dataclass. Its fields are the options of the command line
(`option` gives help and limits). A recipe compares several models, its sides, such as the system of a paper and its
baselines. `build(data, seed, steps)` makes one side, ready to train, as a Task.

moe_kernels.papers.train does the rest. What a recipe changes during training must be a pure function of the step or be
in the state dict of the model or the optimiser, so that a checkpoint is complete.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels.nn.schedules import LearningRate, constant
from moe_kernels.papers.data import Images


class Batch(NamedTuple):
    """Samples. rows: their indices in the training set; None for other samples, or if no index is needed."""

    tensors: tuple[Tensor, ...]  # in the order of the recipe's `splits`: for images x (B, N), y (B)
    rows: Tensor | None
    start: int | None = None  # the first sample's index in the test set; None if unknown or for other samples


class Splits(NamedTuple):
    """Training, validation and test tensors; the first dimension counts samples."""

    source: Any  # the data set: a Dataset of the kind that the recipe accepts
    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]
    valid: tuple[Tensor, ...] | None = None  # for the options choose and patience; None if missing or not used


class Routing(NamedTuple):
    """Routing of one layer in a batch."""

    active: Tensor  # bool (..., E): the experts or neurons that each sample or token used
    probs: Tensor | None = None  # (..., E): the router's distribution, for its entropy; None: there is none
    weights: Tensor | None = None  # (..., E): gate weights, for heat maps
    unit: str = "experts"  # what E counts: "experts" or "neurons"


# name -> (sum, weight) of a batch. The reported value is the total of the sums divided by the total of the weights.
Measures = Mapping[str, tuple[Tensor, Tensor | float]]
Found = TypeVar("Found")


class Evaluation(NamedTuple):
    """The evaluation of a batch, from one forward pass. routing: one for each routed layer.

    ranked: name -> (scores (B,), bool (B,): True for positives), for the area under the ROC curve over all batches.
    calibrated: name -> (confidence (B,), bool (B,): whether the prediction is right), for the expected calibration
        error over all batches.
    """

    measures: Measures
    routing: Sequence[Routing] = ()
    ranked: Mapping[str, tuple[Tensor, Tensor]] = MappingProxyType({})
    calibrated: Mapping[str, tuple[Tensor, Tensor]] = MappingProxyType({})


@dataclass
class Task:
    """One side of a comparison, ready to train. Its functions should not synchronise with the device.

    loss: batch -> named () tensors; their means over the steps between two evaluations are logged. "task" or "text" is
        the loss without regularisers; each regulariser is already times its coefficient; "loss" is the sum of them
        all and is differentiated.
    evaluate: batch -> Evaluation, from one forward pass. Called in eval mode without gradients.
    predict: the inputs of samples, without targets -> predictions. Called in eval mode.
    predict_known: a batch of the test set -> the predictions of `predict`, from stored parts such as frozen masks.
    total: the measures over all batches -> further measures, computed from them.
    schedule: step, counted from 0 -> factor of every group's learning rate in that step.
    before_step: called before every training step, with its number, counted from 0.
    clip: largest norm of the gradient; None: no limit.
    last: batch -> further measures, of the test set in the evaluation after the last step alone. Called as `evaluate`.
    dropped: images (B, N) -> for each title, the share of choices (B, rows, columns) that a low capacity drops at each
        patch of `grid`, for a picture. Called as `evaluate`.
    grid: rows and columns of an image's patches, for heat maps of the experts. The routed tokens of an image must be a
        class token, then its patches. None: no heat maps.
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
    last: Callable[[Batch], Measures] | None = None
    dropped: Callable[[Tensor], dict[str, Tensor]] | None = None

    def routing(self, batch: Batch) -> Sequence[Routing]:
        """The routing of a batch. The model must be in eval mode."""
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
    """A dataclass field that is also a command line option. With a tuple as default it takes several values.

    low, high: the smallest and the largest number that the command line accepts; it accepts only finite numbers.
    sweep: the command line takes several values; every side is trained with each (see Recipe.variants).
    """
    metadata = {"help": help, "low": low, "high": high, "choices": choices, "sweep": sweep}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Recipe:
    """Options of all recipes. A subclass defines SIDES and `build`, and may add fields and change defaults."""

    SIDES: ClassVar[tuple[str, ...]] = ()  # all sides; a run compares those in `sides`
    ACCEPTS: ClassVar[type] = Images  # the kind of data set
    METRIC: ClassVar[str] = "accuracy"  # the measure that the table and the plot show and that tuning compares
    HIGHER_IS_BETTER: ClassVar[bool] = True
    UNUSED: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})  # side -> swept options without effect on it

    data: str = option("digits", "data set: digits, or the path of a data set's files")
    sides: tuple[str, ...] = option(("",), "sides to compare; all get the same seeds, batches and number of steps")
    epochs: int = option(10, "passes over the training set", low=0)
    steps: int = option(0, "steps instead of epochs; 0: epochs", low=0)
    batch_size: int = option(32, "samples a step", low=1)
    lr: float = option(0.01, "learning rate", low=0)
    tune: tuple[float, ...] = option(
        (), "learning rates to choose from, for each side, on a held-out tenth of the training set", low=0
    )
    seed: int = option(0, "seed of weights, batches and random numbers in training; further seeds are seed + 1, ...")
    eval_batch: int = option(1000, "samples of a batch in evaluation", low=1)
    eval_rows: int = option(
        0,
        "test (or validation) samples to evaluate at most, a fixed random choice; 0: as many as training samples",
        low=0,
    )
    choose: str = option(
        "last",
        "the evaluation to report, and its model to keep: the last, or the best on the validation part (if there is "
        "none, on a tenth of the training set)",
        choices=("last", "best"),
    )
    patience: int = option(
        0, "stop a run after so many evaluations without a better one on the validation part; 0: never", low=0
    )
    amp: str = option(
        "none",
        "mixed precision: torch.autocast in training and evaluation; float16 scales the loss",
        choices=("none", "bfloat16", "float16"),
        sweep=True,
    )
    check_steps: int = option(5, "steps of the agreement check of fast and reference backend; 0: none", low=0)

    @property
    def side(self) -> str:
        """The one side of `sides`, which `build` makes."""
        (side,) = self.sides
        return side

    def variants(self) -> dict[str, Recipe]:
        """Name in the table -> a recipe of one side with one value of each swept option."""
        swept = self.swept()
        found: dict[str, Recipe] = {}
        for values in itertools.product(*swept.values()):
            chosen: dict[str, Any] = dict(zip(swept, values, strict=True))
            for side, each in replace(self, **chosen).of_sides().items():
                found[" ".join([side, *(f"{name}={text_of(value)}" for name, value in chosen.items())])] = each
        return found

    def of_sides(self) -> dict[str, Recipe]:
        """Name in the table -> a recipe of one side."""
        return {side: replace(self, sides=(side,)) for side in self.sides}

    def curves(self) -> dict[str, dict[float, str]]:
        """Curves over values of an option that evaluations alone use: title -> value -> column of the log."""
        return {}

    def columns(self) -> tuple[str, ...]:
        """Further columns of the log that the table shows, where they exist."""
        return ()

    def swept(self) -> dict[str, tuple[Any, ...]]:
        """The options with sweep=True that have several values. A run compares all their combinations."""
        named = [each.name for each in fields(self) if each.metadata["sweep"]]
        return {name: getattr(self, name) for name in named if isinstance(getattr(self, name), tuple)}

    def splits(self, data: Any) -> Splits:
        """Training and test tensors of a data set of the kind ACCEPTS."""
        return Splits(data, data.train, data.test)

    def blank_splits(self, data: Any) -> Splits:
        """Splits of zeros, to build a model before its weights are loaded. data: from moe_kernels.papers.data.blank."""
        return self.splits(data)

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """The part of a batch that `Task.predict` takes."""
        return batch.tensors[:1]

    def build(self, data: Splits, seed: int, steps: int) -> Task:
        """The task of `side` on the device of `data`, for `steps` training steps. Callers seed torch's generators."""
        raise NotImplementedError


def text_of(value: float | str) -> str:
    """A value of an option in the name of a side."""
    return value if isinstance(value, str) else f"{value:g}"


def accuracy(scores: Tensor, y: Tensor) -> Measures:
    """Measures "accuracy" and "loss" (cross-entropy in nats) of logits or log probabilities (B, classes)."""
    nats = F.cross_entropy(scores, y, reduction="sum")
    return {"accuracy": ((scores.argmax(-1) == y).sum(), len(y)), "loss": (nats, len(y))}


def total_loss(task: Tensor, regularisers: Mapping[str, Tensor], name: str = "task") -> dict[str, Tensor]:
    """The result of Task.loss: the sum as "loss", the part `task` as `name`, and the regularisers by their names."""
    return {"loss": sum(regularisers.values(), task), name: task, **regularisers}


def names(package: Iterable[str] = __path__) -> list[str]:
    """Names of the modules in the folders `package` that do not begin with "_"; by default the names of all recipes."""
    return sorted(module.name for module in pkgutil.iter_modules(package) if not module.name.startswith("_"))


def find(name: str) -> type[Recipe]:
    """The recipe class of recipes/<name>.py; ValueError for an unknown name."""
    return find_class(__name__, "recipe", name, Recipe)


def find_class(package: str, kind: str, name: str, base: type[Found]) -> type[Found]:
    """The subclass of `base` in module `name` of a package; ValueError, naming `kind`, if there is no such module."""
    existing = names(importlib.import_module(package).__path__)
    if name not in existing:
        raise ValueError(f"there is no {kind} {name!r}; there are {', '.join(existing)}")
    module = importlib.import_module(f"{package}.{name}")
    classes = (each for each in vars(module).values() if isinstance(each, type) and issubclass(each, base))
    (found,) = (each for each in classes if each.__module__ == module.__name__)
    return found
