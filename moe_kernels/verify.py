"""Every kernel that can run here against its definition: values, masks and gradients, on easy and on hostile inputs.

An output that selects or copies must equal the reference bit for bit: its error is the number of wrong elements, and
none is allowed. An output that computes may be off from the float64 reference by twice what the reference of its own
dtype is off, plus the operation's floor; these errors are relative to the output's largest magnitude.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from moe_kernels import backends
from moe_kernels.info import placement
from moe_kernels.ops import combine, dispatch, kwta, plan, sinkhorn, topk_gate

KERNELS = tuple(name for name in backends.NAMES if name != "reference")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Inputs = dict[str, Any]
Outputs = dict[str, Tensor]


class Case(NamedTuple):
    """One input of an operation, with a name that says what is special about it."""

    name: str
    inputs: Inputs


@dataclass(frozen=True)
class Operation:
    """How one operation is verified.

    cases(dtype, device, small): inputs; `small` ones suit interpreters and sanitizers (rows of <= 512, <= 4 of them).
    run(inputs, backend): outputs by name, gradients among them.
    exact: names of the outputs that must be the same bits as the reference's.
    floor: what computed outputs may be off beyond twice the reference's error, in units of the dtype's epsilon.
    """

    cases: Callable[[torch.dtype, str, bool], Iterator[Case]]
    run: Callable[[Inputs, str], Outputs]
    exact: frozenset[str]
    floor: float = 0.0


@dataclass(frozen=True)
class Row:
    """The verdict on one operation, backend and dtype: "ok", "FAILED" or "not run"; the note says why or where."""

    operation: str
    backend: str
    dtype: str
    device: str
    cases: int
    error: float
    allowed: float
    verdict: str
    note: str


def verify(ops: Iterable[str] = (), names: Iterable[str] = (), *, small: bool = False) -> Iterator[Row]:
    """Verifies operations `ops` on backends `names` (all of them where empty), one Row per dtype.

    Raises:
        ValueError: an unknown operation or backend.
    """
    wanted, kernels = tuple(ops) or tuple(OPERATIONS), tuple(names) or KERNELS
    _check_known("operation", wanted, tuple(OPERATIONS))
    _check_known("backend", kernels, KERNELS)
    return (row for op in wanted for backend in kernels for row in _backend_rows(op, backend, small))


def cases(op: str, dtype: torch.dtype = torch.float32, device: str = "cpu", *, small: bool = False) -> Iterator[Case]:
    """The inputs on which `op` is verified."""
    _check_known("operation", (op,), tuple(OPERATIONS))
    return OPERATIONS[op].cases(dtype, device, small)


def cells(row: Row) -> tuple[str, ...]:
    """A row as text for a table; where nothing ran, its numbers are dashes."""
    ran = row.verdict != "not run"
    numbers = (f"{row.cases}", f"{row.error:.3g}", f"{row.allowed:.3g}") if ran else ("-", "-", "-")
    return (row.operation, row.backend, row.dtype, row.device, *numbers, row.verdict, row.note)


def _check_known(what: str, names: Iterable[str], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{what} must be one of {', '.join(known)}; got {name!r}")


def _backend_rows(op: str, backend: str, small: bool) -> Iterator[Row]:
    places = {dtype: placement(op, backend, dtype) for dtype in DTYPES}
    if not any(place.device for place in places.values()):
        yield Row(op, backend, "-", "-", 0, 0.0, 0.0, "not run", places[torch.float32].reason)
        return
    for dtype, (device, reason) in places.items():
        if device is None:
            yield Row(op, backend, _short(dtype), "-", 0, 0.0, 0.0, "not run", reason)
        else:
            # A GPU backend on CPU tensors is an interpreter or the host executor: about 1 ms a program.
            yield check(op, backend, dtype, device, small=small or (device == "cpu" and backend != "cpu"))


def check(op: str, backend: str, dtype: torch.dtype, device: str, *, small: bool = False) -> Row:
    """Runs every case of one operation, backend and dtype, and keeps the worst error over the allowed one."""
    with threads(
        1
    ):  # small tensors: torch's threads would spin longer than they work, and longer yet on a busy machine
        return _check(op, backend, dtype, device, small)


def _check(op: str, backend: str, dtype: torch.dtype, device: str, small: bool) -> Row:
    operation, cores = OPERATIONS[op], os.cpu_count() or 1
    count, worst = 0, (-1.0, 0.0, 0.0, "")
    for name, inputs in operation.cases(dtype, device, small):
        count += 1
        try:
            with poisoned(), threads(cores if _is_large(inputs) else 1):
                found = operation.run(inputs, backend)
        except Exception as raised:
            note = f"{name}: {type(raised).__name__}: {(str(raised).splitlines() or [''])[0]}"
            return Row(op, backend, _short(dtype), device, count, math.inf, 0.0, "FAILED", note)
        for output, error, allowed in _errors(operation, inputs, found):
            excess = error / allowed if allowed else (math.inf if error else 0.0)
            if excess > worst[0]:
                worst = (excess, error, allowed, f"worst: {output} of {name}")
    excess, error, allowed, note = worst
    failed = excess > 1
    verdict = "FAILED" if failed else "ok"
    return Row(op, backend, _short(dtype), device, count, error, allowed, verdict, note if failed or error else "")


def _is_large(inputs: Inputs) -> bool:
    return any(isinstance(value, Tensor) and value.numel() >= 2**15 for value in inputs.values())


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Within the block torch, and the CPU kernels with it, may use that many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def poisoned() -> Iterator[None]:
    """Within the block torch fills fresh memory with NaN, so that an element that no kernel wrote shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined, unused-ignore]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined, unused-ignore]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined, unused-ignore]


