"""MoEBERT's way to experts, with the gates of paper 001: train dense, split by importance, distil layer by layer.

The paper splits a fine-tuned BERT for GLUE (12 layers, 3072 neurons into 4 experts of 768, of which 512 are common).
No pretrained weights are to be had, so a small GPT is trained on text first, then split in the same proportions, and
its dense self is the teacher of what follows. Controls: "dense" trains on instead, "small" keeps the most important
neurons of every layer and has no experts, "unguided" splits at random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels.models.moe import MoEGPT
from moe_kernels.models.transformer import Block, FeedForward
from moe_kernels.nn import schedules
from moe_kernels.nn.experts import ExpertMLP
from moe_kernels.nn.gates import Gate, HashGate, PermutedGate, TopKGate, TreeGate
from moe_kernels.nn.local_search import LocalSearch
from moe_kernels.nn.moe import MoE, MoEOutput
from moe_kernels.nn.policies import NonzeroWeights
from moe_kernels.nn.split import NeuronImportance, distillation_loss, split_ffn
from moe_kernels.recipes import Batch, Evaluation, Splits, Task, option, total_loss
from moe_kernels.recipes._routers import regularisers, watched_routers
from moe_kernels.recipes._text import TextRecipe, bits, characters

GATES = ("hash", "topk", "comet")
Part = TypeVar("Part", bound=nn.Module)


@dataclass(frozen=True)
class MoEBERT(TextRecipe):
    """Sides: dense, small, unguided; hash, balanced (hash by frequency), topk and comet; hash+, topk+ and comet+."""

    SIDES: ClassVar[tuple[str, ...]] = (
        *("dense", "small", "unguided", "balanced"),
        *(gate + plus for gate in GATES for plus in ("", "+")),
    )

    sides: tuple[str, ...] = option(("dense", "small", "unguided", "hash", "comet"), "gates and controls to compare")
    steps: int = option(1600, "steps instead of epochs; 0: epochs", low=0)
    dense_share: float = option(0.5, "of the steps, before the split", low=0, high=1)
    windows: int = option(256, "of the training text, to tell the importance of neurons by", low=1)
    dim: int = option(128, "width of the model; BERT: 768", low=1)
    hidden: int = option(512, "neurons of a dense feed-forward layer; BERT: 3072", low=1)
    depth: int = option(4, "blocks; BERT: 12", low=1)
    heads: int = option(4, "of attention; BERT: 12", low=1)
    experts: int = option(4, "of a layer", low=2, sweep=True)
    expert_hidden: int = option(128, "neurons of an expert; the paper: 768", low=1)
    share: int = option(85, "most important neurons, which all experts have; the paper: 512", low=0)
    k: int = option(1, "trees of the tree gate; the paper's BERT: 1", low=1, sweep=True)
    route: bool = option(
        True, "evaluate saturated trees by a descent from their roots: O(k p log n) instead of O(k p n)"
    )
    gamma: float = option(0.01, "width of the smooth step", low=0, sweep=True)
    entropy: float = option(1.0, "lambda, weight of the entropy of the tree gate", low=0, sweep=True)
    zeta: float = option(1e-5, "weight of the entropies of the permutation", low=0)
    balance: float = option(0.01, "weight of the balance loss of topk", low=0)
    distill: float = option(5.0, "weight of the distillation", low=0, sweep=True)
    model_dropout: float = option(0.1, "of embeddings and feed-forward layers", low=0, high=1)
    batch_size: int = option(16, "windows a step", low=1)
    lr: float = option(
        7e-4, "learning rate of Adam, after a tenth of the steps of warm-up; fine-tuning BERT: 5e-5", low=0
    )

    def build(self, data: Splits, seed: int, steps: int) -> Task:
        most = min(self.hidden, self.expert_hidden)
        if self.share > most:  # which the split would see, after half of the steps
            raise ValueError(
                f"moebert: share must be at most {most}, the least of hidden and expert-hidden; got {self.share}"
            )
        windows, split_at = data.train[0], int(self.dense_share * steps)
        counts = windows[:, :-1].flatten().bincount(minlength=len(data.source.vocabulary))
        teacher = self._model(len(counts), lambda index: None)
        student = None
        if self.side != "dense":
            student = self._model(len(counts), lambda index: self._layer(counts, steps - split_at))
        pair = Pair(teacher, student, self.share).to(windows.device)

        def loss(batch: Batch) -> dict[str, Tensor]:
            x, y = characters(batch)
            states: list[Tensor] = []
            logits, outputs = pair(x, states)
            text = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            if not pair.split:
                return total_loss(text, {}, "text")
            wanted: list[Tensor] = []
            with torch.no_grad():
                told, _ = teacher(x, wanted)
            distilled = distillation_loss(states, wanted, logits.flatten(0, 1), told.flatten(0, 1))
            return total_loss(text, regularisers(outputs) | {"distilled": self.distill * distilled}, "text")

        def evaluate(batch: Batch) -> Evaluation:
            x, y = characters(batch)
            with watched_routers(pair) as routers:
                logits, outputs = pair(x)
            return Evaluation(bits(logits, y), routers.routing(outputs))

        def before_step(step: int) -> None:
            if student is None or step < split_at:
                return
            if step == split_at:
                if self.side == "unguided":
                    found = [torch.rand(self.hidden, device=windows.device) for _ in range(self.depth)]
                else:
                    found = importance(teacher, windows[: self.windows].split(self.eval_batch))
                pair.fill(found)
            pair.begin()

        return Task(
            pair,
            torch.optim.Adam(pair.parameters(), self.lr, fused=True),
            loss,
            evaluate,
            predict=lambda x: pair(x)[0],
            schedule=schedules.warmup(max(steps // 10, 1)),
            before_step=before_step,
            clip=1.0,
        )

    def _model(self, vocabulary: int, layer: Callable[[int], MoE | None]) -> MoEGPT:
        return MoEGPT(
            vocabulary,
            self.length,
            layer,
            dim=self.dim,
            depth=self.depth,
            heads=self.heads,
            hidden=self.hidden,
            activation="gelu",
            dropout=self.model_dropout,
        )

    def _layer(self, counts: Tensor, steps: int) -> MoE:
        """A layer of the student, which trains for `steps` steps; tokens occur `counts` times."""
        kind, plus, _ = self.side.partition("+")
        count = 1 if kind == "small" else self.experts
        experts = ExpertMLP(count, self.dim, self.expert_hidden, bias=True, dropout=self.model_dropout)
        if kind == "topk":
            gate: Gate = TopKGate(self.dim, count, 1, order="softmax_topk", balance=self.balance)
        elif kind == "comet":
            gate = TreeGate(self.dim, count, self.k, gamma=self.gamma, entropy=self.entropy, route=self.route)
        else:
            gate = HashGate(len(counts), count, frequencies=counts if kind == "balanced" else None)
        if plus:  # renormalised, a single choice would have weight 1, and topk's gate no gradient
            gate = PermutedGate(gate, LocalSearch(count, steps // 2, zeta=self.zeta, renormalise=kind != "topk"))
        return MoE(gate, experts, NonzeroWeights() if plus or kind == "comet" else None)


class Pair(nn.Module):
    """A dense model and the one with experts that it becomes; the second speaks once the first has been split.

    share: neurons that all experts of a layer have.
    """

    def __init__(self, teacher: MoEGPT, student: MoEGPT | None, share: int) -> None:
        super().__init__()
        self.teacher, self.student, self.share, self.split = teacher, student, share, False

    def forward(self, x: Tensor, states: list[Tensor] | None = None) -> tuple[Tensor, list[MoEOutput]]:
        return self.student(x, states) if self.student is not None and self.split else self.teacher(x, states)

    def begin(self) -> None:
        """From now on the student trains, and the teacher is what it was."""
        self.split = True
        self.teacher.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Pair:
        super().train(mode)
        if self.split:
            self.teacher.eval()
        return self

    @torch.no_grad()
    def fill(self, values: list[Tensor]) -> None:
        """The student becomes the teacher with its feed-forward layers split: `values` (hidden) of each's neurons."""
        assert self.student is not None
        for name in ("tokens", "blocks.norm"):
            _copy(self.teacher, self.student, name)
        assert self.student.positions is not None
        assert self.teacher.positions is not None
        self.student.positions.copy_(self.teacher.positions)
        for other, own in zip(_all(self.teacher, Block), _all(self.student, Block), strict=True):
            for name in ("norm_attention", "qkv", "project", "norm_ffn"):
                _copy(other, own, name)
        layers = zip(_all(self.teacher, FeedForward), _all(self.student, ExpertMLP), values, strict=True)
        for ffn, experts, each in layers:
            hidden = experts.w_in.shape[2]
            split = split_ffn(ffn.fc1, ffn.fc2, each, experts.num_experts, hidden, self.share, ffn.activation)
            experts.load_state_dict(split.state_dict())

    def get_extra_state(self) -> dict[str, bool]:
        return {"split": self.split}

    def set_extra_state(self, state: dict[str, bool]) -> None:
        self.split = state["split"]
        self.teacher.requires_grad_(not self.split)


def importance(teacher: MoEGPT, batches: Sequence[Tensor]) -> list[Tensor]:
    """Importance (hidden) of the neurons of every block; a window's loss is the mean over its characters."""
    was_training = teacher.training
    teacher.eval()
    with ExitStack() as stack, torch.enable_grad():
        watched = [stack.enter_context(NeuronImportance(ffn.fc1, ffn.fc2)) for ffn in _all(teacher, FeedForward)]
        for windows in batches:
            x, y = windows[:, :-1].long(), windows[:, 1:].long()
            (F.cross_entropy(teacher(x)[0].flatten(0, 1), y.flatten(), reduction="sum") / x.shape[1]).backward()
    teacher.zero_grad()
    teacher.train(was_training)
    return [each.value for each in watched]


def _all(model: nn.Module, kind: type[Part]) -> list[Part]:
    return [module for module in model.modules() if isinstance(module, kind)]


def _copy(source: nn.Module, target: nn.Module, name: str) -> None:
    target.get_submodule(name).load_state_dict(source.get_submodule(name).state_dict())
