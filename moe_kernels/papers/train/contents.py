"""Checks that parts of a checkpoint have the types, shapes and names that training needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

OFF = (type(None), bool)  # an option that is None means the same as one that is off
MAY_DIFFER = {"lr", "fused", "foreach", "capturable"}  # options of an optimiser: by step, or by device and ranks


def check_like(name: str, own: Any, found: Any) -> None:
    """Raises ValueError unless `found` may replace `own`.

    A tensor needs the same shape and dtype, a sequence the same length, a number or text the same type (but an integer
    may stand for a float). Of a dict only the keys that both have are compared.
    """
    if isinstance(own, Tensor):
        if not isinstance(found, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(found).__name__}")
        if (own.shape, own.dtype) != (found.shape, found.dtype):
            expected, got = (f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}" for each in (own, found))
            raise ValueError(f"{name} must be {expected}, got {got}")
    elif isinstance(own, dict) and isinstance(found, dict):
        for key in own.keys() & found.keys():
            check_like(f"{name}, {key}", own[key], found[key])
    elif isinstance(own, list | tuple) and type(own) is type(found):
        if len(own) != len(found):
            raise ValueError(f"{name} must have {len(own)} entries, got {len(found)}")
        for number, (one, other) in enumerate(zip(own, found, strict=True)):
            check_like(f"{name}, {number}", one, other)
    elif _is_number(own) and not _is_number(found):
        raise ValueError(f"{name} must be a number below 2^63, got {type(found).__name__}")
    elif not (type(own) is type(found) or (isinstance(own, OFF) and isinstance(found, OFF)) or _widens(own, found)):
        raise ValueError(f"{name} must be {type(own).__name__}, got {type(found).__name__}")


def check_rows(rows: Any, terms: Any, names: Iterable[str]) -> None:
    """Raises ValueError unless these are equally long lists of dicts of numbers, and each of `rows` has these names."""
    for kind, table in (("rows", rows), ("terms", terms)):
        if not isinstance(table, list) or not all(isinstance(row, dict) for row in table):
            raise ValueError(f"{kind} must be a list of dicts")
        for row in table:
            for name, value in row.items():
                if not isinstance(name, str) or not _is_number(value):
                    raise ValueError(f"{kind} must have numbers by name, got {name!r}: {type(value).__name__}")
    missing = sorted({name for row in rows for name in names if name not in row})
    if missing:
        raise ValueError(f"a row has no {', '.join(missing)}")
    if len(terms) != len(rows):
        raise ValueError(f"terms must have {len(rows)} entries as rows has, got {len(terms)}")


def check_optimiser(optimiser: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Raises ValueError unless `state` is one of this optimiser: options of groups, and tensors of parameters.

    torch compares only the numbers of groups and parameters.
    """
    own = optimiser.state_dict()["param_groups"]
    check_like("param_groups", own, state["param_groups"])
    for one, other in zip(own, state["param_groups"], strict=True):
        differing = sorted(name for name in (one.keys() & other.keys()) - MAY_DIFFER if one[name] != other[name])
        if differing:
            raise ValueError(f"param_groups have other {', '.join(differing)}")
    unknown = state["state"].keys() - {number for group in own for number in group["params"]}
    if unknown:
        raise ValueError(f"state of unknown parameters {', '.join(map(str, unknown))}")
    number = 0
    for group in optimiser.param_groups:
        expected = _names_of_state(optimiser, group)
        for parameter in group["params"]:
            if number in state["state"]:  # it has had a gradient
                _check_parameter(f"state of parameter {number}", parameter, state["state"][number], expected)
            number += 1


def check_options(before: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> None:
    """Raises ValueError if a group of an optimiser lost an option that it had before."""
    lost = sorted({name for old, new in zip(before, groups, strict=True) for name in old.keys() - new.keys()})
    if lost:
        raise ValueError(f"param_groups have no {', '.join(lost)}")


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _widens(own: Any, found: Any) -> bool:
    return type(own) is float and type(found) is int


def _names_of_state(optimiser: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, bool]:
    """What the optimiser keeps of a parameter of this group: names, and whether the value has the parameter's shape."""
    probe = nn.Parameter(torch.zeros(2))
    probe.grad = torch.zeros(2)
    options = {name: value for name, value in group.items() if name not in MAY_DIFFER}
    one = type(optimiser)([{**options, "params": [probe]}], lr=0.0)  # type: ignore[call-arg]
    one.step()
    return {name: getattr(value, "shape", None) == probe.shape for name, value in one.state[probe].items()}


def _check_parameter(name: str, parameter: Tensor, state: Any, expected: dict[str, bool]) -> None:
    if state.keys() != expected.keys():
        raise ValueError(f"{name} must have {', '.join(expected) or 'no entry'}; got {', '.join(map(str, state))}")
    for entry, of_its_shape in expected.items():
        value = state[entry]
        if of_its_shape:
            check_like(f"{name}, {entry}", parameter, value)
        elif not (_is_number(value) or (isinstance(value, Tensor) and value.numel() == 1)):
            raise ValueError(f"{name}, {entry} must be a number")
