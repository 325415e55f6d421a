"""Cases: honest calls with one or more changed arguments."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from moe_kernels.backends import cpu, reconsider
from moe_kernels.backends.native import grouped_gemm_cpu
from tests.helpers.operators import of_experts, of_gates, of_routing, of_rows, of_topk_gate
from tests.helpers.operators.changes import EXPANDED, LAYOUT, changes
from tests.helpers.operators.judge import Schema, fault
from tests.helpers.operators.operator import Call, Operator

FILES = (of_rows, of_routing, of_experts, of_gates, of_topk_gate)
OPERATORS: dict[str, Operator] = {name: each for file in FILES for name, each in file.OPERATORS.items()}

schema_of = cache(Schema)


@dataclasses.dataclass(frozen=True)
class Case:
    """The honest call `honest` of an operator for a dtype, with changes: pairs of an argument and a label.

    form: an instruction set of the CPU; "torch": PyTorch multiplies, as it does large experts; "": the widest set.
    """

    operator: str
    dtype: str
    honest: str
    changes: tuple[tuple[str, str], ...] = ()
    form: str = ""

    def __str__(self) -> str:
        changed = " and ".join(f"{name}: {label}" for name, label in self.changes) or "unchanged"
        return f"{self.operator} ({', '.join(filter(None, (self.dtype, self.honest, self.form)))}) {changed}"

    def call(self) -> tuple[Call, Call | None]:
        """The call and, if only layouts in memory were changed, the same call with contiguous arguments."""
        schema, operator = schema_of(self.operator), OPERATORS[self.operator]
        honest = _honest(self.operator, self.dtype)[self.honest]
        made = dict(honest)
        for name, label in self.changes:
            made[name] = changes(operator, honest, name, schema.kinds[name])[label]()
        if not self.changes or not all(label.startswith(LAYOUT) for _, label in self.changes):
            return made, None
        return made, {name: each.contiguous() if isinstance(each, Tensor) else each for name, each in made.items()}

    def fault(self) -> str | None:
        call, canonical = self.call()
        changed = {name for name, _ in self.changes}
        with _form(self.form), _no_triton():
            return fault(
                schema_of(self.operator), OPERATORS[self.operator], call, changed, canonical, self.form == "torch"
            )


@contextmanager
def _form(form: str) -> Iterator[None]:
    if form == "torch":
        with patch.object(grouped_gemm_cpu, "in_cpp", lambda *args: False):
            yield
    else:
        with patch.object(cpu, "isa", cpu.module.isas.index(form) if form else cpu.isa):
            yield


@contextmanager
def _no_triton() -> Iterator[None]:
    """In the block Triton takes no CPU tensors, as without tests/ptx."""
    kernels = sys.modules.get("moe_kernels.backends.triton")
    if kernels is None:
        yield
        return
    from triton.runtime.jit import JITFunction

    def run(*args: Any, **named: Any) -> None:
        raise AssertionError("a Triton kernel starts with CPU tensors")

    with patch.object(kernels, "device_type", "cuda"), patch.object(JITFunction, "run", run):
        reconsider()  # a test on tests/ptx before may have made choices
        try:
            yield
        finally:
            reconsider()


@cache
def _honest(name: str, dtype: str) -> dict[str, Call]:
    return OPERATORS[name].honest(getattr(torch, dtype))


def labels(name: str, dtype: str, honest: str) -> Iterator[tuple[str, str]]:
    """All pairs of an argument and a change of it."""
    call = _honest(name, dtype)[honest]
    for argument, kind in schema_of(name).kinds.items():
        for label in changes(OPERATORS[name], call, argument, kind):
            yield argument, label


def cases(name: str, dtype: str = "float32", form: str = "") -> list[Case]:
    """The honest calls of an operator, and these with each single change."""
    found = []
    for honest in _honest(name, dtype):
        found.append(Case(name, dtype, honest, (), form))
        found += [Case(name, dtype, honest, (pair,), form) for pair in labels(name, dtype, honest)]
    return found


def pair(draw: random.Random, name: str, dtype: str, form: str) -> Case:
    """A random honest call with changes of two of its arguments."""
    honest = draw.choice(sorted(_honest(name, dtype)))
    every = [each for each in labels(name, dtype, honest) if each[1] != EXPANDED]
    first = draw.choice(every)
    others = [each for each in every if each[0] != first[0]]
    return Case(name, dtype, honest, (first, draw.choice(others)) if others else (first,), form)


def report(given: Sequence[Case], found: Sequence[str | None]) -> str:
    """A line for each fault: what was changed, in which honest calls, and the outcome."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for case, outcome in zip(given, found, strict=True):
        if outcome is not None:
            what = " and ".join(f"{name}: {label}" for name, label in case.changes) or "unchanged"
            where = ", ".join(filter(None, (case.dtype, case.honest, case.form)))
            lines.setdefault((case.operator, what, outcome), []).append(where)
    return "\n".join(f"{name} {what} ({'; '.join(where)}): {outcome}" for (name, what, outcome), where in lines.items())
