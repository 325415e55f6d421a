"""MoEBERT with the gates of COMET trees: the feed-forward layers of a dense model are split into experts.

The paper splits a BERT-base fine-tuned for GLUE: in each of 12 layers, 3072 neurons into 4 experts of 768. The 512 most
important neurons are in every expert. Then the dense model teaches the split one, layer by layer. By default a small
GPT is first trained on text, then split in about these proportions. Controls: "dense" trains on without a split;
"small" has one expert with the most important neurons of the layer; "unguided" splits by random numbers instead of
importance.

--bert FOLDER starts from a BertForMaskedLM of transformers. With --dense-share 0 this checkpoint is the teacher without
further training, as in the paper:

    train moebert --bert FOLDER --data TEXT --dense-share 0 --lr 5e-5 --expert-hidden 768 --share 512

Differences of --bert from the paper: the task is masked language modelling on text, not a GLUE task, so that the
checkpoint needs no classifier; every masked token becomes [MASK] (in BERT's pretraining 80 % do); a layer has one
LayerNorm after the weighted sum of its experts, while MoEBERT gives each expert a copy; Adam has no weight decay.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels.nn import schedules
from moe_kernels.nn.experts import ExpertMLP
from moe_kernels.nn.gates import Gate, HashGate, PermutedGate, TopKGate, TreeGate
from moe_kernels.nn.local_search import LocalSearch
from moe_kernels.nn.moe import MoE, MoEOutput
from moe_kernels.nn.policies import NonzeroWeights
from moe_kernels.nn.split import NeuronImportance, distillation_loss, split_ffn
from moe_kernels.papers.data import Text
from moe_kernels.papers.models.moe import MoEGPT
from moe_kernels.papers.recipes import Batch, Evaluation, Splits, Task, option, total_loss
from moe_kernels.papers.recipes._routers import forward_with_routing, modules_of, regularisers
from moe_kernels.papers.recipes._text import IGNORED, TextRecipe, bits, characters

GATES = ("hash", "topk", "comet")
MASKED = 0.15  # share of a window's tokens, without [CLS] and [SEP], that is masked, as in BERT


class Start(NamedTuple):
    """What a run starts from: a small GPT without training, or a checkpoint of BERT.

    teacher: the dense model, as in Pair. counts: occurrences of each token in the training text.
    with_experts: from layer(index) to a student with these layers of experts.
    read: from (batch, fixed) to inputs and targets (B, S); if fixed, every call masks the same tokens.
    """

    teacher: Any
    counts: Tensor
    with_experts: Callable[[Callable[[int], MoE]], Any]
    read: Callable[[Batch, bool], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class MoEBERT(TextRecipe):
    """Sides: see SIDES. In "balanced", hash gates give each expert about as many tokens of the training text; "+" adds
    a learned permutation of the experts."""

    SIDES: ClassVar[tuple[str, ...]] = (
        *("dense", "small", "unguided", "balanced"),
        *(gate + plus for gate in GATES for plus in ("", "+")),
    )

    bert: str = option(
        "",
        "folder of a transformers BERT checkpoint to start from, which sets dim, hidden, depth, heads and dropout; "
        "length then counts tokens, and bits are those of masked tokens; empty: a small GPT is trained first",
    )
    sides: tuple[str, ...] = option(("dense", "small", "unguided", "hash", "comet"), "gates and controls to compare")
    steps: int = option(400, "steps instead of epochs, half of them before the split by default; 0: epochs", low=0)
    dense_share: float = option(0.5, "share of the steps that train the dense model, before the split", low=0, high=1)
    windows: int = option(256, "windows of training text from which the importance of neurons is computed", low=1)
    dim: int = option(128, "width of the model; BERT: 768", low=1)
    hidden: int = option(512, "neurons of a dense feed-forward layer; BERT: 3072", low=1)
    depth: int = option(4, "blocks; BERT: 12", low=1)
    heads: int = option(4, "heads of attention; BERT: 12", low=1)
    experts: int = option(4, "experts of a layer", low=2, sweep=True)
    expert_hidden: int = option(128, "neurons of an expert; the paper: 768", low=1)
    share: int = option(85, "number of most important neurons that all experts have; the paper: 512", low=0)
    k: int = option(1, "trees of the tree gate; the paper's BERT: 1", low=1, sweep=True)
    route: bool = option(
        True,
        "comet: in evaluation, compute only the nodes on a token's path if every token takes one path in every tree",
    )
    gamma: float = option(0.01, "width of the smooth step", low=0, sweep=True)
    entropy: float = option(1.0, "lambda, weight of the entropy of the tree gate", low=0, sweep=True)
    zeta: float = option(1e-5, "weight of the entropies of the permutation", low=0)
    balance: float = option(0.01, "weight of the balance loss of topk", low=0)
    distill: float = option(5.0, "weight of the distillation", low=0, sweep=True)
    model_dropout: float = option(0.1, "dropout of embeddings, attention and feed-forward layers", low=0, high=1)
    batch_size: int = option(16, "windows of a step", low=1)
    lr: float = option(
        7e-4, "learning rate of Adam after a warm-up of a tenth of the steps; to fine-tune BERT: 5e-5", low=0
    )

    def splits(self, data: Any) -> Splits:
        """With --bert: windows of tokens, and random numbers that choose the tokens to mask; training draws others."""
        if not self.bert:
            return super().splits(data)
        train, test, valid = (self._tokens(data, part) for part in ("train", "test", "valid"))
        for name, (windows, _) in {"train": train, "test": test}.items():
            if not len(windows):
                raise ValueError(
                    f"moebert: expected at least {self.length - 2} tokens of {name} text for a window of length "
                    f"{self.length}, got fewer; choose a smaller length or more text"
                )
        return Splits(data, train, test, valid if len(valid[0]) else None)

    def blank_splits(self, data: Any) -> Splits:
        if not self.bert:
            return super().blank_splits(data)
        device = data.train_tokens.device
        zeros = torch.zeros(1, self.length, dtype=torch.int32, device=device)
        part = zeros, torch.zeros(1, self.length - 2, device=device)
        return Splits(data, part, part)

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return (batch.tensors[0].long(),) if self.bert else super().inputs(batch)

    def build(self, data: Splits, seed: int, steps: int) -> Task:
        windows, split_at = data.train[0], int(self.dense_share * steps)
        start = (self._checkpoint if self.bert else self._small_gpt)(data)
        teacher = start.teacher
        fc1, _, activation = teacher.feed_forwards()[0]
        limit = min(fc1.out_features, self.expert_hidden)
        if self.share > limit:  # checked now, since the split comes only after the steps of the dense model
            raise ValueError(
                f"moebert: share must be at most {limit}, the smaller of hidden and expert-hidden; got {self.share}"
            )

        def layer(index: int) -> MoE:
            return self._layer(fc1.in_features, activation, start.counts, steps - split_at)

        student = None if self.side == "dense" else start.with_experts(layer)
        pair = Pair(teacher, student, self.share).to(windows.device)

        def loss(batch: Batch) -> dict[str, Tensor]:
            x, y = start.read(batch, False)
            states: list[Tensor] = []
            logits, outputs = pair(x, states)
            text = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORED)
            if not pair.split:
                return total_loss(text, {}, "text")
            teacher_states: list[Tensor] = []
            with torch.no_grad():
                teacher_logits, _ = teacher(x, teacher_states)
            distilled = distillation_loss(states, teacher_states, logits.flatten(0, 1), teacher_logits.flatten(0, 1))
            return total_loss(text, regularisers(outputs) | {"distilled": self.distill * distilled}, "text")

        def evaluate(batch: Batch) -> Evaluation:
            x, y = start.read(batch, True)
            logits, _, routing = forward_with_routing(pair, x)
            return Evaluation(bits(logits, y), routing)

        def neuron_importance() -> list[Tensor]:
            """Importance (hidden) of the neurons of every layer of the teacher; random for side "unguided"."""
            if self.side == "unguided":
                return [torch.rand(each.out_features, device=windows.device) for each, _, _ in teacher.feed_forwards()]
            parts = zip(*(each[: self.windows].split(self.eval_batch) for each in data.train), strict=True)
            return importance(teacher, (start.read(Batch(each, None), True) for each in parts))

        def before_step(step: int) -> None:
            if student is None or step < split_at:
                return
            if step == split_at:
                pair.fill(neuron_importance())
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

    def _small_gpt(self, data: Splits) -> Start:
        counts = data.train[0][:, :-1].flatten().bincount(minlength=len(data.source.vocabulary))

        def model(layer: Callable[[int], MoE | None]) -> MoEGPT:
            sizes = {"dim": self.dim, "depth": self.depth, "heads": self.heads, "hidden": self.hidden}
            options: dict[str, Any] = {"activation": "gelu", "dropout": self.model_dropout, **sizes}
            return MoEGPT(len(counts), self.length, layer, **options)

        return Start(model(lambda index: None), counts, model, lambda batch, fixed: characters(batch))

    def _checkpoint(self, data: Splits) -> Start:
        bert = _bert()
        teacher, mask = bert.load(self.bert), bert.load_tokenizer(self.bert).mask_token_id

        def read(batch: Batch, fixed: bool) -> tuple[Tensor, Tensor]:
            tokens, draw = batch.tensors
            return masked(tokens.long(), draw if fixed else torch.rand_like(draw), mask)

        counts = data.train[0].flatten().bincount(minlength=teacher.vocabulary)
        return Start(teacher, counts, teacher.with_experts, read)

    def _tokens(self, data: Text, part: str) -> tuple[Tensor, Tensor]:
        """Windows int32 (n, length) of a part of the text, and numbers (n, length - 2) that choose masked tokens."""
        found: Tensor = getattr(data, f"{part}_tokens")
        text = found.cpu().numpy().tobytes().translate(data.vocabulary.ljust(256, b"\0"))
        windows = _bert().token_windows(self.bert, text, self.length)
        draw = torch.rand(len(windows), self.length - 2, generator=torch.Generator().manual_seed(0))
        return windows.to(found.device), draw.to(found.device)

    def _layer(self, dim: int, activation: str, counts: Tensor, steps: int) -> MoE:
        """A layer of the student. steps: the student's training steps. counts: occurrences of each training token."""
        kind, plus, _ = self.side.partition("+")
        count = 1 if kind == "small" else self.experts
        experts = ExpertMLP(count, dim, self.expert_hidden, activation=activation, bias=True)
        if kind == "topk":
            gate: Gate = TopKGate(dim, count, 1, order="softmax_topk", balance=self.balance)
        elif kind == "comet":
            gate = TreeGate(dim, count, self.k, gamma=self.gamma, entropy=self.entropy, route=self.route)
        else:
            gate = HashGate(len(counts), count, frequencies=counts if kind == "balanced" else None)
        if plus:  # renormalising cancels the one weight of topk, so the task would not train its gate
            gate = PermutedGate(gate, LocalSearch(count, steps // 2, zeta=self.zeta, renormalise=kind != "topk"))
        return MoE(gate, experts, NonzeroWeights() if plus or kind == "comet" else None)


class Pair(nn.Module):
    """A dense model (teacher) and the model split from it (student); `forward` uses the student after the split.

    teacher, student: model(x, states) -> (logits, outputs of the layers of experts); states is a list to which the
        embedded tokens and every block's output are appended. The parameters outside the feed-forward layers are in
        the same order in both. teacher.feed_forwards() -> (fc1, fc2, activation) of each layer. student None: only the
        teacher trains.
    share: number of neurons that all experts have.
    """

    def __init__(self, teacher: Any, student: Any, share: int) -> None:
        super().__init__()
        self.teacher, self.student, self.share, self.split = teacher, student, share, False

    def forward(self, x: Tensor, states: list[Tensor] | None = None) -> tuple[Tensor, list[MoEOutput]]:
        return self.student(x, states) if self.student is not None and self.split else self.teacher(x, states)

    def begin(self) -> None:
        self.split = True
        self.teacher.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Pair:
        super().train(mode)
        if self.split:
            self.teacher.eval()
        return self

    @torch.no_grad()
    def fill(self, values: list[Tensor]) -> None:
        """Copies the teacher into the student, feed-forward layers split. values: importance (hidden) in each layer."""
        layers = self.teacher.feed_forwards()
        outside = (
            _except(self.teacher, [part for fc1, fc2, _ in layers for part in (fc1, fc2)]),
            _except(self.student, modules_of(self.student, MoE)),
        )
        for other, own in zip(*outside, strict=True):
            own.copy_(other)
        students = modules_of(self.student, ExpertMLP)
        for (fc1, fc2, activation), experts, each in zip(layers, students, values, strict=True):
            hidden = experts.w_in.shape[2]
            split = split_ffn(fc1, fc2, each, experts.num_experts, hidden, self.share, activation)
            experts.load_state_dict(split.state_dict())

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.split, device="cpu")

    def set_extra_state(self, state: Tensor | dict[str, bool]) -> None:
        self.split = bool(state["split"] if isinstance(state, dict) else state)  # a dict in older files
        self.teacher.requires_grad_(not self.split)


def importance(teacher: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Importance (hidden) of the neurons of every layer, over batches of tokens and targets (B, S).

    The loss of a window is the mean over its targets; all windows have equally many.
    """
    was_training = teacher.training
    teacher.eval()
    with ExitStack() as stack, torch.enable_grad():
        sums = [stack.enter_context(NeuronImportance(fc1, fc2)) for fc1, fc2, _ in teacher.feed_forwards()]
        for x, y in batches:
            nats = F.cross_entropy(teacher(x)[0].flatten(0, 1), y.flatten(), reduction="sum", ignore_index=IGNORED)
            (nats / (y[0] != IGNORED).sum()).backward()
    teacher.zero_grad()
    teacher.train(was_training)
    return [each.value for each in sums]


def masked(tokens: Tensor, draw: Tensor, mask: int) -> tuple[Tensor, Tensor]:
    """Tokens (B, S), some replaced by `mask`, and targets (B, S): the token where it was replaced, else IGNORED.

    draw (B, S - 2): a number for each token but the first and the last of a window. In every window the tokens with the
    smallest numbers are replaced: max(1, round(0.15 (S - 2))) tokens.
    """
    count = max(1, round(MASKED * draw.shape[1]))
    positions = 1 + draw.topk(count, largest=False).indices
    chosen = torch.zeros_like(tokens, dtype=torch.bool).scatter_(1, positions, True)
    return tokens.masked_fill(chosen, mask), tokens.masked_fill(~chosen, IGNORED)


def _bert() -> Any:
    """moe_kernels.integrations.bert, imported only if needed, since it imports transformers."""
    return importlib.import_module("moe_kernels.integrations.bert")


def _except(model: nn.Module, parts: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of a model outside `parts`."""
    inside = {id(each) for part in parts for each in part.parameters()}
    return [each for each in model.parameters() if id(each) not in inside]
