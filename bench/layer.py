"""Measures a layer of experts and each of its kernels at one shape, beside PyTorch, and predicts them for GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from bench import measure, predict, tracing
from bench.entry import Calls, Entry, Inputs, Shape, through_autograd
from bench.experts import PRODUCTS
from bench.layer_models import Sizes
from bench.layer_peers import LAYERS, chosen_by_torch
from moe_kernels import combine, expert_capacity, expert_mlp, grouped_gemm, make_plan, topk_gate, use_backend
from moe_kernels.cases.routing import logits, shares
from moe_kernels.nn import ExpertMLP, MoE, TokenChoice, TopKGate
from moe_kernels.ops.grouped_gemm import HALVING
from moe_kernels.plan import RoutingPlan
from moe_kernels.verify import dtype_name
from python_ref.grouped_gemm import activate

OPERATIONS = {"up": "grouped_gemm", "down": "grouped_gemm"}  # of a step, where its name is another
DIRECTIONS = ("forward", "training")
PEER_SECONDS = 2.0
SLOW_PRODUCT = 5.0  # GFLOP/s of a thread; AVX2 alone gives ten times this in float32
HELD = 4  # the layer's tensors, their gradients and what kernels keep, in units of weights and rows


@dataclass(frozen=True)
class Setting:
    """What is measured. backend: None for the automatic choice. factor: of the capacity; None: nothing is dropped."""

    sizes: Sizes
    dtype: torch.dtype
    device: str
    backend: str | None = None
    routing: str = "uniform"
    factor: float | None = None
    threads: int = 1
    fake: bool = False  # tensors without data, to count FLOPs of any size

    @property
    def capacity(self) -> int | None:
        each = self.sizes
        return None if self.factor is None else expert_capacity(each.tokens, each.k, each.experts, self.factor)

    @property
    def shape(self) -> Shape:
        each = self.sizes
        found: Shape = {"T": each.tokens, "D": each.dim, "H": each.hidden, "E": each.experts, "K": each.k}
        found |= {"routing": self.routing, "activation": each.activation, "R": self.num_rows}
        return found if self.capacity is None else found | {"capacity": self.capacity}

    @property
    def num_rows(self) -> int:
        rows = self.sizes.tokens * self.sizes.k
        return rows if self.capacity is None else min(rows, self.sizes.experts * self.capacity)

    @property
    def bytes(self) -> int:
        """About the most memory that measuring takes."""
        each = self.sizes
        wide = (2 if each.activation in HALVING else 1) * each.hidden
        weights = each.experts * each.dim * (wide + each.hidden)
        rows = self.num_rows * (wide + each.hidden + 2 * each.dim)
        return HELD * (weights + rows) * self.dtype.itemsize

    def fits(self) -> bool:
        if self.device == "cuda":
            return self.bytes < torch.cuda.mem_get_info()[0]
        return self.bytes < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class LayerJob(measure.Job):
    """A job of one step of a layer, or of the whole layer."""

    setting: Setting | None = None

    @cached_property
    def entry(self) -> Entry:
        assert self.setting is not None
        return steps(self.setting)[self.op]


@dataclass
class Row:
    """A step in one direction. figure: None if it was not measured. predicted: by GPU (microseconds, bound)."""

    step: str
    direction: str
    flops: float
    least_bytes: float
    figure: measure.Figure | None = None
    predicted: dict[str, tuple[float, str]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    product: float = 0.0  # GFLOP/s of torch's product, if it is so slow that PyTorch was left out


def _slow_product(setting: Setting, limits: measure.Ceilings, work: float) -> float:
    """GFLOP/s of torch's product in the setting's dtype if PyTorch would take over PEER_SECONDS a call because of it,
    else 0. On a CPU without instructions for bfloat16 torch takes 10 to 100 times as long as in float32."""
    if setting.device == "cuda":
        return 0.0
    speed = limits[measure.setting(setting.device, setting.threads)].get(dtype_name(setting.dtype), SLOW_PRODUCT / 10)
    return speed if speed < SLOW_PRODUCT * setting.threads and work / speed / 1e9 > PEER_SECONDS else 0.0


@cache
def _routing(setting: Setting) -> Inputs:
    """Logits, and what gate and plan make of them."""
    shape, device = setting.shape, setting.device
    if setting.fake:
        return _fake_routing(setting)
    scores = logits(shape, device)
    weights, experts = topk_gate(scores, shape["K"], backend="reference")
    made = make_plan(experts, shape["E"], capacity=setting.capacity, backend="reference")
    routed = {"experts": experts, "plan": made, "bounds": made.expert_offsets.tolist()}
    return {**routed, "logits": scores.to(setting.dtype), "weights": weights.to(setting.dtype)}


def _fake_routing(setting: Setting) -> Inputs:
    tokens, experts, k, rows = (setting.shape[name] for name in "TEKR")
    sizes: list[tuple[int, ...]] = [(experts + 1,), (rows,), (rows,), (tokens, k), (experts,), (experts,), ()]
    made = RoutingPlan(
        tokens, experts, *(torch.empty(size, dtype=torch.int32, device=setting.device) for size in sizes)
    )
    scores, weights = (torch.empty(tokens, n, dtype=setting.dtype, device=setting.device) for n in (experts, k))
    return {"logits": scores, "weights": weights, "experts": made.slot_row, "plan": made, "bounds": [0] * (experts + 1)}


def _inputs(setting: Setting, names: tuple[str, ...], leaves: tuple[str, ...]) -> Inputs:
    """Random tensors of these names, and `_routing`."""
    tokens, dim, hidden, experts, k = (setting.shape[name] for name in "TDHEK")
    width = 2 * hidden if setting.sizes.activation in HALVING else hidden
    sizes = {
        "x": (tokens, dim),
        "router": (experts, dim),
        "w_in": (experts, dim, width),
        "w_out": (experts, hidden, dim),
        "hidden": (setting.num_rows, hidden),
        "rows": (setting.num_rows, dim),
        "grad_logits": (tokens, experts),
        "grad_weights": (tokens, k),
        "grad": (tokens, dim),
    }
    found = dict(_routing(setting))
    for name in names:
        fan_in = sizes[name][1] if name.startswith("w_") else 1
        drawn = torch.randn(sizes[name], device=setting.device).div_(fan_in**0.5)
        found[name] = drawn if name == "grad_weights" else drawn.to(setting.dtype)
    return found | {name: found[name].detach().requires_grad_() for name in leaves}


def _step(
    setting: Setting,
    forward: Callable[..., Any],
    leaves: tuple[str, ...],
    grad: str,
    read: int,
    written: int,
    peers: dict[str, Callable[[Inputs], Any]],
) -> Entry:
    """read, written: bytes of the leaves and of the result; a backward pass reads the leaves and the result's gradient,
    and writes the gradients of the leaves."""
    names = tuple(name for name in (*leaves, grad) if name and name not in ("logits", "weights"))
    least = {"forward": read + written, "training": 3 * read + 2 * written}
    return Entry(
        shapes={},
        inputs=lambda *_: _inputs(setting, names, leaves),
        kernel=lambda _: through_autograd(partial(forward, backend=setting.backend), leaves, grad),
        peers={name: through_autograd(peer, leaves, grad) for name, peer in peers.items()},
        least_bytes=lambda shape, dtype, direction: least[direction],
        directions=DIRECTIONS if leaves else ("forward",),
        leaves=leaves,
        grad=grad,
    )


def steps(setting: Setting) -> dict[str, Entry]:
    """The entries of the layer's steps in their order; expert_mlp is the two products and combine as one call."""
    tokens, dim, hidden, experts, k = (setting.shape[name] for name in "TDHEK")
    rows, size, sizes = setting.num_rows, setting.dtype.itemsize, setting.sizes
    width, act = (2 * hidden if sizes.activation in HALVING else hidden), sizes.activation
    x, out, index, scores = tokens * dim * size, rows * dim * size, 4 * tokens * k, tokens * experts * size
    up, down = (experts * dim * each * size for each in (width, hidden))
    products = PRODUCTS.items()
    step = partial(_step, setting)
    bias = torch.zeros(experts, device=setting.device) if sizes.router == "sigmoid" else None

    def gate(inputs: Inputs, backend: str | None) -> Tensor:
        return topk_gate(inputs["logits"], k, **sizes.rule, bias=bias, backend=backend)[0].to(setting.dtype)

    def gate_by_torch(inputs: Inputs) -> Tensor:
        return chosen_by_torch(inputs["logits"], k, sizes.router, bias, sizes.groups)[0]

    def planned(inputs: Inputs, backend: str | None) -> Any:
        made = make_plan(inputs["experts"], experts, capacity=setting.capacity, backend=backend)
        return made.expert_offsets, made.row_token, made.slot_row

    def first(inputs: Inputs, backend: str | None) -> Tensor:
        given = {"activation": act, "row_token": inputs["plan"].row_token, "backend": backend}
        return grouped_gemm(inputs["x"], inputs["w_in"], inputs["plan"].expert_offsets, **given)

    def second(inputs: Inputs, backend: str | None) -> Tensor:
        return grouped_gemm(inputs["hidden"], inputs["w_out"], inputs["plan"].expert_offsets, backend=backend)

    def mlp(inputs: Inputs, backend: str | None) -> Tensor:
        given = inputs["plan"], inputs["w_in"], inputs["w_out"]
        return expert_mlp(inputs["x"], *given, weights=inputs["weights"], activation=act, backend=backend)

    return {
        "router": step(
            lambda inputs, backend: F.linear(inputs["x"], inputs["router"]),
            ("x", "router"), "grad_logits", x + experts * dim * size, scores, {},
        ),
        "topk_gate": step(
            gate, ("logits",), "weights", scores, tokens * k * size + index,
            {f"torch topk+{'softmax' if bias is None else 'sigmoid'}": gate_by_torch},
        ),
        "make_plan": step(planned, (), "", index, 3 * index + 12 * experts, {}),
        "up": step(
            first, ("x", "w_in"), "hidden", x + up, rows * hidden * size,
            {name: partial(_up, product=product, activation=act) for name, product in products},
        ),
        "down": step(
            second, ("hidden", "w_out"), "rows", rows * hidden * size + down, out,
            {name: partial(_down, product=product) for name, product in products},
        ),
        "combine": step(
            lambda inputs, backend: combine(inputs["rows"], inputs["plan"], inputs["weights"], backend=backend),
            ("rows", "weights"), "grad", out + tokens * k * size + index, x, {"torch index_add": _index_add},
        ),
        "expert_mlp": step(
            mlp, ("x", "w_in", "w_out", "weights"), "grad", x + up + down + tokens * k * size, x,
            {name: partial(_mlp, product=product, activation=act) for name, product in products},
        ),
        "layer": _layer(setting, 2 * x + up + down + experts * dim * size, x),
    }  # fmt: skip


