"""One run: one model of a comparison (a side) with one seed, from its first step to its last.

The batches of an epoch are blocks of a permutation that is drawn from the run's seed and the epoch: sides of equal seed
have equal batches. Every run has a random state of its own. So alternating with other runs, or continuing from a
checkpoint, does not change a run's random numbers.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe_kernels.nn.gates import CompetitionGate
from moe_kernels.papers.recipes import Batch, Measures, Recipe, Splits, Task
from moe_kernels.papers.train import flops
from moe_kernels.papers.train.contents import check_like, check_optimiser, check_options, check_rows
from moe_kernels.papers.train.statistics import RoutingStatistics, Row, area_under_roc, calibration_error

AMP = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOSSES = ("loss", "task", "text")  # "loss" is differentiated; "task" or "text" is its part without regularisers


class Random:
    """A random state of torch for the CPU and, with a CUDA `device`, for that GPU. Inside `use` torch draws from it."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.state = {"cpu": torch.Generator().manual_seed(seed).get_state()}
        if device.type == "cuda":
            self.state["cuda"] = torch.Generator(device).manual_seed(seed).get_state()

    @contextmanager
    def use(self) -> Iterator[None]:
        before = self._read()
        self._set(self.state)
        try:
            yield
        finally:
            self.state = self._read()
            self._set(before)

    def _read(self) -> dict[str, Tensor]:
        found = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            found["cuda"] = torch.cuda.get_rng_state(self.device)
        return found

    def _set(self, state: dict[str, Tensor]) -> None:
        torch.set_rng_state(state["cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self.device)


@dataclass(frozen=True)
class SeededDraw:
    """Replaces the `rate` of a competition gate: decides from seed, layer and step whether the experts compete.

    A call returns 1 or 0; the probability of 1 is `rate`, or `rate(step)` if `rate` is a function.
    """

    rate: float | Callable[[int], float]
    seed: int
    layer: int

    def __call__(self, step: int) -> float:
        rate = self.rate(step) if callable(self.rate) else self.rate
        generator = torch.Generator().manual_seed((self.layer * 1_000_003 + step) * 1_000_003 + self.seed)
        return float(torch.rand((), generator=generator).item() < rate)


def seed_competitions(model: nn.Module, seed: int) -> list[tuple[CompetitionGate, SeededDraw]]:
    """Makes the draws of all competition gates functions of seed, layer and step; returns these gates and functions."""
    found = []
    for layer, module in enumerate(model.modules()):
        if isinstance(module, CompetitionGate):
            module.rate = draw = SeededDraw(module.rate, seed, layer)
            found.append((module, draw))
    return found


@dataclass
class Run:
    """A task in training: `advance` takes steps, evaluates, and appends a row to `rows`."""

    recipe: Recipe
    seed: int
    data: Splits
    task: Task = field(init=False)
    step: int = 0
    rows: list[Row] = field(default_factory=list)
    setup_seconds: float = 0.0
    parameters: int = 0
    best: dict[str, Any] | None = None  # the state dict on the CPU at evaluation self.chosen, if self.validates
    unit: str = "experts"  # what the routing counts: "experts" or "neurons"; set by an evaluation
    terms: list[Row] = field(default_factory=list)  # for every row: means of the regularisers since the row before

    def __post_init__(self) -> None:
        self.device = self.data.train[0].device
        self.random = Random(self.seed, self.device)
        started = time.perf_counter()
        with self.random.use():
            self.task = self.recipe.build(self.data, self.seed, self.steps)
        self._competing = seed_competitions(self.task.model, self.seed)
        # Without float16 it does nothing; bfloat16 has float32's exponents. torch's first scale, 2^16, overflows in the
        # first step of some recipes, which the scaler skips.
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**10, enabled=self.recipe.amp == "float16")
        self.setup_seconds = time.perf_counter() - started
        # Counted before the first step, since before_step may freeze parameters.
        self.parameters = sum(each.numel() for each in self.task.model.parameters() if each.requires_grad)
        for group in self.task.optimiser.param_groups:
            group["initial_lr"] = group["lr"]
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))

    @property
    def epoch_steps(self) -> int:
        return math.ceil(len(self.data.train[0]) / self.recipe.batch_size)

    @property
    def steps(self) -> int:
        return self.recipe.steps or self.recipe.epochs * self.epoch_steps

    def batch(self, step: int) -> Batch:
        epoch, block = divmod(step, self.epoch_steps)
        if self._order[0] != epoch:
            # torch's generator on the CPU uses the lower 32 bits of this number alone.
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self.data.train[0]), generator=generator)
            self._order = epoch, order.to(self.device)
        size = self.recipe.batch_size
        rows = self._order[1][block * size : (block + 1) * size]
        return Batch(tuple(tensor.index_select(0, rows) for tensor in self.data.train), rows)

    def take_step(self) -> dict[str, Tensor]:
        """Takes one step; returns the losses of Task.loss, detached."""
        task, batch = self.task, self.batch(self.step)
        if task.before_step is not None:
            task.before_step(self.step)
        factor = task.schedule(self.step)
        for group in task.optimiser.param_groups:
            group["lr"] = group["initial_lr"] * factor
        task.optimiser.zero_grad()
        losses = self.differentiate(batch)
        self.scaler.unscale_(task.optimiser)
        if task.clip is not None:
            self.clip(task.clip)
        self.scaler.step(task.optimiser)
        self.scaler.update()
        self.step += 1
        return {name: value.detach() for name, value in losses.items()}

    def differentiate(self, batch: Batch) -> Mapping[str, Tensor]:
        """The losses of a batch; adds the gradients to the parameters' `grad`."""
        losses = self.losses(batch)
        self.scaler.scale(losses["loss"]).backward()
        return losses

    def losses(self, batch: Batch) -> Mapping[str, Tensor]:
        with self.autocast():
            return self.task.loss(batch)

    def autocast(self) -> AbstractContextManager[object]:
        """Mixed precision, if the recipe's `amp` says so."""
        dtype = AMP[self.recipe.amp]
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def clip(self, max_norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.task.model.parameters(), max_norm)

    def gradients(self) -> list[Tensor | None]:
        return [None if each.grad is None else each.grad.clone() for each in self.task.model.parameters()]

    def model_state(self) -> dict[str, Any]:
        return self.task.model.state_dict()

    def advance(self, to: int, tick: Callable[[], None] = lambda: None) -> None:
        """Takes steps until `to` steps are done, then evaluates and appends a row. Calls `tick` after every step."""
        sums: dict[str, Tensor] = {}
        first = self.step
        with self.random.use():
            self.task.model.train()
            self._synchronize()
            started = time.perf_counter()
            spans: list[tuple[float, float]] = []  # of a step: layers that compete, seconds
            while self.step < to:
                competing = sum(draw(gate.steps) for gate, draw in self._competing)
                began = time.perf_counter()
                for name, value in self.take_step().items():
                    sums[name] = value.clone() if name not in sums else sums[name].add_(value)
                if self._competing:
                    self._synchronize()
                    spans.append((competing, time.perf_counter() - began))
                tick()
            self._synchronize()
            seconds = time.perf_counter() - started
            steps = self.step - first
            means = {name: value.item() / steps for name, value in sums.items()}
            row = {"step": self.step, "epoch": self.step / self.epoch_steps, "loss": math.nan}
            row |= {name: value for name, value in means.items() if name in LOSSES}
        # Not self.random, which is for training: an evaluation does not change it, and all evaluations draw the same.
        with Random(self.seed, self.device).use():
            row |= self.evaluate() | {"seconds": seconds / steps if steps else math.nan}
        if self._competing:
            row |= _of_competitions(spans, len(self._competing))
        self.rows.append(row)
        self.terms.append({name: value for name, value in means.items() if name not in LOSSES})
        if self.validates and self.chosen == len(self.rows) - 1:
            self.best = copy.deepcopy({k: _on_cpu(v) for k, v in self.model_state().items()})

    @property
    def validates(self) -> bool:
        """Whether evaluations use the validation part in addition to the test set."""
        return self.data.valid is not None and (self.recipe.choose == "best" or self.recipe.patience > 0)

    @property
    def chosen(self) -> int:
        """Index of the row to report: the last.

        With choose="best" and a validation part it is the first row that is best on the validation part.
        """
        last = len(self.rows) - 1
        if self.recipe.choose == "last" or not self.validates:
            return last
        return self._best_row()

    @property
    def stopped(self) -> bool:
        """Whether none of the last `patience` rows beats the best row before them on the validation part.

        False if `patience` is 0 or there is no validation part.
        """
        since_best = len(self.rows) - 1 - self._best_row() if self.rows and self.validates else 0
        return 0 < self.recipe.patience <= since_best

    def _best_row(self) -> int:
        sign, name = 1 if self.recipe.HIGHER_IS_BETTER else -1, f"valid {self.recipe.METRIC}"
        scores = [-math.inf if math.isnan(row[name]) else sign * row[name] for row in self.rows]
        return scores.index(max(scores))

    @torch.no_grad()
    def evaluate(self) -> Row:
        """The measures "test NAME" and, if `validates`, "valid NAME"; also routing statistics of the test set."""
        row: Row = {}
        self.task.model.eval()
        if self.validates:
            assert self.data.valid is not None
            row |= self._measures(self.batches(self.data.valid), "valid", None)
        statistics = RoutingStatistics(self.device)
        row |= self._measures(self.test_batches(), "test", statistics)
        self.task.model.train()
        self.unit = statistics.unit
        return row | statistics.row()

    def _measures(self, batches: Iterator[Batch], part: str, statistics: RoutingStatistics | None) -> Row:
        task, sums, weights = self.task, dict[str, Any](), dict[str, Any]()
        joined: tuple[dict[str, list[tuple[Tensor, Tensor]]], ...] = ({}, {})  # of area_under_roc, calibration_error
        last = task.last if part == "test" and self.step >= self.steps else None
        for batch in batches:
            with self.autocast():
                found = task.evaluate(batch)
                further: Measures = {} if last is None else last(batch)
            for parts, pairs in zip(joined, (found.ranked, found.calibrated), strict=True):
                for name, pair in pairs.items():
                    parts.setdefault(name, []).append(pair)
            for name, (value, weight) in {**found.measures, **further}.items():
                sums[name] = sums.get(name, 0) + value
                weights[name] = weights.get(name, 0) + weight
            if statistics is not None:
                statistics.add(found.routing)
        measures = {name: float(sums[name]) / max(float(weights[name]), 1e-30) for name in sums}
        if task.total is not None:
            measures = task.total(measures) | measures
        figures: tuple[Callable[[Tensor, Tensor], float], ...] = (area_under_roc, calibration_error)
        for parts, figure in zip(joined, figures, strict=True):
            for name, each in parts.items():
                first, second = zip(*each, strict=True)
                measures[name] = figure(torch.cat(first), torch.cat(second))
        return {f"{part} {name}": value for name, value in measures.items()}

    def flops(self, known: bool = False) -> float:
        """FLOPs of a prediction for one sample, mean of the first 32 test samples, by torch's counter.

        A multiply-add is two FLOPs. Products of experts count the rows in use; combine counts all rows that its plan
        allocates. Backend "reference" has fewer FLOPs, since torch counts only the matrix products of a definition.
        known: whether to predict with what is stored for test samples, such as frozen masks.
        """
        batch = Batch(tuple(tensor[:32] for tensor in self.data.test), None, 0 if known else None)
        self.task.model.eval()
        counter = flops.counter()
        with self.random.use(), torch.no_grad(), counter:
            if known and self.task.predict_known is not None:
                self.task.predict_known(batch)
            elif self.task.predict is not None:
                self.task.predict(*self.recipe.inputs(batch))
        self.task.model.train()
        return counter.get_total_flops() / len(batch.tensors[0])

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "rows": self.rows,
            "random": self.random.state,
            "model": self.task.model.state_dict(),
            "optimiser": self.task.optimiser.state_dict(),
            "best": self.best,
            "unit": self.unit,
            "terms": self.terms,
            "scaler": self.scaler.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        check_like("step", 0, state["step"])
        if not 0 <= state["step"] <= self.steps:
            raise ValueError(f"step must be from 0 to {self.steps}, got {state['step']}")
        measured = [f"{part} {self.recipe.METRIC}" for part in ("test", "valid")[: 1 + self.validates]]
        check_rows(state["rows"], state["terms"], ("step", "epoch", "loss", "seconds", *measured))
        for name in ("model", "best") if state["best"] is not None else ("model",):
            check_like(name, self.task.model.state_dict(), state[name])
        if state["unit"] not in ("experts", "neurons"):
            raise ValueError(f"unit must be experts or neurons, got {state['unit']}")
        check_optimiser(self.task.optimiser, state["optimiser"])
        check_like("scaler", self.scaler.state_dict(), state["scaler"])
        options = [dict(group) for group in self.task.optimiser.param_groups]
        self.task.model.load_state_dict(state["model"])
        self.task.optimiser.load_state_dict(state["optimiser"])
        check_options(options, self.task.optimiser.param_groups)
        self.scaler.load_state_dict(state["scaler"])
        self.step, self.rows = state["step"], [dict(row) for row in state["rows"]]
        self.best, self.unit = state["best"], state["unit"]
        self.terms = [dict(row) for row in state["terms"]]
        self.random.state = state["random"]
        with self.random.use():  # raises if this is no random state
            pass

    def test_batches(self) -> Iterator[Batch]:
        """Batches of the test set in order; `start` is the index of a batch's first sample."""
        for number, batch in enumerate(self.batches(self.data.test)):
            yield batch._replace(start=number * self.recipe.eval_batch)

    def batches(self, part: tuple[Tensor, ...]) -> Iterator[Batch]:
        size = self.recipe.eval_batch
        for start in range(0, len(part[0]), size):
            yield Batch(tuple(tensor[start : start + size] for tensor in part), None)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _of_competitions(spans: Sequence[tuple[float, float]], layers: int) -> Row:
    """The columns of CompeteSMoE, of the steps since the last evaluation; NaN without steps, or if all compete.

    competitions      share of layers and steps in which the experts compete
    competition time  share of the time that competitions add: 1 - steps * mean of those without / sum of all
    """
    quiet = [seconds for competing, seconds in spans if not competing]
    if not spans or not quiet:
        return {"competitions": math.nan, "competition time": math.nan}
    total = sum(seconds for _, seconds in spans)
    added = 1 - len(spans) * sum(quiet) / len(quiet) / total
    return {"competitions": sum(n for n, _ in spans) / (len(spans) * layers), "competition time": added}


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
