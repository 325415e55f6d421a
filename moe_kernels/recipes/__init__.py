"""Recipes: a paper's system with the paper's defaults, one small file each; `python -m moe_kernels train NAME` runs it.

recipes/<name>.py holds `class <Name>(Recipe)`, a frozen dataclass. Its fields are the options of the command line
(`option` gives help and limits), and `build` puts one side of the comparison together:

    build(data, seed, steps) -> Task(model, optimiser, loss, evaluate, schedule, before_step, routing)

The loop (moe_kernels.train) does the rest: batches, steps, learning rates, evaluation, checkpoints, log, table, plot.
A schedule is `step -> factor of the learning rate`, phases are `before_step(step)`: whatever happens during training is
a pure function of the step, or is kept in the state dict of model or optimiser. A checkpoint needs no more.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from moe_kernels.data import Images
from moe_kernels.nn.schedules import LearningRate, constant


class Batch(NamedTuple):
    """Rows of the training set (`rows` says which) or of the test set (`rows` is None)."""

    tensors: tuple[Tensor, ...]  # as the recipe's `splits` orders them: for images x (B, N), y (B)
    rows: Tensor | None
    start: int | None = None  # of the test set: the first of its rows; None: rows of no set, as FLOPs are counted on


class Splits(NamedTuple):
    """What a run trains on and what judges it: tensors whose first dimension counts samples."""

    source: Any  # the data set: a Dataset of the kind that the recipe accepts
    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]


class Routing(NamedTuple):
    """What one layer's router did with a batch: its part of the table's experts a sample, load and entropy."""

    active: Tensor  # bool (..., E): the experts that each sample or token used
    probs: Tensor | None = None  # (..., E): the gate's distribution, whose entropy is reported; None where it has none


# name -> (sum, weight), both () tensors or numbers; what is reported is the sum of sums over the sum of weights.
Measures = Mapping[str, tuple[Tensor, Tensor | float]]


@dataclass
class Task:
    """One side of a comparison, ready to train. All functions are called on whole batches, under the task's own random
    state; none may wait for the device.

    loss: batch -> named () tensors; "loss" is differentiated, the others are logged beside it (means over the steps).
    evaluate: batch -> measures. Called in eval mode without gradients.
    total: of the measures over all batches -> more of them, which are no mean over samples. The recipe's METRIC is one
        of either.
    schedule: step, counted from 0 -> factor of every group's learning rate in that step.
    before_step: called with every step before it is taken: phases, temperatures, expert counts.
    routing: batch -> one Routing a layer, in eval mode; None where nothing is routed.
    clip: largest norm of the gradient.
    grid: rows and columns of an image's patches, where what `routing` routes are the tokens of images, each a class
        token and then its patches: heat maps of the experts are drawn from these.
    """

    model: nn.Module
    optimiser: torch.optim.Optimizer
    loss: Callable[[Batch], Mapping[str, Tensor]]
    evaluate: Callable[[Batch], Measures]
    schedule: LearningRate = constant
    before_step: Callable[[int], None] | None = None
    routing: Callable[[Batch], list[Routing]] | None = None
    clip: float | None = None
    grid: tuple[int, int] | None = None
    total: Callable[[dict[str, float]], dict[str, float]] | None = None


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A field of a recipe, and --name on the command line. A tuple takes several values; its first one tells the type.

    low, high: the least and the largest number allowed; every number must be finite.
    """
    return field(default=default, metadata={"help": help, "low": low, "high": high, "choices": choices})


@dataclass(frozen=True)
class Recipe:
    """What every recipe has. A subclass gives other defaults, more fields, SIDES and `build`."""

    SIDES: ClassVar[tuple[str, ...]] = ()  # every side it knows; `sides` names those that a run compares
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
    check_steps: int = option(5, "steps of the agreement check of fast and reference backend; 0: none", low=0)

    @property
    def side(self) -> str:
        """The one that `build` is to build."""
        (side,) = self.sides
        return side

    def variants(self) -> dict[str, Recipe]:
        """Name in the table -> a recipe of that one side."""
        return {side: replace(self, sides=(side,)) for side in self.sides}

    def splits(self, data: Any) -> Splits:
        """Training and test tensors of a data set of the kind ACCEPTS."""
        return Splits(data, data.train, data.test)

    def build(self, data: Splits, seed: int, steps: int) -> Task:
        """`side` on the device of `data`, to be trained for `steps` steps. torch's generators are seeded already."""
        raise NotImplementedError


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