def _used(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Token and choice of the rows in use."""
    used = inputs["bounds"][-1]
    return inputs["plan"].row_token[:used], inputs["plan"].row_choice[:used]


def _up(inputs: Inputs, product: Callable[..., Tensor], activation: str) -> Tensor:
    token, _ = _used(inputs)
    return _whole(activate(product(inputs["x"].index_select(0, token), inputs["w_in"], inputs), activation), inputs)


def _down(inputs: Inputs, product: Callable[..., Tensor]) -> Tensor:
    return _whole(product(inputs["hidden"][: inputs["bounds"][-1]], inputs["w_out"], inputs), inputs)


def _whole(rows: Tensor, inputs: Inputs) -> Tensor:
    """`rows` with zeros for the rows not in use."""
    unused = inputs["plan"].num_rows - rows.shape[0]
    return F.pad(rows, (0, 0, 0, unused)) if unused else rows


def _index_add(inputs: Inputs, rows: Tensor | None = None) -> Tensor:
    token, choice = _used(inputs)
    rows = inputs["rows"][: token.shape[0]] if rows is None else rows
    weighted = rows * inputs["weights"][token, choice][:, None]
    return rows.new_zeros(inputs["plan"].num_tokens, rows.shape[1]).index_add(0, token, weighted)


def _mlp(inputs: Inputs, product: Callable[..., Tensor], activation: str) -> Tensor:
    token, _ = _used(inputs)
    hidden = activate(product(inputs["x"].index_select(0, token), inputs["w_in"], inputs), activation)
    return _index_add(inputs, product(hidden, inputs["w_out"], inputs))


@cache
def module(setting: Setting) -> MoE:
    """The layer; its router's bias makes the routing that the setting names, over logits of about unit variance."""
    each, device = setting.sizes, setting.device
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": device, "dtype": setting.dtype, "backend": setting.backend}
    rate = 0.001 if each.router == "sigmoid" else None
    gate = TopKGate(each.dim, each.experts, each.k, **each.rule, balance_rate=rate, **options)
    experts = ExpertMLP(each.experts, each.dim, each.hidden, activation=each.activation, bias=each.bias, **options)
    with torch.no_grad():
        gate.linear.weight.normal_(std=each.dim**-0.5)
        gate.linear.bias.copy_(shares({**setting.shape}).log())
    return MoE(gate, experts, TokenChoice(setting.factor), output="tensor")


def _layer(setting: Setting, read: int, written: int) -> Entry:
    """The whole layer: training computes the gradients of x and of all parameters."""

    def calls(run: Callable[[MoE, Tensor], Tensor]) -> Calls:
        def infer(inputs: Inputs) -> Tensor:
            with torch.no_grad():
                return run(module(setting), inputs["x"].detach())

        def train(inputs: Inputs) -> object:
            layer, x = module(setting), inputs["x"]
            wanted = [x, *layer.parameters()]
            for each in wanted:
                each.grad = None
            run(layer, x).backward(inputs["grad"])  # torch's counter of FLOPs takes no autograd.grad of modules
            return [each.grad for each in wanted]

        return {"forward": infer, "training": train}

    def ours(layer: MoE, x: Tensor) -> Tensor:
        # Policies take no backend: the plan has the one of this block.
        with use_backend(setting.backend) if setting.backend else nullcontext():
            return layer(x)

    peers = {
        name: calls(partial(lambda layer, x, peer: peer(layer, x, setting.capacity), peer=peer))
        for name, peer in LAYERS.items()
    }
    base = _step(setting, lambda inputs, backend: None, ("x",), "grad", read, written, {})
    return replace(base, kernel=lambda _: calls(ours), peers=peers)


def run(setting: Setting, limits: measure.Ceilings, seconds: float, gpus: Iterable[predict.Gpu]) -> Iterator[Row]:
    """A row for each step and direction, measured and predicted; if `limits` is empty, predicted alone."""
    for job in jobs(setting):
        least = job.entry.least_bytes(job.shape, job.dtype, job.direction)
        row = Row(job.op, job.direction, flops(setting, job.op, job.direction), least)
        if limits:
            row.product = _slow_product(setting, limits, row.flops)
            (found,) = measure.run([job], limits, seconds, () if row.product else ("torch",))
            row.figure, row.remarks = next(iter(found.figures), None), found.left_out
            if row.figure and setting.device == "cuda":
                row.figure["launches"] = _launches(job)
        row.predicted = {gpu.name: _predicted(gpu, setting, job) for gpu in gpus}
        yield row


def jobs(setting: Setting) -> list[LayerJob]:
    where: dict[str, Any] = {"device": setting.device, "threads": setting.threads}
    where["backends"] = (setting.backend or "automatic",)
    return [
        LayerJob(name, setting.shape, setting.dtype, direction, **where, setting=setting)
        for direction in DIRECTIONS
        for name, each in steps(setting).items()
        if direction in each.directions
    ]


@cache  # tensors of `_routing` and `module` belong to the mode in which they were made
def _fake_mode() -> FakeTensorMode:
    return FakeTensorMode()


@cache
def flops(setting: Setting, step: str, direction: str) -> int:
    """FLOPs by the operators' formulas, on tensors without data."""
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    with _fake_mode(), FlopCounterMode(display=False) as counter:
        each = steps(replace(setting, fake=True))[step]
        each.kernel("")[direction](each.inputs(setting.shape, setting.dtype, setting.device))
    return int(counter.get_total_flops())


def _launches(job: LayerJob) -> int:
    """Kernels and copies that a call starts on the GPU."""
    inputs = job.entry.inputs(job.shape, job.dtype, job.device)
    with tracing.traced("cuda") as profiler:
        job.entry.kernel(job.backends[0])[job.direction](inputs)
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events() or ())


def predicted_dtype(setting: Setting) -> torch.dtype:
    return torch.bfloat16 if setting.dtype == torch.float32 else setting.dtype


def _predicted(gpu: predict.Gpu, setting: Setting, job: LayerJob) -> tuple[float, str]:
    """Least microseconds on a GPU, and what limits them. On a CPU in bfloat16, in which the counts are."""
    half = replace(setting, dtype=predicted_dtype(setting))
    entries = steps(half)
    parts: dict[str, tuple[str, ...]] = {"expert_mlp": ("up", "down", "combine")}
    parts["layer"] = ("router", "topk_gate", "make_plan", *parts["expert_mlp"])
    found = []
    for name in parts.get(job.op, (job.op,)):
        each = entries[name]
        direction = job.direction if job.direction in each.directions else "forward"
        least = each.least_bytes(job.shape, half.dtype, direction)
        op, work = OPERATIONS.get(name, name), flops(half, name, direction)
        found.append(predict.at(gpu, op, dtype_name(half.dtype), direction, least, work))
    return sum(us for us, _ in found), max(found)[1]
