"""Runs a call and says what is wrong with its outcome."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from tests.helpers.operators.guarded import allocations, placed
from tests.helpers.operators.operator import Call, Operator, contract, given_of

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 3e-2, torch.bfloat16: 2e-1}
NAMED = (TypeError, ValueError, RuntimeError)


class Schema:
    """The schema of an operator: its arguments and their types."""

    def __init__(self, name: str) -> None:
        self.name, self.packet = name, getattr(torch.ops.moe_kernels, name).default
        arguments = self.packet._schema.arguments
        self.kinds = {each.name: str(each.real_type) for each in arguments}
        self.written = {each.name for each in arguments if each.is_write}
        self.optional = {each for each, kind in self.kinds.items() if kind.startswith("Optional")}

    def missing(self, call: Call) -> bool:
        """Whether a required tensor is None."""
        return any(kind == "Tensor" and call[name] is None for name, kind in self.kinds.items())

    def __call__(self, call: Call) -> tuple[Any, ...]:
        found = self.packet(*(call[name] for name in self.kinds))
        return () if found is None else tuple(found) if isinstance(found, tuple | list) else (found,)


def every_operator() -> list[str]:
    """The names of all registered operators."""
    names = {each.name for each in torch._C._jit_get_all_schemas() if each.name.startswith("moe_kernels::")}
    return sorted(name.removeprefix("moe_kernels::") for name in names)


def fault(
    schema: Schema, operator: Operator, call: Call, changed: set[str], canonical: Call | None, reordered: bool = False
) -> str | None:
    """What is wrong with the outcome of a call; None if nothing.

    changed: the arguments that differ from an honest call. canonical: a call that must give the same bits, or None.
    reordered: whether sums may depend on where tensors are in memory, as PyTorch's products do.
    """
    outcomes: list[tuple[Tensor, ...]] = []
    for at_end, pattern in ((True, "nan"), (True, "12345"), (False, "nan")):
        given = {name: placed(each, at_end) if isinstance(each, Tensor) else each for name, each in call.items()}
        with allocations(at_end, pattern):
            try:
                outcomes.append(schema(given))
            except Exception as error:
                return _fault_of_error(schema, operator, call, changed, error, again=bool(outcomes))
        for name, each in given.items():
            if name not in schema.written and isinstance(each, Tensor) and not _same_bits(each, call[name]):
                return f"wrote to {name}"
    verdict = contract(operator, call, schema.optional)
    if verdict.wrong:
        return f"is accepted, although {', '.join(sorted(verdict.blamed))} cannot be right"
    first, *others = outcomes
    for other in others[: 1 if reordered else 2]:
        for number, pair in enumerate(zip(first, other, strict=True)):
            if not _same_bits(*pair):
                return f"result {number} depends on what its memory held before"
    if canonical is not None:
        return _fault_of_layout(first, schema(canonical), call, reordered or bool(changed & set(operator.reordered)))
    return _fault_of_result(operator, call, first, missing=schema.missing(call))


def _fault_of_error(
    schema: Schema, operator: Operator, call: Call, changed: set[str], error: Exception, again: bool
) -> str | None:
    said = f"{type(error).__name__}: {error}".replace("\n", " ")[:240]
    if again:
        return f"returns once, then raises {said}"
    verdict = contract(operator, call, schema.optional)
    if verdict.legal:
        try:
            operator.definition(given_of(operator, call))
        except Exception:
            return None
        return f"refuses a legal call: {said}"
    if f"moe_kernels::{schema.name}() Expected a value of type" in str(error):
        return None
    if not isinstance(error, NAMED):
        return f"raises another kind of error: {said}"
    names = _families(schema.name, operator, call)
    found = next(filter(None, (re.match(each, str(error)) for each in names)), None)
    if found is None:
        return f"does not name the operator: {said}"
    rest, wrong = str(error)[found.end() :], set(schema.kinds) if operator.loose else changed | verdict.blamed
    if not any(re.search(rf"(?<!\w){name}(?!\w)", rest) for name in wrong):
        return f"names no wrong argument: {said}"
    return None


def _families(name: str, operator: Operator, call: Call) -> list[str]:
    families = [name, re.sub("_(fwd|bwd)$", "", name), *operator.families]
    families += [str(call["op"])] if name == "refuse_bad_rows" else []
    return [f"{re.escape(family)}(_fwd|_bwd)?:" for family in families]


def _fault_of_layout(
    found: tuple[Tensor, ...], expected: tuple[Tensor, ...], call: Call, reordered: bool
) -> str | None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not _same_bits(one, other) and not (reordered and _different(one, other, _tolerance(call)) is None):
            return f"result {number} is not that of contiguous arguments ({_distance(one, other)})"
    return None


def _fault_of_result(operator: Operator, call: Call, found: tuple[Tensor, ...], missing: bool) -> str | None:
    """missing: whether a required tensor is None. Then the definition may read it, although the operator did not."""
    try:
        expected = operator.definition(given_of(operator, call))
    except Exception as error:
        return None if missing else f"is accepted, but the definition raises {type(error).__name__}: {error}"[:240]
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if other is not None and (wrong := _different(one, other, 0.0 if operator.exact else _tolerance(call))):
            return f"result {number} is wrong: {wrong}"
    return None


def _tolerance(call: Call) -> float:
    """That of the coarsest dtype among the arguments."""
    return max((TOLERANCE.get(each.dtype, 0.0) for each in call.values() if isinstance(each, Tensor)), default=0.0)


def _bits(x: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(integers[x.itemsize])


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))


def _distance(one: Tensor, other: Tensor) -> str:
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype} {tuple(one.shape)}, not {other.dtype} {tuple(other.shape)}"
    return f"they differ by up to {(one.double() - other.double()).abs().max():.3g}"


def _different(got: Tensor, expected: Tensor, tolerance: float) -> str | None:
    if got.numel() == 0 and expected.numel() == 0 and expected.dim() == 1:
        return None  # no gradient wanted
    if got.shape != expected.shape:
        return f"{tuple(got.shape)}, not {tuple(expected.shape)}"
    if got.numel() == 0:
        return None
    if tolerance == 0.0 or not got.dtype.is_floating_point:
        wrong = int(((got != expected) & ~((got != got) & (expected != expected))).sum())
        return f"{wrong} of {got.numel()} elements" if wrong else None
    got, expected = got.double(), expected.detach().double()
    largest = max(1.0, float(expected.nan_to_num(0, 0, 0).abs().max()))
    close = torch.isclose(got, expected, rtol=tolerance, atol=tolerance * largest, equal_nan=True)
    if bool(close.all()):
        return None
    return f"{int((~close).sum())} of {got.numel()} elements, by up to {float((got - expected).abs().max()):.3g}"
