"""Compares every kernel that can run here with its definition (backend "reference"): outputs and gradients.

Outputs in Operation.exact must equal the definition's bit for bit: their error is the number of wrong elements. The
error of any other output is relative to the definition in float64: the largest difference of an element, divided by
the largest finite magnitude of the definition's elements. It may be twice the error of the definition in the same
dtype, plus Operation.floor epsilons of that dtype (of float64: 32 times as many).

On a GPU the definition runs on torch's CUDA kernels, which may be wrong or differ where a result is not determined. A
kernel that disagrees there is compared with the definition on the CPU too, and that comparison decides.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from moe_kernels import backends
from moe_kernels.cases.call import Inputs
from moe_kernels.info import placement
from moe_kernels.verify import dispatch, grouped_gemm, kwta, kwta_linear, make_plan, sinkhorn, topk_gate, tree_gate
from moe_kernels.verify.operation import Case, Operation, Outputs

KERNELS = tuple(name for name in backends.NAMES if name != "reference")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

OPERATIONS: dict[str, Operation] = {
    "kwta": kwta.OPERATION,
    "kwta_linear": kwta_linear.OPERATION,
    "topk_gate": topk_gate.OPERATION,
    "make_plan": make_plan.OPERATION,
    "plan_expert_choice": make_plan.EXPERT_CHOICE,
    "plan_priority": make_plan.PRIORITY,
    "dispatch": dispatch.TO_ROWS,
    "combine": dispatch.FROM_ROWS,
    "grouped_gemm": grouped_gemm.GEMM,
    "expert_mlp": grouped_gemm.MLP,
    "expert_norms": grouped_gemm.NORMS,
    "sinkhorn": sinkhorn.OPERATION,
    "tree_gate": tree_gate.GATE,
    "tree_route": tree_gate.ROUTE,
}


@dataclass(frozen=True)
class Row:
    """The verdict on one operation, backend and dtype: "ok", "FAILED" or "not run".

    error, allowed: those of the output with the largest ratio error / allowed. note: the name of this output and its
    case ("" if no output has an error), the exception that a case raised, the reason why no case ran, or for an "ok"
    that only the definition on the CPU gives, DISPUTED.
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


def check(
    op: str,
    backend: str,
    dtype: torch.dtype,
    device: str,
    *,
    small: bool = False,
    part: tuple[int, int] = (0, 1),
    begun: Callable[[str], None] = lambda name: None,
) -> Row:
    """The Row of one operation, backend and dtype, from all cases whose sizes the backend takes; the first exception
    ends them.

    part: (i, n) takes part i of n of the cases, which are in an order in which neighbours share compiled kernels;
    `together` makes one Row of the n. begun: gets each case's name.
    """
    operation, cores = OPERATIONS[op], os.cpu_count() or 1
    count, worst, name, disputed = 0, (-1.0, 0.0, 0.0, ""), "first inputs", ""
    total = sum(1 for _ in operation.cases(dtype, "cpu", small))
    first, end = (index * total // part[1] for index in (part[0], part[0] + 1))
    try:  # around all cases: after a fault on a GPU every later call may raise
        with threads(1):
            for name, inputs in islice(operation.cases(dtype, device, small), first, end):
                if _too_large(op, backend, inputs, device):
                    continue
                begun(name)
                count += 1
                with poisoned(), threads(cores if _is_large(inputs) else 1):
                    found = operation.run(inputs, backend)
                compared, differs = _compared(operation, inputs, found, device)
                disputed = disputed or (differs and f"{DISPUTED}: {differs} of {name}")
                for output, error, allowed in compared:
                    excess = _excess(error, allowed)
                    if excess > worst[0]:
                        worst = (excess, error, allowed, f"worst: {output} of {name}")
    except Exception as raised:
        note = f"{name}: {error_text(raised)}"
        return Row(op, backend, dtype_name(dtype), device, count, math.inf, 0.0, "FAILED", note)
    excess, error, allowed, note = worst
    if excess > 1 and device == "cuda":
        note += ", on the CPU too"
    elif disputed:
        note = disputed
    verdict = "ok" if count and excess <= 1 else "FAILED"
    return Row(
        op, backend, dtype_name(dtype), device, count, error, allowed, verdict, note if error or disputed else ""
    )


# The note of a row whose kernel agrees with the definition on the CPU alone begins so.
DISPUTED = "agrees with the definition on the CPU, but not on this GPU, where torch's own kernels run it"


def together(rows: Sequence[Row]) -> Row:
    """The Row of all cases, from those of the parts of one operation, backend and dtype."""
    failed = [row for row in rows if row.verdict == "FAILED"]
    worst = max(failed or rows, key=lambda row: _excess(row.error, row.allowed))
    if not failed:
        unknown = [row for row in rows if row.verdict == "not run"]
        disputed = [row for row in rows if row.note.startswith(DISPUTED)]
        worst = (unknown or disputed or [worst])[0]
    return replace(worst, cases=sum(row.cases for row in rows))


def _compared(
    operation: Operation, inputs: Inputs, found: Outputs, device: str
) -> tuple[list[tuple[str, float, float]], str]:
    """`_errors`, from the definition on the CPU if that on the GPU disagrees or raises; then also what disagreed."""
    differs = ""
    try:
        compared = list(_errors(operation, inputs, found))
        differs = next((output for output, *errors in compared if _excess(*errors) > 1), "")
    except Exception as raised:
        if device != "cuda":
            raise
        differs, compared = f"the definition raises {error_text(raised)}, in the outputs", []
    if not differs or device != "cuda":
        return compared, ""
    there = {name: value.to("cpu") if hasattr(value, "to") else value for name, value in inputs.items()}
    compared = list(_errors(operation, there, {name: each.cpu() for name, each in found.items()}))
    return compared, differs if all(_excess(*errors) <= 1 for _, *errors in compared) else ""


def error_text(raised: Exception) -> str:
    return f"{type(raised).__name__}: {(str(raised).splitlines() or [''])[0]}"


def _excess(error: float, allowed: float) -> float:
    """error / allowed; infinite if no error is allowed, or any because the reference overflows."""
    if error == allowed == 0:
        return 0.0
    return error / allowed if 0 < allowed < math.inf else math.inf


def _too_large(op: str, backend: str, inputs: Inputs, device: str) -> bool:
    """Whether a size of the inputs is above the largest that the backend's kernels take."""
    if op not in backends.SIZES:
        return False
    sizes_of = backends.SIZES[op]
    sizes = sizes_of(**{name: inputs[name] for name in inspect.signature(sizes_of).parameters})
    return backends.too_large(sizes, backends.limits(backend, op, device)) is not None


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
