"""COMET trees: gates and local search on MovieLens, two tasks, 16 experts (Table 1).

The paper trains on 200,000 rows for 10 epochs, Adam at 2.5e-5, batches of 512, task weights 0.9 (watched, binary
cross-entropy) and 0.1 (rating, squared error over the rows that have one). Sides with "+" learn a permutation of the
experts for 5 epochs. "+untrained" is their control: the scores of the permutation are random and fixed. The paper's
training rows are not public: without movielens_train.csv, the validation rows of the paper's files are the training
set. Parameters start, and Adam's epsilon is, as in the paper's code, which leaves both to Keras. The defaults are
those of Table 1. For Table 2: --epochs 100 --choose best --patience 25; its random search is `python -m moe_kernels
study search`. Jester and Books train too (--embedding 64 --width 128, Books --experts 9 --k 4). The defaults take some
10 minutes of a CPU core, with --rows 10000 less than one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.nn.experts import ExpertLayer
from moe_kernels.nn.gates import DSelectKGate, Gate, HashGate, SoftmaxGate, TopKGate, TreeGate
from moe_kernels.nn.local_search import SCHEDULES, LocalSearch
from moe_kernels.papers.data import Ratings
from moe_kernels.papers.models.mmoe import MMoE, keras_init_
from moe_kernels.papers.recipes import Batch, Evaluation, Recipe, Routing, Splits, Task, option, total_loss

GATES = ("softmax", "hash", "topk", "dselect", "comet")
SIDES = tuple(gate + plus for gate in GATES for plus in ("", "+", "+untrained"))


def _unused(side: str) -> tuple[str, ...]:
    """The swept options that do not affect a side."""
    gate, plus, _ = side.partition("+")
    trees = () if gate in ("dselect", "comet") else ("gamma", "entropy")
    return (*trees, *(() if gate in ("topk", "dselect", "comet") else ("k",)), *(() if plus else ("zeta",)))


@dataclass(frozen=True)
class MovieLens(Recipe):
    """Sides: softmax, hash, topk, dselect and comet, each alone, with "+" and with "+untrained"."""

    SIDES: ClassVar[tuple[str, ...]] = SIDES
    ACCEPTS: ClassVar[type] = Ratings
    METRIC: ClassVar[str] = "loss"
    HIGHER_IS_BETTER: ClassVar[bool] = False
    UNUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {side: _unused(side) for side in SIDES}

    data: str = option("", "folder with MovieLens (ratings.dat or movielens_*.csv), or a file of Jester or Books")
    sides: tuple[str, ...] = option(("hash", "topk", "comet"), "gates to compare, with local search or without")
    rows: int = option(200_000, "training rows, a fixed random choice; 0: all", low=0)
    experts: int = option(16, "experts that the tasks share", low=2, sweep=True)
    k: int = option(2, "choices of topk, selectors of dselect, trees of comet", low=1, sweep=True)
    gamma: float = option(0.01, "width of the smooth step", low=0, sweep=True)
    entropy: float = option(1.0, "lambda, weight of the entropy of comet and dselect", low=0, sweep=True)
    zeta: float = option(1e-5, "weight of the entropies of the permutation", low=0, sweep=True)
    search_epochs: int = option(5, "epochs that learn the permutation", low=0)
    schedule: str = option("paper", "schedule of the permutation's temperature", choices=SCHEDULES)
    watched_weight: float = option(
        0.9, "alpha: weight of task watched; task rating has 1 - alpha", low=0, high=1, sweep=True
    )
    route: bool = option(
        True,
        "comet: in evaluation, compute only the nodes on a token's path if every token takes one path in every tree",
    )
    embedding: int = option(128, "features of a user and of a movie; Books and Jester: 64", low=1)
    width: int = option(256, "width of an expert; Books and Jester: 128", low=1)
    dropout: float = option(0.5, "dropout of an expert's output", low=0, high=1)
    init: str = option(
        "keras",
        "initial parameters and Adam's epsilon: keras (Glorot, biases 0; 1e-7), as in the paper's code; torch (1e-8)",
        choices=("keras", "torch"),
    )
    batch_size: int = option(512, "samples of a step", low=1)
    lr: float = option(2.5e-5, "learning rate of Adam", low=0)
    check_steps: int = option(1, "steps of the agreement check of fast and reference backend; 0: none", low=0)

    def splits(self, data: Any) -> Splits:
        chosen = torch.randperm(len(data.train[0]), generator=torch.Generator().manual_seed(0))
        chosen = chosen[: self.rows or None].to(data.train[0].device)
        return Splits(data, tuple(column[chosen] for column in data.train), data.test)

    def columns(self) -> tuple[str, ...]:
        return "test watched loss", "test watched accuracy", "test watched AUC", "test rating error"

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return batch.tensors[:2]

    def build(self, data: Splits, seed: int, steps: int) -> Task:
        users = data.train[0]
        gate, plus, control = self.side.partition("+")
        experts = ExpertLayer(self.experts, 2 * self.embedding, self.width, activation="relu", dropout=self.dropout)
        search = None
        if plus:
            epoch = math.ceil(len(users) / self.batch_size)
            search = LocalSearch(
                self.experts,
                self.search_epochs * epoch,
                zeta=self.zeta,
                renormalise=gate != "dselect",
                schedule=self.schedule,
            )
            if control:
                search.scores.requires_grad_(False)
        first, second = (self._gate(gate, data.source.num_users) for _ in range(2))
        gates = (first, first if gate == "hash" else second)  # hash: both tasks give a user the same expert
        sizes = (data.source.num_users, data.source.num_movies)
        model = MMoE(*sizes, gates, experts, search, embedding=self.embedding, width=self.width)
        keras = self.init == "keras"
        if keras:
            keras_init_(model)
        model.to(users.device)

        def loss(batch: Batch) -> dict[str, Tensor]:
            watched, rating, out = model(*batch.tensors[:2])
            return total_loss(self._task_loss(watched, rating, *batch.tensors[2:]), out.losses)

        def evaluate(batch: Batch) -> Evaluation:
            watched, rating, out = model(*batch.tensors[:2])
            truth, stars = batch.tensors[2:]
            size, rated = len(truth), stars != 0
            measures: dict[str, tuple[Tensor, Tensor | float]] = {
                "watched loss": (F.binary_cross_entropy_with_logits(watched, truth, reduction="sum"), size),
                "watched accuracy": (((watched > 0) == (truth > 0.5)).sum(), size),
                "rating error": ((torch.where(rated, rating - stars, 0) ** 2).sum(), rated.sum()),
            }
            found = (out.statistics["task0.gates"], out.statistics["task1.gates"])
            ranked = {"watched AUC": (watched, truth > 0.5)}
            return Evaluation(measures, [Routing(gates > 1e-5, gates) for gates in found], ranked)

        def total(measures: dict[str, float]) -> dict[str, float]:
            return {"loss": self._weighed(measures["watched loss"], measures["rating error"])}

        optimiser = torch.optim.Adam(model.parameters(), self.lr, eps=1e-7 if keras else 1e-8, fused=True)
        return Task(model, optimiser, loss, evaluate, predict=lambda *ids: model(*ids)[:2], total=total)

    def _task_loss(self, watched: Tensor, rating: Tensor, truth: Tensor, stars: Tensor) -> Tensor:
        rated = stars != 0
        error = torch.where(rated, rating - stars, 0).square().sum() / rated.sum().clamp(min=1)
        entropy = F.binary_cross_entropy_with_logits(watched, truth)
        return self._weighed(entropy, error)

    def _weighed(self, entropy: Any, error: Any) -> Any:
        return self.watched_weight * entropy + (1 - self.watched_weight) * error

    def _gate(self, name: str, num_users: int) -> Gate:
        size = 2 * self.embedding, self.experts
        if name == "softmax":
            return SoftmaxGate(*size)
        if name == "hash":
            return HashGate(num_users, self.experts)
        if name == "topk":
            return TopKGate(*size, self.k)
        if name == "dselect":
            return DSelectKGate(*size, self.k, gamma=self.gamma, entropy=self.entropy)
        return TreeGate(*size, self.k, gamma=self.gamma, entropy=self.entropy, route=self.route)
