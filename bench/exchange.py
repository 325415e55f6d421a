"""Measures time and sent bytes of implementations of experts across processes of one machine (gloo).

The implementations, called contenders, evaluate experts (silu(x W) * (x V)) U on the same tokens with the same routing.
Their calls alternate, so that a busy machine slows all alike.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from bench.exchange_model import Machine, exchange_bytes, layer_cost, shares
from moe_kernels import combine, make_plan
from moe_kernels.nn.experts import ExpertMLP
from moe_kernels.nn.parallel import ExpertParallel
from moe_kernels.ops.plan import expert_capacity

COLLECTIVES = torch.ops._c10d_functional
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]  # x (T, D), experts (T, K), weights (T, K) -> y (T, D)


@dataclass(frozen=True)
class Size:
    """Sizes of the layer. tokens: of all ranks together; in `predictions`, of each rank."""

    tokens: int = 2048
    dim: int = 256
    hidden: int = 512
    experts: int = 16
    choices: int = 2


@dataclass(frozen=True)
class Line:
    """Median seconds of a forward pass and of a training step (forward and backward).

    sent: bytes of a training step that TrafficCounter counts on the measuring rank. predicted: the bytes that
    bench/exchange_model.py predicts for rank 0; None if it does not model the contender.
    """

    ranks: int
    contender: str
    forward: float
    training: float
    sent: int
    predicted: int | None


class TrafficCounter(TorchDispatchMode):
    """Counts the functional all-to-alls, all-gathers and reduce-scatters of this rank, and the bytes that it sends.

    As in a ring, an all-gather over n ranks counts as n - 1 times its input, a reduce-scatter as (n - 1) / n of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.calls = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if function is COLLECTIVES.all_to_all_single.default:
            x, _, leave, _ = args
            row = x[:1].numel() * x.element_size() if len(x) else 0
            self._count(row * (sum(leave) - leave[dist.get_rank()]))
        elif function is COLLECTIVES.all_gather_into_tensor.default:
            self._count(args[0].nbytes * (args[1] - 1))
        elif function is COLLECTIVES.reduce_scatter_tensor.default:
            self._count(args[0].nbytes * (args[2] - 1) // args[2])
        return function(*args, **kwargs or {})

    def _count(self, sent: int) -> None:
        self.sent, self.calls = self.sent + sent, self.calls + 1


def contenders(size: Size, mesh: DeviceMesh, peers: bool) -> dict[str, Layer]:
    """The contenders by name. With one rank: experts without an exchange. peers: also those of other packages."""
    alone = dist.get_world_size() == 1
    found = {"one process" if alone else "ExpertParallel": _ours(size, None if alone else ExpertParallel(), mesh)}
    if not alone:
        places = _capacity(size, mesh.size())
        found[f"ExpertParallel(capacity={places})"] = _ours(size, ExpertParallel(places), mesh)
        found["DTensor: gather tokens, scatter sums"] = _gather_tokens(size, mesh)
    packages = ("transformers", "transformers.distributed.expert_parallel")  # transformers 5.17 lacks the latter
    if peers and all(map(importlib.util.find_spec, packages)):
        found["transformers, one process" if alone else "transformers, all_to_all"] = _transformers(size)
    return found


def _experts(size: Size) -> ExpertMLP:
    torch.manual_seed(0)
    return ExpertMLP(size.experts, size.dim, size.hidden, activation="swiglu", bias=False)


def _ours(size: Size, style: ExpertParallel | None, mesh: DeviceMesh) -> Layer:
    experts = _experts(size)
    if style is not None:
        parallelize_module(experts, mesh, style)
    capacity = None if style is None else style.capacity
    return lambda x, chosen, weights: experts(x, make_plan(chosen, size.experts, capacity=capacity), weights)


def _gather_tokens(size: Size, mesh: DeviceMesh) -> Layer:
    """Every rank gathers all tokens and evaluates its own experts on them; a reduce-scatter sums the outputs."""
    count = size.experts // mesh.size()
    first, whole = mesh.get_local_rank() * count, _experts(size)
    experts = ExpertMLP(count, size.dim, size.hidden, activation="swiglu", bias=False)
    with torch.no_grad():
        for own, each in zip(experts.parameters(), whole.parameters(), strict=True):
            own.copy_(each[first : first + count])

    def gather(x: Tensor) -> Tensor:
        given = DTensor.from_local(x, mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
        return given.to_local(grad_placements=[Partial()])

    def layer(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        x, weights, chosen = gather(x), gather(weights), gather(chosen)
        here = (chosen >= first) & (chosen < first + count)
        plan = make_plan(torch.where(here, chosen - first, -1), count)
        y = combine(experts.rows(x, plan), plan, weights)
        return DTensor.from_local(y, mesh, [Partial()]).redistribute(mesh, [Shard(0)]).to_local()

    return layer


def _transformers(size: Size) -> Layer:
    """Mixtral's experts with torch's grouped products and, on several ranks, transformers' own exchange."""
    from transformers import MixtralConfig
    from transformers.distributed.expert_parallel import EpDispatchExpertsParallel, MoEParamShard
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(
        hidden_size=size.dim,
        intermediate_size=size.hidden,
        num_local_experts=size.experts,
        num_experts_per_tok=size.choices,
    )
    config._experts_implementation = "grouped_mm"
    ours, experts = _experts(size), MixtralExperts(config)
    with torch.no_grad():
        experts.gate_up_proj.copy_(ours.w_in.transpose(1, 2))
        experts.down_proj.copy_(ours.w_out.transpose(1, 2))
    if dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ep", "tp"))
        shard = MoEParamShard(Shard(0), shards_expert_dim=True)
        for name in ("gate_up_proj", "down_proj"):
            shard.shard_param(experts, name, mesh["ep"])
        style = EpDispatchExpertsParallel()
        style.install_forward(experts, mesh["ep"], tp_mesh=mesh["tp"], ep_implementation="all_to_all")
    return lambda x, chosen, weights: experts(x, chosen.long(), weights)


def routing(size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """x (T, D), experts (T, K) and weights (T, K) for the tokens of all ranks, by a random router."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size.tokens, size.dim, generator=generator)
    weights, experts = torch.randn(size.tokens, size.experts, generator=generator).softmax(-1).topk(size.choices)
    return x, experts.to(torch.int32), weights


def measure(size: Size, seconds: float, peers: bool = True) -> list[Line]:
    """A line for each contender, with times and sent bytes of this rank; to be called on every rank.

    peers: also measure implementations of other packages.

    Raises:
        AssertionError: a contender's output or gradient of x differs from the first contender's beyond rounding.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))["ep"]
    x, experts, weights = (each.chunk(ranks)[rank].contiguous() for each in routing(size))
    owners = routing(size)[1].long() // (size.experts // ranks)
    layers, times, sent, first = contenders(size, mesh, peers), dict[str, Any](), dict[str, int](), None
    for name, layer in layers.items():
        given = x.clone().requires_grad_()
        with TrafficCounter() as moved:
            y = layer(given, experts, weights)
            y.square().sum().backward()
        sent[name], times[name] = moved.sent, ([], [])
        first = (y.detach(), given.grad) if first is None else first
        torch.testing.assert_close((y.detach(), given.grad), first, rtol=1e-4, atol=1e-4)
    until = torch.tensor(time.monotonic() + seconds, dtype=torch.float64)
    while _from_rank_0(time.monotonic() < until.item()):
        for name, layer in layers.items():
            times[name][0].append(_seconds(_forward, layer, x, experts, weights))
            times[name][1].append(_seconds(_train, layer, x, experts, weights))
    rows = torch.stack([torch.bincount(each.flatten(), minlength=ranks) for each in owners.chunk(ranks)])
    static = torch.full((ranks, ranks), size.experts // ranks * _capacity(size, ranks))
    model = {"ExpertParallel": rows, f"ExpertParallel(capacity={_capacity(size, ranks)})": static}
    lines = []
    for name in layers:
        forward, training = map(statistics.median, times[name])
        traffic = exchange_bytes(model[name], size.dim, size.dim, 4, size.experts) if name in model else None
        predicted = None if traffic is None else traffic.sent_forward[0] + traffic.sent_backward[0]
        lines.append(Line(ranks, name, forward, training, sent[name], predicted))
    return lines


def _capacity(size: Size, ranks: int) -> int:
    """Rows that a rank may send to an expert: twice the mean over experts, rounded up."""
    return expert_capacity(size.tokens // ranks, size.choices, size.experts, 2.0)


def _forward(layer: Layer, *given: Tensor) -> None:
    with torch.no_grad():
        layer(*given)


def _train(layer: Layer, x: Tensor, *given: Tensor) -> None:
    layer(x.detach().requires_grad_(), *given).sum().backward()


def _seconds(call: Callable[..., None], *given: Any) -> float:
    """Seconds until all ranks have finished the call."""
    dist.barrier()
    started = time.perf_counter()
    call(*given)
    dist.barrier()
    return time.perf_counter() - started


def _from_rank_0(value: bool) -> bool:
    """On all ranks the value that rank 0 passes."""
    shared = torch.tensor(int(value))
    dist.broadcast(shared, 0)
    return bool(shared)


def run(ranks: int, size: Size, seconds: float) -> list[Line]:
    """Starts a single-threaded process for each rank, and returns the lines that rank 0 measured."""
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, variables):
        multiprocessing.spawn(_run_rank, (ranks, size, seconds, Path(folder)), nprocs=ranks)
        lines: list[Line] = pickle.loads((Path(folder) / "lines").read_bytes())
        return lines


def _run_rank(rank: int, ranks: int, size: Size, seconds: float, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    lines = measure(size, seconds)
    if rank == 0:
        (folder / "lines").write_bytes(pickle.dumps(lines))
    dist.destroy_process_group()


def predictions(size: Size, machines: list[Machine], skew: float, width: int) -> list[tuple[str, ...]]:
    """Rows of the table of predictions: each machine with a uniform and with a skewed router.

    skew: exponent of Zipf's law for the skewed router. width: bytes of an element.
    """
    rows: list[tuple[str, ...]] = []
    for machine in machines:
        for name, exponent in (("uniform", 0.0), (f"Zipf {skew:g}", skew)):
            share = shares(size.experts, exponent)
            cost = layer_cost(machine, size.tokens, size.dim, size.hidden, size.choices, share, width)
            found = (cost.exchange * 1e3, cost.experts * 1e3, cost.exchange / cost.total * 100, cost.sent / 1e6)
            shown = (f"{found[0]:.2f}", f"{found[1]:.2f}", f"{found[2]:.0f} %", f"{found[3]:.1f}")
            rows.append((f"{machine.ranks}", name, f"{cost.imbalance:.2f}", *shown))
    return rows
