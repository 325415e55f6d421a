"""COMET trees, sections 5.1.2 and 5.1.3, Figures 2 and 3: how many random trials does the tuning of a gate take?

Every trial draws its hyperparameters from the paper's grid for MovieLens (supplement S1.3): the learning rate
log-uniform in [5e-5, 5e-4], the smooth step's gamma from {0.01, 0.1, 1, 5, 10} (always 10 for COMET with local search),
lambda of the entropy loss from {0.05, 0.1, 0.5, 1, 5, 10}, and 1 to 10 epochs of permutation learning. By default a
trial trains for at most 100 epochs, stops after 25 epochs without a better validation loss, and keeps the best
evaluation. The paper's Table 2 and the printed table have the mean test loss of the best 5 % of the trials by
validation loss. The bootstrap (appendix F) draws s different trials and takes the test loss of the one with the best
validation loss; its result is the mean of --draws such draws, for s up to half of the trials and at most 250.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from moe_kernels import info
from moe_kernels.papers.data import Ratings
from moe_kernels.papers.recipes.movielens import MovieLens
from moe_kernels.papers.studies import Study, line_of, option
from moe_kernels.papers.train import checkpoint
from moe_kernels.papers.train.comparison import parts
from moe_kernels.papers.train.loop import Run
from moe_kernels.papers.train.plotting import write_picture
from moe_kernels.papers.train.report import mean_and_spread, with_spread

GAMMAS, LAMBDAS, RATES = (0.01, 0.1, 1.0, 5.0, 10.0), (0.05, 0.1, 0.5, 1.0, 5.0, 10.0), (5e-5, 5e-4)


@dataclass(frozen=True)
class Search(Study):
    SIDES: ClassVar[tuple[str, ...]] = tuple(side for side in MovieLens.SIDES if "untrained" not in side)

    data: str = option("", "folder with MovieLens: ratings.dat or movielens_*.csv")
    sides: tuple[str, ...] = option(("hash", "topk", "comet"), "gates to tune")
    trials: int = option(20, "random trials of a gate; the paper: 500", low=1)
    rows: int = option(0, "training rows, a fixed random choice; 0: all", low=0)
    eval_rows: int = option(0, "largest number of validation and of test rows; 0: as many as training rows", low=0)
    epochs: int = option(100, "largest number of passes over the rows", low=1)
    patience: int = option(25, "a trial stops after so many epochs without a better validation loss", low=1)
    alpha: float = option(0.9, "weight of task 'watched' in the loss; the paper: 0.1 and 0.9", low=0, high=1)
    draws: int = option(1000, "draws of the bootstrap", low=1)

    def run(self, out: Path | None) -> None:
        data = self.load(self.data, Ratings)
        rows: list[dict[str, Any]] = []
        for trial in range(self.trials):  # gates in turn, so that an interrupted search has trials of all
            for side in self.sides:
                rows.append(self._trial(data, side, trial))
                print(line_of(rows[-1]), flush=True)
                if out is not None:
                    self.write_rows(out, rows)
        curves = {side: bootstrap([row for row in rows if row["side"] == side], self.draws) for side in self.sides}
        print(f"\n{_table(rows, curves)}")
        print("Test loss: mean ± standard error over the best 5 % of the trials by validation loss, at least one.")
        if out is not None:
            text = "side,trials,test loss\n" + "".join(
                f"{side},{size},{loss}\n" for side, curve in curves.items() for size, loss in curve.items()
            )
            checkpoint.write(out / "bootstrap.csv", text)
            _draw(out / "search.png", curves)

    def _trial(self, data: Ratings, side: str, trial: int) -> dict[str, Any]:
        number = MovieLens.SIDES.index(side)
        draw = torch.Generator().manual_seed((self.seed * 1000 + trial) * 100 + number)

        def one_of(values: Sequence[float]) -> float:
            return values[int(torch.randint(len(values), (), generator=draw))]

        low, high = (math.log(rate) for rate in RATES)
        lr = math.exp(low + (high - low) * torch.rand((), generator=draw).item())
        gamma, entropy = 10.0 if side == "comet+" else one_of(GAMMAS), one_of(LAMBDAS)
        recipe = MovieLens(
            sides=(side,),
            rows=self.rows,
            eval_rows=self.eval_rows,
            epochs=self.epochs,
            patience=self.patience,
            choose="best",
            watched_weight=self.alpha,
            lr=lr,
            gamma=gamma,
            entropy=entropy,
            search_epochs=int(one_of(range(1, 11))),
            zeta=1e-4,
            seed=self.seed + trial,
        )
        run = Run(recipe, recipe.seed, parts(recipe.splits(data), recipe))
        while run.step < run.steps and not run.stopped:
            run.advance(min(run.step + run.epoch_steps, run.steps))
        best = run.rows[run.chosen]
        drawn = {"lr": lr, "gamma": gamma, "lambda": entropy, "search epochs": recipe.search_epochs}
        found = {"valid loss": best["valid loss"], "test loss": best["test loss"], "experts": best["experts"]}
        return {"side": side, "trial": trial, **drawn, "epochs": len(run.rows), **found}


def bootstrap(rows: Sequence[dict[str, Any]], draws: int) -> dict[int, float]:
    """s -> mean over `draws` draws of s different trials: the test loss of the trial with the least validation loss."""
    valid, test = (torch.tensor([row[name] for row in rows]) for name in ("valid loss", "test loss"))
    generator = torch.Generator().manual_seed(0)
    sizes = [size for size in (1, 2, *range(5, 251, 5)) if size <= max(len(rows) // 2, 1)]
    found = {}
    for size in sizes:
        chosen = torch.stack([torch.randperm(len(rows), generator=generator)[:size] for _ in range(draws)])
        best = chosen.gather(1, valid[chosen].argmin(1, keepdim=True))[:, 0]
        found[size] = test[best].mean().item()
    return found


def _table(rows: Sequence[dict[str, Any]], curves: dict[str, dict[int, float]]) -> str:
    sizes = list(next(iter(curves.values())))
    lines = []
    for side, curve in curves.items():
        trials = sorted((row for row in rows if row["side"] == side), key=lambda row: row["valid loss"])
        best = [row["test loss"] for row in trials[: max(len(trials) // 20, 1)]]
        mean, spread = mean_and_spread(best)
        error = with_spread((mean, spread / math.sqrt(len(best))))
        lines.append((side, len(trials), error, *(f"{curve[size]:.4f}" for size in sizes)))
    return info.table(("gate", "trials", "test loss", *(f"best of {size}" for size in sizes)), lines)


def _draw(path: Path, curves: dict[str, dict[int, float]]) -> None:
    def draw(axes: Any) -> None:
        for side, curve in curves.items():
            axes[0, 0].plot(list(curve), list(curve.values()), marker="o", label=side)
        axes[0, 0].set(xlabel="random trials", ylabel="test loss of the best by validation", xscale="log")
        axes[0, 0].legend(fontsize="small")

    write_picture(path, draw, figsize=(7, 4.5))
