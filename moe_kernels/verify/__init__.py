"""Compares every kernel that can run here with its definition (backend "reference"): outputs and gradients.

Outputs in Operation.exact must equal the definition's bit for bit: their error is the number of wrong elements. The
error of any other output is relative to the definition in float64: the largest difference of an element, divided by
the largest finite magnitude of the definition's elements. It may be twice the error of the definition in the same
dtype, plus Operation.floor epsilons of that dtype (of float64: 32 times as many).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_kernels import backends
from moe_kernels.info import placement
from moe_kernels.verify import (
    combine,
    dispatch,
    expert_mlp,
    expert_norms,
    grouped_gemm,
    kwta,
    make_plan,
    plan_of_scores,
    sinkhorn,
    topk_gate,
    tree_gate,
)
from moe_kernels.verify.operation import Case, Inputs, Operation, Outputs

KERNELS = tuple(name for name in backends.NAMES if name != "reference")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

OPERATIONS: dict[str, Operation] = {
    "kwta": kwta.OPERATION,
    "topk_gate": topk_gate.OPERATION,
    "make_plan": make_plan.OPERATION,
    "plan_expert_choice": plan_of_scores.EXPERT_CHOICE,
    "plan_priority": plan_of_scores.PRIORITY,
    "dispatch": dispatch.OPERATION,
    "combine": combine.OPERATION,
    "grouped_gemm": grouped_gemm.OPERATION,
    "expert_mlp": expert_mlp.OPERATION,
    "expert_norms": expert_norms.OPERATION,
    "sinkhorn": sinkhorn.OPERATION,
    "tree_gate": tree_gate.GATE,
    "tree_route": tree_gate.ROUTE,
}


@dataclass(frozen=True)
class Row:
    """The verdict on one operation, backend and dtype: "ok", "FAILED" or "not run".

    error, allowed: those of the output with the largest ratio error / allowed. note: the name of this output and its
    case ("" if no output has an error), the exception that a case raised, or the reason why no case ran.
    """

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
    """Verifies operations `ops` on backends `names` (empty: all).

    One Row for each operation, backend and dtype; a single one for a backend that can run no dtype of an operation.
    small: only small inputs, as for interpreters.

    Raises:
        ValueError: an unknown operation or backend.
    """
    wanted, kernels = tuple(ops) or tuple(OPERATIONS), tuple(names) or KERNELS
    _check_known("operation", wanted, tuple(OPERATIONS))
    _check_known("backend", kernels, KERNELS)
    return (row for op in wanted for backend in kernels for row in _backend_rows(op, backend, small))


def idle(names: Iterable[str], rows: Sequence[Row]) -> str:
    """Text: those of `names` whose rows are all "not run", each with the note of its first row; "" for none."""
    by_backend = {name: [row for row in rows if row.backend == name] for name in names}
    reasons = {
        name: of[0].note for name, of in by_backend.items() if of and all(row.verdict == "not run" for row in of)
    }
    return "; ".join(f"{name} cannot run: {reason}" for name, reason in reasons.items())


def cases(op: str, dtype: torch.dtype = torch.float32, device: str = "cpu", *, small: bool = False) -> Iterator[Case]:
    _check_known("operation", (op,), tuple(OPERATIONS))
    return OPERATIONS[op].cases(dtype, device, small)


def cells(row: Row) -> tuple[str, ...]:
    ran = row.verdict != "not run"
    numbers = (f"{row.cases}", f"{row.error:.3g}", f"{row.allowed:.3g}") if ran else ("-", "-", "-")
    return (row.operation, row.backend, row.dtype, row.device, *numbers, row.verdict, row.note)


def _check_known(what: str, names: Iterable[str], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{what} must be one of {', '.join(known)}; got {name!r}")


def _backend_rows(op: str, backend: str, small: bool) -> Iterator[Row]:
    placements = {dtype: placement(op, backend, dtype) for dtype in DTYPES}
    if not any(each.device for each in placements.values()):
        yield Row(op, backend, "-", "-", 0, 0.0, 0.0, "not run", placements[torch.float32].reason)
        return
    for dtype, (device, reason) in placements.items():
        if device is None:
            yield Row(op, backend, dtype_name(dtype), "-", 0, 0.0, 0.0, "not run", reason)
        else:
            # On CPU tensors a GPU kernel runs in an interpreter, which is slow.
            yield check(op, backend, dtype, device, small=small or (device == "cpu" and backend != "cpu"))


def check(op: str, backend: str, dtype: torch.dtype, device: str, *, small: bool = False) -> Row:
    """The Row of one operation, backend and dtype, from all cases; the first exception ends them."""
    operation, cores = OPERATIONS[op], os.cpu_count() or 1
    count, worst, name = 0, (-1.0, 0.0, 0.0, ""), "first inputs"
    try:  # around all cases: after a fault on a GPU every later call may raise
        with threads(1):
            for name, inputs in operation.cases(dtype, device, small):
                count += 1
                with poisoned(), threads(cores if _is_large(inputs) else 1):
                    found = operation.run(inputs, backend)
                for output, error, allowed in _errors(operation, inputs, found):
                    excess = _excess(error, allowed)
                    if excess > worst[0]:
                        worst = (excess, error, allowed, f"worst: {output} of {name}")
    except Exception as raised:
        note = f"{name}: {error_text(raised)}"
        return Row(op, backend, dtype_name(dtype), device, count, math.inf, 0.0, "FAILED", note)
    excess, error, allowed, note = worst
    verdict = "ok" if count and excess <= 1 else "FAILED"
    return Row(op, backend, dtype_name(dtype), device, count, error, allowed, verdict, note if error else "")


def error_text(raised: Exception) -> str:
    return f"{type(raised).__name__}: {(str(raised).splitlines() or [''])[0]}"


def _excess(error: float, allowed: float) -> float:
    """error / allowed; infinite if no error is allowed, or any because the reference overflows."""
    if error == allowed == 0:
        return 0.0
    return error / allowed if 0 < allowed < math.inf else math.inf


def _is_large(inputs: Inputs) -> bool:
    return any(isinstance(value, Tensor) and value.numel() >= 2**15 for value in inputs.values())


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside the block torch.empty fills memory with NaN (integers: the largest), to show unwritten elements."""
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
    expected = operation.run(inputs, "reference")
    computed = [name for name in expected if name not in operation.exact]
    truth = operation.run({key: _double(value) for key, value in inputs.items()}, "reference") if computed else {}
    for name, reference in expected.items():
        got = found[name]
        if got.shape != reference.shape or got.dtype != reference.dtype:
            yield name, math.inf, 0.0
        elif name in operation.exact:
            yield name, float((bits_of(got) != bits_of(reference)).sum()), 0.0
        else:
            # In float64 the reference is also the truth, so its error counts as 0 although it rounds too.
            floor = operation.floor * torch.finfo(reference.dtype).eps * (32 if reference.dtype == torch.float64 else 1)
            yield name, relative_error(got, truth[name]), 2 * relative_error(reference, truth[name]) + floor


def relative_error(got: Tensor, truth: Tensor) -> float:
    """Largest |got - truth| over the largest finite |truth|, or over 1 if that is 0 or missing.

    Two NaNs and equal infinities are no error; NaN or an infinity against anything else is an infinite error.
    """
    got, truth = got.detach().double(), truth.detach().double()
    same = (got == truth) | (got.isnan() & truth.isnan())
    error = torch.where(same, 0.0, (got - truth).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    size = truth.abs()[truth.isfinite()]
    scale = float(size.max()) if size.numel() else 0.0
    return float(error.max()) / (scale or 1.0) if error.numel() else 0.0


def bits_of(x: Tensor) -> Tensor:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(integers[x.element_size()]) if x.is_floating_point() else x


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
