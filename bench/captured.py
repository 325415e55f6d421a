"""Checks that one CUDA graph holds a whole training step of a layer of experts, with the bits of the eager step.

Two copies of a layer start with equal parameters. One takes its steps eagerly. A step of the other (forward, backward,
clipping, AdamW) is captured once, and the graph is replayed on fresh inputs. After every step the outputs, the plan,
the loss, all gradients, parameters, buffers and optimizer states of both must have the same bits. Tokens must go to
other experts in every step, since a graph that kept the routing of its capture would pass otherwise.

The verdict of a check is "ok", or begins with "FAILED" or "not run".
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import moe_kernels as mk
from moe_kernels.nn import (
    ExpertChoice,
    ExpertMLP,
    Gate,
    MoE,
    NonzeroWeights,
    SoftmaxGate,
    TokenChoice,
    TopKGate,
    TreeGate,
)
from moe_kernels.plan import RoutingPlan
from moe_kernels.verify import error_text

T, D, H, E, K = 512, 64, 128, 8, 2
WARM_UP, REPLAYS = 3, 4  # steps before the capture, and replays of the graph
CLIP = 1e-2  # largest norm of the gradients: smaller than the norms here, so that clipping changes all gradients

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# capture(warm_up, step) calls warm_up(), captures what step() does, and returns the replay.
Capture = Callable[[Callable[[], None], Callable[[], None]], Callable[[], None]]
Batch = tuple[Tensor, Tensor]  # inputs and targets, (T, D) each


def _wide_tree() -> TreeGate:
    """A tree gate most of whose nodes are saturated. A new one reaches every leaf, so that no routing changes."""
    gate = TreeGate(D, E, trees=2, entropy=0.01)
    with torch.no_grad():
        gate.split_weight.mul_(50)
    return gate


def _layer(gate: Callable[[], Gate], policy: Any, device: str, dtype: torch.dtype) -> MoE:
    """The layer with its experts in `dtype`; gates stay float32, as in any model that is converted."""
    return MoE(gate(), ExpertMLP(E, D, H), policy).to(device, dtype)


# Layers by name, of D features and E experts: functions of device and dtype. The first draws noise in every step.
LAYERS: dict[str, Callable[[str, torch.dtype], MoE]] = {
    "token choice": partial(
        _layer,
        partial(TopKGate, D, E, K, order="softmax_topk", noise="vmoe", importance=0.01, load=0.01),
        TokenChoice(),
    ),
    "capacity": partial(_layer, partial(TopKGate, D, E, K, balance=0.01, z=0.001), TokenChoice(1.0, priority="max")),
    "expert choice": partial(_layer, partial(SoftmaxGate, D, E), ExpertChoice(2.0)),
    "tree gate": partial(_layer, _wide_tree, NonzeroWeights()),
}


def checks() -> list[tuple[str, str]]:
    """The names of layer and dtype of every check."""
    return [(layer, dtype) for layer in LAYERS for dtype in DTYPES]


def cuda_graph(warm_up: Callable[[], None], step: Callable[[], None]) -> Callable[[], None]:
    """A Capture with a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warm_up()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def captured(
    layer: str,
    backend: str | None = None,
    dtype: str = "float32",
    device: str = "cuda",
    capture: Capture = cuda_graph,
) -> str:
    """The verdict on LAYERS[layer] on a backend; None: the automatic choice. It runs once in a process: after a failed
    capture CUDA may refuse further work."""
    torch.manual_seed(0)
    with mk.use_backend(backend) if backend else nullcontext():
        made = LAYERS[layer](device, DTYPES[dtype])
        return compare(made, batches(T, D, device, DTYPES[dtype]), capture)


def batches(tokens: int, dim: int, device: str, dtype: torch.dtype) -> list[Batch]:
    """One batch for each step. Each has a mean of its own, which gives each expert another share of the tokens."""
    drawn = torch.Generator().manual_seed(1)
    found = []
    for _ in range(WARM_UP + REPLAYS):
        x = torch.randn(tokens, dim, generator=drawn) + torch.randn(dim, generator=drawn) / 2
        target = torch.randn(tokens, dim, generator=drawn)
        found.append((x.to(device, dtype), target.to(device, dtype)))
    return found


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, capturable=True)


def compare(
    layer: MoE,
    batches: Sequence[Batch],
    capture: Capture,
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = adamw,
) -> str:
    """The verdict on a layer: trains it on WARM_UP + REPLAYS batches, and a copy with a captured step."""
    eager = Training(layer, optimizer)
    inputs, targets = batches[0]
    graphed = Training(copy.deepcopy(layer), optimizer, (torch.empty_like(inputs), torch.empty_like(targets)))
    with warnings.catch_warnings():
        # torch warns of steps with capturable=True outside of a capture; here they are meant.
        warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")
        doing = "the eager step"
        try:
            eager.warm_up(batches[:WARM_UP])
            doing = "the capture"
            replay = capture(partial(graphed.warm_up, batches[:WARM_UP]), graphed.step)
            doing = "the replay"
            return _compare_replays(graphed, eager, replay, batches[WARM_UP:])
        except mk.BackendError as error:
            return f"not run: {error}"
        except Exception as error:
            return f"FAILED: {doing}: {error_text(error)}"


