"""Operator: what an operator takes and returns. `contract` decides whether a call keeps to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

Call = dict[str, Any]  # the arguments of an operator by their names in its schema, in that order
Given = SimpleNamespace  # the arguments of a call and, in capitals, the sizes of its tensors
Rule = tuple[Callable[[Given], bool], str]  # what must hold, and the arguments that are wrong if it does not

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Operator:
    """What an operator takes and returns.

    Args:
        tensors: for each tensor argument its dtype and the letters of its dimensions, as "f T D". Equal letters are
            equal sizes; "..." stands for any number of dimensions. Dtypes: f, a floating-point dtype, the same for all
            f; c, that in which f is computed; any, any floating-point dtype; all, any dtype; i, int32; ij, int32 or
            int64; short, these or int16; d, float64; c32, float32, or also float64 if f is. An argument that is a dtype
            has "f" alone.
        honest: honest calls by name, for a dtype. `changes` changes one argument of such a call.
        definition: the results of a call, or None in place of a result that has no definition. Raises if an index that
            it reads is out of range.
        ints: the least and the largest value.
        floats: whether a value is allowed. choices: the allowed strings. flags: the number of bools.
        index: the least value of an index array, and the first value that is too large.
        rules: what must hold besides. soft: what should hold; if it does not, the operator may refuse the call or
            return what the definition returns. loose: every rule is soft, as PyTorch alone computes the results.
        saved: results of a forward pass that the backward pass takes, and which no other values can replace.
        free: arguments that may have any value. families: other names of the operator in error messages.
        exact: results are equal to the definition's, to the bit; else within a tolerance.
        reordered: arguments whose strides decide in which order products are summed.
    """

    tensors: dict[str, str]
    honest: Callable[[torch.dtype], dict[str, Call]]
    definition: Callable[[Given], tuple[Tensor | None, ...]]
    ints: dict[str, tuple[int, Callable[[Given], int]]] = field(default_factory=dict)
    floats: dict[str, Callable[[Given], bool]] = field(default_factory=dict)
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    flags: dict[str, int] = field(default_factory=dict)
    index: dict[str, tuple[int, Callable[[Given], int]]] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    soft: tuple[Rule, ...] = ()
    loose: bool = False
    saved: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    free: frozenset[str] = frozenset()
    exact: bool = False
    reordered: tuple[str, ...] = ()
    backends: tuple[str, ...] = ("cpu", "triton", "cuda")


class Verdict(NamedTuple):
    """legal: the call must return what the definition returns. wrong: it must raise. Else (both are False) it may do
    either. blamed: the arguments that are wrong or doubtful."""

    legal: bool
    wrong: bool
    blamed: set[str]


def computed(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def contract(operator: Operator, call: Call, optional: set[str]) -> Verdict:
    """`optional`: the arguments that may be None by the operator's schema."""
    given, blamed = _sizes(operator, call)
    for _, names in operator.rules:  # of sizes that contradict each other, the rule has seen the first alone
        blamed |= set(names.split()) if blamed & set(names.split()) else set()
    blamed |= _dtypes(operator, call) | _scalars(operator, given) | _broken(operator.rules, given)
    doubtful = {name for name in operator.tensors if call[name] is None and name not in optional}
    doubtful |= {"backend"} if call.get("backend") in ("triton", "cuda") else set()
    if not blamed:
        doubtful |= _broken(operator.soft, given)
    if operator.loose:
        blamed, doubtful = set(), blamed | doubtful
    return Verdict(not blamed and not doubtful, bool(blamed), blamed | doubtful)


def given_of(operator: Operator, call: Call) -> Given:
    return _sizes(operator, call)[0]


def _sizes(operator: Operator, call: Call) -> tuple[Given, set[str]]:
    given, blamed, bound = Given(**call), set[str](), dict[str, tuple[int, str]]()
    for name, text in operator.tensors.items():
        (_, *letters), tensor = text.split(), call[name]
        if not isinstance(tensor, Tensor):
            continue
        shape = tuple(tensor.shape)
        if letters[:1] == ["..."]:
            letters = letters[1:]
            shape = shape[len(shape) - len(letters) :] if len(shape) >= len(letters) else ()
        if len(shape) != len(letters):
            blamed.add(name)
            continue
        for letter, size in zip(letters, shape, strict=True):
            before, by = bound.setdefault(letter, (size, name))
            if before != size:
                blamed |= {name, by} | {each for each, spec in operator.tensors.items() if letter in spec.split()[1:]}
            setattr(given, letter, before)
    return given, blamed