def _errors(operation: Operation, inputs: Inputs, found: Outputs) -> Iterator[tuple[str, float, float]]:
    """(output, error, allowed error) of every output."""
    expected = operation.run(inputs, "reference")
    computed = [name for name in expected if name not in operation.exact]
    truth = operation.run({key: _double(value) for key, value in inputs.items()}, "reference") if computed else {}
    for name, reference in expected.items():
        got = found[name]
        if got.shape != reference.shape or got.dtype != reference.dtype:
            yield name, math.inf, 0.0
        elif name in operation.exact:
            yield name, float((_bits(got) != _bits(reference)).sum()), 0.0
        else:
            # Nothing wider judges float64: two ways to sum a row of 1024 differ by some 20 eps.
            floor = operation.floor * torch.finfo(reference.dtype).eps * (32 if reference.dtype == torch.float64 else 1)
            yield name, relative_error(got, truth[name]), 2 * relative_error(reference, truth[name]) + floor


def relative_error(got: Tensor, truth: Tensor) -> float:
    """Largest |got - truth| over the largest finite |truth|; infinite where only one of the two is finite."""
    got, truth = got.detach().double(), truth.detach().double()
    same = (got == truth) | (got.isnan() & truth.isnan())
    off = torch.where(same, 0.0, (got - truth).abs()).nan_to_num(nan=math.inf)
    size = truth.abs()[truth.isfinite()]
    scale = float(size.max()) if size.numel() else 0.0
    return float(off.max()) / (scale or 1.0) if off.numel() else 0.0