def _compare_replays(graphed: Training, eager: Training, replay: Callable[[], None], batches: Sequence[Batch]) -> str:
    found = difference(graphed.state(), eager.state())
    if found:  # the eager steps do not repeat, or the capture, which runs nothing, has changed a tensor
        return f"FAILED: {found} before the first replay"
    routing = Routing.of(eager.plan)
    for number, batch in enumerate(batches, 1):
        graphed.prepare(batch, number)
        replay()
        eager.take_step(batch, number)
        found = difference(graphed.results() | graphed.state(), eager.results() | eager.state())
        if found:
            return f"FAILED: {found} in step {number}"
        if not bool(eager.loss.isfinite()):
            return f"FAILED: the loss of step {number} is {float(eager.loss)}, so equal bits prove nothing"
        before, routing = routing, Routing.of(eager.plan)
        if not routing.changed(before):
            return f"FAILED: step {number} has the routing of the step before, so equal bits prove nothing"
    return "ok"


class Training:
    """A layer in training, its optimizer, and what the last step computed.

    buffer: memory for the batch of every step; None: a step reads the batch that it is given.
    """

    plan: RoutingPlan
    y: Tensor
    loss: Tensor
    norm: Tensor
    batch: Batch

    def __init__(
        self,
        layer: MoE,
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
        buffer: Batch | None = None,
    ) -> None:
        self.layer, self.optimizer, self.buffer = layer.train(), optimizer(layer.parameters()), buffer

    def warm_up(self, batches: Sequence[Batch]) -> None:
        """Takes a step on each batch. Then gradients are None, so that the backward pass of a captured step allocates
        them in the graph's memory."""
        for index, batch in enumerate(batches):
            self.take_step(batch, seed=-1 - index)
        self.optimizer.zero_grad(set_to_none=True)

    def take_step(self, batch: Batch, seed: int) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.prepare(batch, seed)
        self.step()

    def prepare(self, batch: Batch, seed: int) -> None:
        """Makes the batch that of the next step, and seeds torch's generators for it."""
        self.batch = batch if self.buffer is None else self.buffer
        if self.buffer is not None:
            for memory, values in zip(self.buffer, batch, strict=True):
                memory.copy_(values)
        torch.manual_seed(seed)

    def step(self) -> None:
        """What a graph captures."""
        x, target = self.batch
        out = self.layer(x)
        loss = (out.y.float() - target.float()).square().mean() + out.loss
        loss.backward()
        self.norm = torch.nn.utils.clip_grad_norm_(self.layer.parameters(), CLIP)
        self.optimizer.step()
        # Detached: a graph of autograd that outlives the warm-up would tie parameters to the warm-up's stream.
        self.plan, self.y, self.loss = out.plan, out.y.detach(), loss.detach()

    def results(self) -> dict[str, Tensor]:
        """What the last step computed, by name, in the order of computation."""
        arrays = {f"plan.{name}": each for name, each in vars(self.plan).items() if isinstance(each, Tensor)}
        named = self.layer.named_parameters()
        gradients = {f"the gradient of {name}": each.grad for name, each in named if each.grad is not None}
        return {**arrays, "y": self.y, "loss": self.loss, "the norm of the gradients": self.norm, **gradients}

    def state(self) -> dict[str, Tensor]:
        """Parameters, buffers and states of the optimizer, by name."""
        named = dict(self.layer.named_parameters())
        states = {
            f"{key} of {name}": value
            for name, each in named.items()
            for key, value in self.optimizer.state[each].items()
            if isinstance(value, Tensor)
        }
        return {**named, **dict(self.layer.named_buffers()), **states}


class Routing(NamedTuple):
    """Which experts the tokens use, (T, E), and how many: tokens of every expert (E), experts of every token (T)."""

    used: Tensor
    tokens: Tensor
    experts: Tensor

    @staticmethod
    def of(plan: RoutingPlan) -> Routing:
        used = plan.used
        return Routing(used, used.sum(0), used.sum(1))

    def changed(self, before: Routing) -> bool:
        """Whether tokens use other experts, and not equally many of each token and expert as before."""
        counts = torch.equal(self.tokens, before.tokens) and torch.equal(self.experts, before.experts)
        return not torch.equal(self.used, before.used) and not counts


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    """Says which tensor of `found` is the first that lacks the bits of the tensor of that name in `expected`, or ""."""
    for name in [*found, *expected]:
        if name not in found or name not in expected:
            return f"{name} exists only in the {'eager' if name in expected else 'captured'} training"
        one, other = found[name].detach(), expected[name].detach()
        if one.shape != other.shape or one.dtype != other.dtype or not torch.equal(_bits(one), _bits(other)):
            return f"{name} differs"
    return ""


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)
