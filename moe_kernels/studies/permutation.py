"""Paper 001, section 4.4: what is there to find for a permutation of the experts? A step beyond the paper.

With hash routing every user has one expert, so that the loss of a batch is a sum over the 16 groups of users, and the
best permutation of the experts at any moment is a linear assignment: the exact optimum of what the local search looks
for, on the training rows. The study trains on MovieLens and, at the first step or later, gives the experts to the
groups by the best permutation, or by a random one (the control), and trains on. Beside them: no permutation, the search
as the paper has it, the search whose temperatures start where scores are soft and end in a permutation (wide), and the
same schedule with a U that never learns (untrained).

Printed for every arm: the training loss before and after the permutation, that of the mean and of the best of all 16!,
the test loss at the end, and for the searches how far the last soft matrix was from a permutation.
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
from moe_kernels.data import Ratings, load
from moe_kernels.nn.gates import HashGate
from moe_kernels.ops.harden import harden
from moe_kernels.recipes.movielens import MovieLens
from moe_kernels.studies import Study, option, write_rows
from moe_kernels.train.loop import Run
from moe_kernels.train.plotting import plotting, save

ARMS = ("none", "random", "best", "paper", "wide", "untrained")


@dataclass(frozen=True)
class Permutation(Study):
    """The study's options."""

    data: str = option("", "folder with MovieLens, as ratings.dat or prepared")
    arms: tuple[str, ...] = option(ARMS, "what to compare", choices=ARMS)
    rows: int = option(20_000, "training rows; the paper: 200,000", low=1)
    epochs: int = option(10, "passes over them; the search takes the first half, as in the paper", low=2)
    lr: float = option(2.5e-4, "learning rate of Adam; the paper: 2.5e-5, on ten times as many rows", low=0)
    at: tuple[int, ...] = option((0, 1), "epochs after which random and best permute", low=0)
    seeds: int = option(3, "of everything", low=1)
    experts: int = option(16, "that users are hashed to", low=2)

    def run(self, out: Path | None) -> None:
        data = load(self.data)
        if not isinstance(data, Ratings):
            raise ValueError(f"permutation: expected MovieLens, {self.data} has {data.name}")
        rows = []
        for arm in self.arms:
            for epoch in self.at if arm in ("random", "best") else (-1,):
                for seed in range(self.seed, self.seed + self.seeds):
                    rows.append(self._arm(data, arm, epoch, seed))
                    print(info_line(rows[-1]), flush=True)
        print(f"\n{_table(rows)}")
        print("Loss of training: of all rows at the permutation. Means ± spread over the seeds.")
        if out is not None:
            write_rows(out / "permutation.csv", rows)
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
    """(E, E) float64: the summed loss of group i's training rows, were expert j theirs."""
    users, movies, truth, stars = run.data.train
    table, recipe = gate.table.clone(), run.recipe
    assert isinstance(recipe, MovieLens)
    rated = stars > 0
    scale = len(stars) / rated.sum().clamp(min=1)
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


def info_line(row: dict[str, Any]) -> str:
    """One arm of one seed."""
    return ", ".join(f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if v == v)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for key in dict.fromkeys((row["arm"], row["after epoch"]) for row in rows):
        mine = [row for row in rows if (row["arm"], row["after epoch"]) == key]
        label = key[0] if key[1] < 0 else f"{key[0]} after epoch {key[1]}"
        names = ("before", "mean of all", "best of all", "after", "test loss", "distance")
        lines.append((label, *(_spread([row[name] for row in mine]) for name in names)))
    header = ("arm", "training loss before", "mean of all", "best of all", "after", "test loss at the end", "distance")
    return info.table(header, lines)


def _spread(values: list[float]) -> str:
    mean = sum(values) / len(values)
    if math.isnan(mean):
        return "-"
    if len(values) == 1:
        return f"{mean:.4f}"
    return f"{mean:.4f} ± {math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)):.4f}"


def _draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    pyplot = plotting()
    if pyplot is None:
        return
    canvas, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    labels = [row["arm"] if row["after epoch"] < 0 else f"{row['arm']}\nepoch {row['after epoch']}" for row in rows]
    for row, label in zip(rows, labels, strict=True):
        axis.plot(label, row["test loss"], "o", color=f"C{row['seed'] % 10}")
    axis.set(ylabel="test loss at the end", title="a colour is a seed")
    save(canvas, path)
