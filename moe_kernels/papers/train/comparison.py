"""Tunes and trains all sides of a recipe with all seeds, and keeps the checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moe_kernels.papers import sources
from moe_kernels.papers.recipes import Recipe, Splits
from moe_kernels.papers.train import checkpoint
from moe_kernels.papers.train.agreement import compete_in_turn
from moe_kernels.papers.train.contents import check_like, check_rows
from moe_kernels.papers.train.heatmaps import draw, draw_dropped, token_maps
from moe_kernels.papers.train.loop import LOSSES, Run
from moe_kernels.papers.train.report import History, log
from moe_kernels.papers.train.statistics import Row
from moe_kernels.papers.train.trained import chosen_state, save_model

# For each field of a finished run in a checkpoint, except its rows, a value of the same type.
HISTORY = {"side": "", "seed": 0, "lr": 0.0, "stage": "", "unit": "", "chosen": 0}
HISTORY |= {"flops": 0.0, "flops_known": 0.0, "setup_seconds": 0.0, "parameters": 0}


def call(action: Callable[[], object]) -> None:
    action()


class Comparison:
    """The runs of all sides, with the same seeds, batches and learning rates to choose from.

    on_first: calls a function that writes files; on several ranks, only on the first.

    Tuning trains each side once with each rate, on nine tenths of the training set with the first seed, and takes the
    rate with the best last evaluation on the remaining tenth. Tuning does not use the test set.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: Splits,
        seeds: int,
        every: int,
        out: Path | None,
        make: Callable[[Recipe, int, Splits], Run] = Run,
        on_first: Callable[[Callable[[], object]], None] = call,
    ) -> None:
        if not 0 <= recipe.seed < 2**31 - seeds:  # products with it stay within 64 bits
            raise ValueError(f"seed must be from 0 to {2**31 - seeds - 1}, got {recipe.seed}")
        self.recipe, self.data, self.every = recipe, parts(data, recipe), every
        self.test_samples = len(data.test[0])  # of the data set; an evaluation may use fewer
        self.device = data.train[0].device
        self.seeds = range(recipe.seed, recipe.seed + seeds)
        self.variants = recipe.variants()
        self.twins = twins(self.variants)
        self.variants = {name: each for name, each in self.variants.items() if name not in self.twins}
        self.sources = sources.digest("recipes", type(recipe).__module__.rpartition(".")[2])
        self.done: dict[str, History] = {}
        self.live: dict[str, Run] = {}
        self.restored: dict[str, dict[str, Any]] = {}
        self.out, self.make, self.on_first = out, make, on_first
        self.saved = False  # whether `checkpoint` is of this comparison; the folder may hold one of another
        if out is not None:
            on_first(lambda: out.mkdir(parents=True, exist_ok=True))

    @property
    def checkpoint(self) -> Path | None:
        return None if self.out is None else self.out / "checkpoint.pt"

    @property
    def total_steps(self) -> int:
        """Upper limit of the steps of all runs together, for the progress bar: a run may stop earlier."""
        size = len(self.data.train[0])
        final, tuned = (
            self.recipe.steps or self.recipe.epochs * math.ceil(n / self.recipe.batch_size)
            for n in (size, size - size // 10)
        )
        return len(self.variants) * (len(self.seeds) * final + len(self._candidates) * tuned)

    @property
    def _candidates(self) -> tuple[float, ...]:
        """Learning rates to try; empty if `tune` has fewer than two."""
        return self.recipe.tune if len(self.recipe.tune) > 1 else ()

    def train(self, tick: Callable[[], None], say: Callable[[str], None]) -> None:
        """Tunes, then trains the final runs, seed by seed; sides train in turns, each up to its next evaluation."""
        if len(self.recipe.tune) == 1:
            (rate,) = self.recipe.tune
            self.variants = {name: dataclasses.replace(each, lr=rate) for name, each in self.variants.items()}
        if self._candidates:
            split = _held_out(self.data, self.recipe.seed)
            for name, variant in self.variants.items():
                for lr in self._candidates:
                    key = f"{name} at {lr:g}"
                    self._train_in_turns({key: (name, dataclasses.replace(variant, lr=lr), split, "tune")}, tick, say)
                self.variants[name] = dataclasses.replace(variant, lr=self._best_rate(name))
                say(f"{name}: learning rate {self.variants[name].lr:g}")
        for seed in self.seeds:
            chosen = {
                f"{name}, seed {seed}": (name, dataclasses.replace(variant, seed=seed), self.data, "final")
                for name, variant in self.variants.items()
            }
            self._train_in_turns(chosen, tick, say)

    def histories(self) -> list[History]:
        """The finished runs, in the order of `Recipe.variants`; variants that do not differ share their runs."""
        found = list(self.done.values())
        copies = [
            dataclasses.replace(each, side=name)
            for name, same in self.twins.items()
            for each in found
            if each.side == same
        ]
        order = list(self.recipe.variants())
        return sorted([*found, *copies], key=lambda each: (each.seed, each.stage == "final", order.index(each.side)))

    def pair(self, variant: Recipe) -> tuple[Run, Callable[[], Run]]:
        """A run for the agreement check, and a function that makes a run with the same weights and batches."""

        def make() -> Run:
            run = Run(variant, variant.seed, self.data)
            compete_in_turn(run.task.model)
            return run

        return make(), make

    def resume(self) -> None:
        """Continues from the checkpoint in `out`.

        Raises:
            ValueError: the checkpoint is missing or damaged, or belongs to a run with other settings or data.
        """
        assert self.checkpoint is not None
        state = checkpoint.load(self.checkpoint, ("settings", "done", "live"))
        expected = self._settings()
        with self._naming_checkpoint("its settings"):
            found = dict(state["settings"])
            differing = sorted(k for k in expected.keys() | found.keys() if expected.get(k) != found.get(k))
        if differing:
            listed = ", ".join(f"{k} {found.get(k)!r}, not {expected.get(k)!r}" for k in differing)
            raise ValueError(f"{self.checkpoint} belongs to a run with {listed}")
        with self._naming_checkpoint("its runs"):
            check_like("done and live", [{}, {}], [state["done"], state["live"]])
            self.done = {key: self._history(key, each) for key, each in state["done"].items()}
            self.restored = dict(state["live"])
        self.saved = True

    def _history(self, key: str, fields: dict[str, Any]) -> History:
        """The finished run `key` of a checkpoint; ValueError if its fields are none of a run of this comparison."""
        check_like(key, HISTORY, fields)
        found = History(**fields)
        found.terms = found.terms or [{} for _ in found.rows]
        check_rows(found.rows, found.terms, ("step", "epoch", "loss", "seconds", f"test {self.recipe.METRIC}"))
        names = {"final": f"{found.side}, seed {found.seed}", "tune": f"{found.side} at {found.lr:g}"}
        if found.side not in self.variants or names.get(found.stage) != key:
            raise ValueError(f"{key} has side {found.side}, seed {found.seed}, lr {found.lr:g}, stage {found.stage}")
        if not -len(found.rows) <= found.chosen < len(found.rows):
            raise ValueError(f"{key} has no row {found.chosen}")
        return found

    @contextmanager
    def _naming_checkpoint(self, part: str) -> Iterator[None]:
        """Turns errors from wrong contents of a checkpoint into a ValueError that names the file and the part."""
        try:
            yield
        except Exception as error:  # wrong contents raise errors of any kind
            first = str(error).strip().partition("\n")[0]
            raise ValueError(f"{self.checkpoint} does not fit, {part}: {type(error).__name__}: {first}") from error

    def _train_in_turns(
        self,
        runs: dict[str, tuple[str, Recipe, Splits, str]],
        tick: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        """Trains these runs in turns, so that a change in the machine's speed affects all of them.

        runs: key -> (side, recipe, data, stage "tune" or "final").
        """
        for key, (_, recipe, data, _) in runs.items():
            if key not in self.done:
                self.live[key] = self.make(recipe, recipe.seed, data)
                if key in self.restored:
                    with self._naming_checkpoint(key):
                        self.live[key].load_state(self.restored.pop(key))
        points, width = self._points(self.live.values()), max(map(len, runs))
        for point in points:
            for key, run in self.live.items():
                if (run.step < point or not run.rows) and not run.stopped:
                    run.advance(point, tick)
                    stops = "  stops: no better on the validation part" * run.stopped
                    say(_line(key.ljust(width), run.rows[-1]) + stops)
            if point < points[-1]:  # after the last one, the finished runs are saved below
                self._save()
        for key, (side, recipe, _, stage) in runs.items():
            if key in self.live:
                run = self.live[key]
                if self.out is not None and stage == "final":
                    self._write_model(self.out, side, key, run)
                self.done[key] = _history(side, recipe, stage, run)
        self.live = {}
        self._save()

    def _write_model(self, out: Path, side: str, key: str, run: Run) -> None:
        name, state = f"{side}-{run.seed}".replace(" ", "-"), chosen_state(run)
        self.on_first(lambda: save_model(out, name, run, state))
        if run.task.grid is not None:
            maps, path = token_maps(run), out / f"tokens-{name}.png"
            self.on_first(lambda: draw(path, maps, run.data.source.classes, f"tokens of {key}"))
        if run.task.dropped is not None:
            at = out / f"dropped-{name}.png"
            self.on_first(lambda: draw_dropped(at, run, f"patches that a low capacity drops, {key}"))

    def _points(self, runs: Iterable[Run]) -> list[int]:
        """Steps after which to evaluate: every `every` steps (0: every epoch), and the last step of each run."""
        points: set[int] = set()
        for run in runs:
            every = self.every or run.epoch_steps
            points.update(range(every, run.steps, every), {run.steps})
        return sorted(points)

    def _best_rate(self, name: str) -> float:
        sign = 1 if self.recipe.HIGHER_IS_BETTER else -1
        tried = [each for each in self.done.values() if each.side == name and each.stage == "tune"]
        scores = [sign * each.rows[-1][f"test {self.recipe.METRIC}"] for each in tried]
        return tried[max(range(len(tried)), key=lambda i: -math.inf if math.isnan(scores[i]) else scores[i])].lr

    def _settings(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self.recipe)
        del fields["data"]  # the same files may have another path
        return {
            **fields,
            "recipe": type(self.recipe).__name__,
            "seeds": len(self.seeds),
            "every": self.every,
            "training samples": len(self.data.train[0]),
            "test samples": len(self.data.test[0]),
            "dataset": self.data.source.name,
            "sources": self.sources,
        }

    def _save(self) -> None:
        if self.out is None or self.checkpoint is None:
            return
        out, path = self.out, self.checkpoint
        state = {
            "settings": self._settings(),
            "done": {key: dataclasses.asdict(each) for key, each in self.done.items()},
            "live": {key: run.state() for key, run in self.live.items()},
        }
        self.on_first(lambda: checkpoint.save(path, state))
        self.saved = True
        open_runs = [
            History(key, run.seed, run.recipe.lr, "running", run.rows, terms=run.terms)
            for key, run in self.live.items()
        ]
        self.on_first(lambda: checkpoint.write(out / "log.csv", log([*self.histories(), *open_runs], self.sources)))


def twins(variants: Mapping[str, Recipe]) -> dict[str, str]:
    """Variant -> an earlier one that trains the same: they differ only in options that their side does not use."""
    found: dict[str, str] = {}
    first: dict[Recipe, str] = {}
    for name, variant in variants.items():
        unused: dict[str, Any] = dict.fromkeys(variant.UNUSED.get(variant.side, ()), 0)
        same = first.setdefault(dataclasses.replace(variant, **unused), name)
        if same != name:
            found[name] = same
    return found


def _history(side: str, recipe: Recipe, stage: str, run: Run) -> History:
    return History(
        side,
        run.seed,
        recipe.lr,
        stage,
        run.rows,
        run.flops(),
        run.setup_seconds,
        run.parameters,
        flops_known=run.flops(known=True),
        unit=run.unit,
        chosen=run.chosen,
        terms=run.terms,
    )


def parts(data: Splits, recipe: Recipe) -> Splits:
    """The parts of the data that a run uses. Test and validation set have at most `eval_rows` samples.

    Only choose="best" and `patience` use a validation set; without both it is None. If the data have none, a tenth of
    the training set is taken, unless there are fewer than 10 training samples. eval_rows 0 stands for the number of
    training samples.
    """
    validate = recipe.choose == "best" or recipe.patience > 0
    if validate and data.valid is None and len(data.train[0]) >= 10:
        valid = _held_out(data, recipe.seed)
        data = Splits(data.source, valid.train, data.test, valid.test)
    limit = recipe.eval_rows or len(data.train[0])
    test, valid_part = (None if part is None else _subset(part, limit) for part in (data.test, data.valid))
    assert test is not None
    return data._replace(test=test, valid=valid_part if validate else None)


def _subset(part: tuple[torch.Tensor, ...], limit: int) -> tuple[torch.Tensor, ...]:
    """A fixed random choice of at most `limit` samples, in their original order."""
    if len(part[0]) <= limit:
        return part
    rows = torch.randperm(len(part[0]), generator=torch.Generator().manual_seed(0))[:limit].sort().values
    return tuple(each.index_select(0, rows.to(each.device)) for each in part)


def _held_out(data: Splits, seed: int) -> Splits:
    """Splits of the training set: a random tenth, rounded down, is the test set, and the rest trains."""
    n = len(data.train[0])
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).to(data.train[0].device)
    test, train = order[: n // 10], order[n // 10 :]
    return Splits(data.source, *(tuple(t.index_select(0, rows) for t in data.train) for rows in (train, test)))


def _line(key: str, row: Row) -> str:
    shown = [name for name in row if name in LOSSES or name.startswith(("valid ", "test "))]
    if "task" in row or "text" in row:  # the loss with regularisers is only in the log
        shown.remove("loss")
    numbers = [f"{name} {row[name]:.4f}" for name in shown if not (name in LOSSES and math.isnan(row[name]))]
    speed = "" if math.isnan(row["seconds"]) else f"  {row['seconds'] * 1e3:.2f} ms/step"
    return f"step {row['step']:>6.0f}  {key}  {'  '.join(numbers)}{speed}"