def _bits(x: Tensor) -> Tensor:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(integers[x.element_size()]) if x.is_floating_point() else x


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kwta_fill(kind: str, rows: int, n: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if kind == "constant":
        return torch.full((rows, n), 0.5, dtype=dtype)
    if kind == "ties":
        return torch.randint(-3, 4, (rows, n), generator=generator).to(dtype)
    x = torch.randn(rows, n, generator=generator).to(dtype)
    if kind == "sorted":
        return x.sort(-1).values
    if kind == "special":
        limits = torch.finfo(dtype)
        low = limits.smallest_normal / 4
        hostile = [math.nan, math.inf, -math.inf, 0.0, -0.0, low, -low, limits.max, limits.min]
        which = torch.randint(0, 2 * len(hostile), (rows, n), generator=generator)
        for index, value in enumerate(hostile):
            x = x.masked_fill(which == index, value)
    return x


def _kwta_layout(x: Tensor, layout: str) -> Tensor:
    """The same values in rows that lie apart ("strided"), in columns ("transposed"), or as they are."""
    if layout == "strided":
        return torch.nn.functional.pad(x, (0, 3))[:, : x.shape[1]]
    return x.t().contiguous().t() if layout == "transposed" else x


def _kwta_cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    """Kinds of rows x sizes x winners x tie rules; layout and `values` are drawn, so that none goes with a tie rule."""
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    sizes = {1: 1, 33: 2, 500: 1} if small else {1: 3, 31: 5, 100: 9, 1000: 4, 1025: 3, 4099: 2, 16400: 3}
    for n, rows in sizes.items():
        for kind in ("normal", "ties", "constant", "special", "sorted"):
            for index, k in enumerate(sorted({0, 1, n // 2, n})):
                for ties in (kwta.TIES[index % 3],) if small or n > 100 else kwta.TIES:
                    layout = draw.choice(("contiguous", "strided", "transposed"))
                    given = draw.random() < 0.5
                    fill = {"x": kind, "grad": "normal"} | ({"values": "special"} if given else {})
                    tensors = {
                        name: _kwta_layout(_kwta_fill(each, rows, n, dtype, generator), layout).to(device)
                        for name, each in fill.items()
                    }
                    inputs = {"values": None, **tensors, "k": k, "ties": ties}
                    yield Case(f"{kind} {rows} x {n}, k={k}, {ties}, {layout}{', values=' * given}", inputs)


def _kwta_run(inputs: Inputs, backend: str) -> Outputs:
    x, values, k, ties = (inputs[name] for name in ("x", "values", "k", "ties"))
    leaf = (x if values is None else values).detach().requires_grad_()
    given = {"ties": ties, "backend": backend}
    y = kwta.kwta(leaf, k, **given) if values is None else kwta.kwta(x, k, values=leaf, **given)
    (gradient,) = torch.autograd.grad(y, leaf, inputs["grad"])
    inference = kwta.kwta(x, k, values=values, **given)
    return {"y": y, "y without grad": inference, "mask": kwta.kwta_mask(x, k, **given), "gradient": gradient}


def _gate_cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    draw = torch.Generator().manual_seed(0)
    for tokens, experts in ((2, 7), (3, 33)) if small else ((1, 1), (9, 7), (5, 100), (3, 1024), (300, 64)):
        for kind in ("normal", "ties", "masked"):
            logits = _kwta_fill("ties" if kind == "ties" else "normal", tokens, experts, dtype, draw)
            if kind == "masked":
                logits[:, 1::2] = -math.inf
            for k in sorted({1, min(2, experts), (experts + 1) // 2}):
                for order in topk_gate.ORDERS:
                    grad = torch.randn(tokens, k, generator=draw).to(dtype)
                    inputs = {"logits": logits.to(device), "k": k, "order": order, "grad": grad.to(device)}
                    yield Case(f"{kind} {tokens} x {experts}, k={k}, {order}", inputs)


def _gate_run(inputs: Inputs, backend: str) -> Outputs:
    logits = inputs["logits"].detach().requires_grad_()
    weights, experts = topk_gate.topk_gate(logits, inputs["k"], order=inputs["order"], backend=backend)
    (gradient,) = torch.autograd.grad(weights, logits, inputs["grad"])
    return {"weights": weights, "experts": experts, "gradient": gradient}


def _routings(small: bool) -> Iterator[tuple[str, Tensor, int, int | None]]:
    """(what it is, experts (T, K), E, capacity): uniform, adversarial, with choices of nobody, empty."""
    draw = torch.Generator().manual_seed(0)
    for tokens, k, num_experts in ((7, 2, 5),) if small else ((7, 2, 5), (100, 1, 1), (513, 8, 128), (40, 3, 1000)):
        uniform = torch.randint(0, num_experts, (tokens, k), generator=draw)
        for capacity in (None, 0, 3):
            yield f"uniform {tokens} x {k}, E={num_experts}, C={capacity}", uniform, num_experts, capacity
        yield f"one expert {tokens} x {k}, E={num_experts}", uniform * 0 + num_experts - 1, num_experts, 9
        nobody = uniform.masked_fill(torch.rand(tokens, k, generator=draw) < 0.4, -1)
        yield f"some chose nobody {tokens} x {k}, E={num_experts}", nobody, num_experts, None
    yield "no tokens", torch.zeros(0, 2, dtype=torch.int64), 3, 2


def _plan_cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    for index, (name, experts, num_experts, capacity) in enumerate(_routings(small)):
        priority = torch.randint(0, 5, (experts.shape[0],)).to(dtype).to(device) if index % 2 else None
        order = plan.ORDERS[index // 2 % 2]
        chosen = experts.to(torch.int32 if index % 3 else torch.int64).to(device)
        inputs = {"experts": chosen, "num_experts": num_experts, "capacity": capacity, "priority": priority}
        yield Case(f"{name}, {order}{', priority' * (priority is not None)}", inputs | {"order": order})


PLAN = ("expert_offsets", "row_token", "row_choice", "slot_row", "requested", "kept", "dropped")


def _plan_run(inputs: Inputs, backend: str) -> Outputs:
    made = plan.make_plan(**inputs, backend=backend)
    return {name: getattr(made, name) for name in PLAN}


def _moving_cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    for index, (name, experts, num_experts, capacity) in enumerate(_routings(small)):
        made = plan.make_plan(experts, num_experts, capacity=capacity, backend="reference")
        made = tree_map(lambda each: each.to(device) if isinstance(each, Tensor) else each, made)
        dim = (1, 17, 64)[index % 3]
        sizes = {"x": (made.num_tokens, dim), "rows": (made.num_rows, dim), "weights": experts.shape}
        tensors = {each: torch.randn(size).to(dtype).to(device) for each, size in sizes.items()}
        yield Case(f"{name}, D={dim}", {"plan": made, **tensors})


def _dispatch_run(inputs: Inputs, backend: str) -> Outputs:
    x = inputs["x"].detach().requires_grad_()
    rows = dispatch.dispatch(x, inputs["plan"], backend=backend)
    (gradient,) = torch.autograd.grad(rows, x, inputs["rows"])
    return {"rows": rows, "gradient": gradient}


def _combine_run(inputs: Inputs, backend: str) -> Outputs:
    rows, weights = (inputs[name].detach().requires_grad_() for name in ("rows", "weights"))
    y = combine.combine(rows, inputs["plan"], weights, backend=backend)
    to_rows, to_weights = torch.autograd.grad(y, (rows, weights), inputs["x"])
    plain = combine.combine(rows.detach(), inputs["plan"], backend=backend)
    return {"y": y, "y without weights": plain, "gradient of rows": to_rows, "gradient of weights": to_weights}


def _sinkhorn_cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    draw = torch.Generator().manual_seed(0)
    for n, iterations in ((2, 3), (5, 4)) if small else ((1, 2), (4, 20), (16, 30), (17, 20), (40, 5)):
        # float64 itself knows scores / tau to 1e-9 only at 1e-7: such temperatures are for narrower types.
        for tau in (1.0, 0.05) if dtype == torch.float64 else (1.0, 0.05, 1e-3, 1e-7):
            for kind in ("normal", "forbidden"):
                scores = torch.randn(3, n, n, generator=draw).to(dtype)
                if kind == "forbidden":
                    scores[torch.rand(3, n, n, generator=draw) < 0.3] = -math.inf
                grad = torch.randn(3, n, n, generator=draw).to(dtype)
                inputs = {"scores": scores.to(device), "iterations": iterations, "tau": tau, "grad": grad.to(device)}
                yield Case(f"{kind} 3 x {n} x {n}, R={iterations}, tau={tau:g}", inputs)


def _sinkhorn_run(inputs: Inputs, backend: str) -> Outputs:
    scores, tau = inputs["scores"].detach().requires_grad_(), inputs["tau"]
    p = sinkhorn.sinkhorn(scores, inputs["iterations"], tau=tau, backend=backend)
    if tau < 0.05:  # the gradient of a matrix of zeros and ones is what float64 rounds, times 1 / tau
        return {"p": p}
    return {"p": p, "gradient": torch.autograd.grad(p, scores, inputs["grad"])[0]}


OPERATIONS: dict[str, Operation] = {
    "kwta": Operation(_kwta_cases, _kwta_run, exact=frozenset({"y", "y without grad", "mask", "gradient"})),
    "topk_gate": Operation(_gate_cases, _gate_run, exact=frozenset({"experts"}), floor=2.0),
    "make_plan": Operation(_plan_cases, _plan_run, exact=frozenset(PLAN)),
    "dispatch": Operation(_moving_cases, _dispatch_run, exact=frozenset({"rows"}), floor=1.0),
    "combine": Operation(_moving_cases, _combine_run, exact=frozenset(), floor=1.0),
    "sinkhorn": Operation(_sinkhorn_cases, _sinkhorn_run, exact=frozenset(), floor=8.0),
}