def _dtypes(operator: Operator, call: Call) -> set[str]:
    kinds = {name: text.split()[0] for name, text in operator.tensors.items()}
    of = {name: each.dtype if isinstance(each, Tensor) else each for name, each in call.items() if name in kinds}
    of = {name: each for name, each in of.items() if each is not None and kinds[name] != "all"}
    plain = {"i": (torch.int32,), "ij": (torch.int32, torch.int64), "d": (torch.float64,), "c32": (torch.float32,)}
    plain["short"] = (torch.int16, *plain["ij"])
    wrong = {name for name, dtype in of.items() if dtype not in plain.get(kinds[name], FLOATING)}
    tied = {name: dtype for name, dtype in of.items() if kinds[name] in "fc" and name not in wrong}
    main = next((dtype for name, dtype in tied.items() if kinds[name] == "f"), None)
    if main == torch.float64:  # c32 may then also be float64
        wrong -= {name for name, dtype in of.items() if kinds[name] == "c32" and dtype == torch.float64}
    if main is not None and any(tied[name] != (main if kinds[name] == "f" else computed(main)) for name in tied):
        wrong |= set(tied)
    return wrong


def _scalars(operator: Operator, given: Given) -> set[str]:
    wrong = _broken(tuple((allowed, name) for name, allowed in operator.floats.items()), given)
    for name, (low, high) in operator.ints.items():
        wrong |= _broken(((partial(_between, name, low, high), name),), given)
    wrong |= {name for name, allowed in operator.choices.items() if getattr(given, name) not in allowed}
    wrong |= {name for name, count in operator.flags.items() if len(getattr(given, name)) != count}
    if getattr(given, "backend", "cpu") not in ("cpu", "triton", "cuda"):
        wrong.add("backend")
    return wrong


def _between(name: str, low: int, high: Callable[[Given], int], given: Given) -> bool:
    return low <= getattr(given, name) <= high(given)


def _broken(rules: tuple[Rule, ...], given: Given) -> set[str]:
    """The arguments of broken rules. A rule holds if what it is about is None or not a tensor of its shape."""
    wrong = set[str]()
    for holds, names in rules:
        try:
            if not holds(given):
                wrong |= set(names.split())
        except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
            continue
    return wrong


def within(array: Tensor | None, low: int, high: int) -> bool:
    """Whether all values are from low to high - 1."""
    return array is None or all(low <= each < high for each in array.flatten().tolist())


def need(holds: bool, what: str) -> None:
    """Raises unless `holds`: the definition is undefined."""
    if not holds:
        raise ValueError(f"undefined: {what}")


def wide(*tensors: Tensor | None) -> list[Any]:
    """In float64, requiring a gradient."""
    return [None if each is None else each.detach().double().requires_grad_() for each in tensors]


def with_value(computed: Tensor, saved: Tensor | None) -> Tensor:
    """The saved value, if there is one, with the gradient of the computed value."""
    return computed if saved is None else saved.double() + (computed - computed.detach())


def gradients(result: Tensor, grad: Tensor, leaves: list[Tensor | None], wanted: list[bool]) -> tuple[Any, ...]:
    """Gradients by autograd, without elements where not wanted; None where there is no leaf."""
    chosen = [each for each, needed in zip(leaves, wanted, strict=True) if each is not None and needed]
    found = iter(torch.autograd.grad(result, chosen, grad.double(), allow_unused=True) if chosen else ())
    empty = grad.new_zeros(0)

    def one(leaf: Tensor | None, needed: bool) -> Tensor | None:
        if leaf is None or not needed:
            return None if needed else empty
        grad_of = next(found)
        return torch.zeros_like(leaf) if grad_of is None else grad_of

    return tuple(one(*each) for each in zip(leaves, wanted, strict=True))
