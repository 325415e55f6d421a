"""COMET trees, section 4.4: how much can a permutation of the experts gain? This study goes beyond the paper.

With hash routing every user has one expert. For fixed weights, the training loss is then a sum over groups of users
with the same expert. The paper's local search is to find the permutation of the experts with the lowest training loss;
here a linear assignment finds it exactly. The study trains on MovieLens, permutes the experts before the first step or
later, and continues. Arms:

* none: no permutation.
* random: one random permutation, as a control. best: the permutation with the lowest training loss.
* paper, wide: local search with LocalSearch's schedule "paper" or "wide".
* untrained: as wide, but the scores from which the permutation is computed stay random.

Columns of the table:

* for arms random and best: the training loss before and after, and its mean and minimum over all permutations;
* for every arm: the loss at the end, on at most 50,000 test rows;
* for arms paper, wide and untrained: LocalSearch.distance, from the last soft permutation to the hard one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels import info
from moe_kernels.nn.gates import HashGate
from moe_kernels.ops.harden import harden
from moe_kernels.papers.data import Ratings
from moe_kernels.papers.recipes.movielens import MovieLens
from moe_kernels.papers.studies import Study, line_of, option
from moe_kernels.papers.train.loop import Run
from moe_kernels.papers.train.plotting import write_picture
from moe_kernels.papers.train.report import mean_and_spread, with_spread

ARMS = ("none", "random", "best", "paper", "wide", "untrained")


@dataclass(frozen=True)
class Permutation(Study):
    data: str = option("", "folder with MovieLens: ratings.dat or movielens_*.csv")
    arms: tuple[str, ...] = option(ARMS, "arms to compare", choices=ARMS)
    rows: int = option(20_000, "training rows; the paper: 200,000", low=1)
    epochs: int = option(10, "passes over the rows; local search learns in the first half, as in the paper", low=2)
    lr: float = option(2.5e-4, "learning rate of Adam; the paper: 2.5e-5, on ten times as many rows", low=0)
    at: tuple[int, ...] = option((0, 1), "epochs before the permutation of arms random and best; a run for each", low=0)
    seeds: int = option(3, "seeds of each arm", low=1)
    experts: int = option(16, "experts that users are hashed to", low=2)

    def run(self, out: Path | None) -> None:
        data = self.load(self.data, Ratings)
        rows = []
        for arm in self.arms:
            for epoch in self.at if arm in ("random", "best") else (-1,):
                for seed in range(self.seed, self.seed + self.seeds):
                    rows.append(self._arm(data, arm, epoch, seed))
                    print(line_of(rows[-1]), flush=True)
        print(f"\n{_table(rows)}")
        print("Training losses: of all training rows, at the permutation. Mean ± standard deviation over seeds.")
        if out is not None:
            self.write_rows(out, rows)
            _draw(out / "permutation.png", rows)

    def _arm(self, data: Ratings, arm: str, epoch: int, seed: int) -> dict[str, Any]:
        side = {"paper": "hash+", "wide": "hash+", "untrained": "hash+untrained"}.get(arm, "hash")
        recipe = MovieLens(
            sides=(side,),
            rows=self.rows,
            epochs=self.epochs,
            search_epochs=self.epochs // 2,
            schedule="wide" if arm in ("wide", "untrained") else "paper",
            lr=self.lr,
            experts=self.experts,
            init="torch",  # as in the committed result
            seed=seed,
        )
        splits = recipe.splits(data)
        limit = min(len(splits.test[0]), 50_000)
        run = Run(recipe, seed, splits._replace(test=tuple(each[:limit] for each in splits.test)))
        row: dict[str, Any] = {"arm": arm, "after epoch": epoch, "seed": seed}
        row |= dict.fromkeys(("before", "mean of all", "best of all", "after", "distance", "moved"), math.nan)
        if epoch >= 0:
            run.advance(epoch * run.epoch_steps)
            row |= self._permute(run, arm, seed)
        run.advance(run.steps)
        moe: Any = run.task.model.moe
        search = moe.search
        if search is not None:
            row["distance"] = search.distance.item()
            row["moved"] = int((search.source != torch.arange(self.experts)).sum())
        last = run.rows[-1]
        return row | {"test loss": last["test loss"], "test watched accuracy": last["test watched accuracy"]}

    def _permute(self, run: Run, arm: str, seed: int) -> dict[str, float]:
        moe: Any = run.task.model.moe
        gate = moe.gates[0]
        cost = costs(run, gate)
        count = len(run.data.train[0])
        identity = cost.diagonal().sum().item() / count
        best = harden(-cost[None])[0]
        generator = torch.Generator().manual_seed(seed)
        chosen = best if arm == "best" else torch.randperm(self.experts, generator=generator)
        after = cost.gather(1, chosen[:, None]).sum().item() / count
        gate.load_state_dict({"table": chosen.to(torch.int32)[gate.table.long()]})
        return {
            "before": identity,
            "mean of all": cost.mean().item() * self.experts / count,
            "best of all": cost.gather(1, best[:, None]).sum().item() / count,
            "after": after,
        }


@torch.no_grad()
def costs(run: Run, gate: HashGate) -> Tensor:
    """(E, E) float64: at i, j the summed loss of the training rows with users of expert i, if expert j gets them."""
    users, movies, truth, stars = run.data.train
    table, recipe = gate.table.clone(), run.recipe
    assert isinstance(recipe, MovieLens)
    rated = stars != 0
    scale = len(stars) / rated.sum().clamp(min=1)  # callers divide by all rows; the mean error is over rated ones
    cost = torch.zeros(gate.num_experts, gate.num_experts, dtype=torch.float64)
    run.task.model.eval()
    for expert in range(gate.num_experts):
        gate.load_state_dict({"table": torch.full_like(table, expert)})
        for start in range(0, len(users), 4096):
            part = slice(start, start + 4096)
            watched, rating, _ = run.task.model(users[part], movies[part])
            entropy = F.binary_cross_entropy_with_logits(watched, truth[part], reduction="none")
            error = torch.where(rated[part], rating - stars[part], 0).square() * scale
            loss = recipe.watched_weight * entropy + (1 - recipe.watched_weight) * error
            cost[:, expert].index_add_(0, table[users[part]].long(), loss.double())
    gate.load_state_dict({"table": table})
    run.task.model.train()
    return cost


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for key in dict.fromkeys((row["arm"], row["after epoch"]) for row in rows):
        runs = [row for row in rows if (row["arm"], row["after epoch"]) == key]
        label = key[0] if key[1] < 0 else f"{key[0]} after epoch {key[1]}"
        names = ("before", "mean of all", "best of all", "after", "test loss", "distance")
        lines.append((label, *(with_spread(mean_and_spread([row[name] for row in runs])) for name in names)))
    header = ("arm", "training loss before", "mean of all", "best of all", "after", "test loss at the end", "distance")
    return info.table(header, lines)


def _draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    labels = [row["arm"] if row["after epoch"] < 0 else f"{row['arm']}\nepoch {row['after epoch']}" for row in rows]

    def draw(axes: Any) -> None:
        for row, label in zip(rows, labels, strict=True):
            axes[0, 0].plot(label, row["test loss"], "o", color=f"C{row['seed'] % 10}")
        axes[0, 0].set(ylabel="test loss at the end", title="a colour is a seed")

    write_picture(path, draw, figsize=(8, 4.5))
