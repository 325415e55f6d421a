"""Wrong, or merely unusual, values for an argument of an honest call.

A change has a label. Its function takes the call and returns another value for the argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.helpers.operators.operator import Call, Operator, given_of

Change = Callable[[], Any]

LAYOUT = "layout: "  # the labels of changes that keep all values and only lay them differently in memory
EXPANDED = LAYOUT + "stride 0"  # its canonical call has other values than the honest call


def changes(operator: Operator, call: Call, name: str, kind: str) -> dict[str, Change]:
    """All changes of argument `name`, whose type in the schema is `kind`, by label."""
    value = call[name]
    if kind in ("Tensor", "Optional[Tensor]"):
        found = dict(_of_tensor(operator, call, name) if isinstance(value, Tensor) else _of_none(operator, call, name))
    elif kind in ("int", "Optional[int]"):
        found = dict(_of_int(operator, call, name))
    elif kind == "float":
        found = {f"{each}": partial(_same, each) for each in (math.nan, math.inf, -1.0, 0.0, 1e300)}
    elif kind == "str":
        found = {repr(each): partial(_same, each) for each in _strings(name)}
    elif kind == "List[bool]":
        lists: list[list[bool]] = [[], value[:-1], [*value, True], [not each for each in value]]
        found = {f"{each}": partial(_same, each) for each in lists}
    elif kind == "ScalarType":
        found = {f"{each}": partial(_same, each) for each in _dtypes(value)}
    else:
        found = {}
    if kind == "Optional[int]" and value is not None:
        found["None"] = partial(_same, None)
    return found


def _same(value: Any) -> Any:
    return value


def _strings(name: str) -> tuple[str, ...]:
    more = {"backend": ("reference", "cuda", "triton"), "activation": ("swiglu_clamped", "relu"), "mode": ("bert",)}
    return "", "bogus", *more.get(name, ())


def _dtypes(own: torch.dtype) -> list[torch.dtype]:
    every = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.bool)
    return [each for each in every if each != own]


def _of_int(operator: Operator, call: Call, name: str) -> Iterator[tuple[str, Change]]:
    values = {"-1": -1, "0": 0, "2**31": 2**31, "2**62": 2**62, "-2**62": -(2**62)}
    if name in operator.ints:
        highest = operator.ints[name][1](given_of(operator, call))
        values |= {f"limit + 1 = {highest + 1}": highest + 1} if highest < 2**31 - 1 else {}
    if call[name] is not None:
        values[f"{call[name]} - 1"], values[f"{call[name]} + 1"] = call[name] - 1, call[name] + 1
    for label, value in values.items():
        yield label, partial(_same, value)


def _of_none(operator: Operator, call: Call, name: str) -> Iterator[tuple[str, Change]]:
    yield "a scalar tensor", lambda: torch.zeros(())
    yield "an empty tensor", lambda: torch.zeros(0)
    if name in operator.saved:
        return
    kind, *letters = operator.tensors[name].split()
    given = given_of(operator, call)
    shape = [getattr(given, letter, 2) for letter in letters]
    floats = [each for each in call.values() if isinstance(each, Tensor) and each.is_floating_point()]
    main = floats[0].dtype if floats else torch.float32
    wide = torch.float64 if main == torch.float64 else torch.float32
    dtypes = {"i": torch.int32, "ij": torch.int64, "d": torch.float64, "c": wide, "c32": torch.float32}
    dtype = dtypes.get(kind, torch.int16 if kind == "short" else main)
    yield "a fitting tensor of ones", lambda: torch.ones(shape, dtype=dtype)


def _of_tensor(operator: Operator, call: Call, name: str) -> Iterator[tuple[str, Change]]:
    x = call[name]
    yield "None", partial(_same, None)
    yield "one dimension more", lambda: x[None]
    yield "one dimension more at the end", lambda: x[..., None]
    if x.dim():
        yield "one dimension less", lambda: x[0]
    for dim, size in enumerate(x.shape):
        yield f"size {dim} one more", partial(_longer, x, dim)
        for label, length in {"one less": size - 1, "0": 0}.items():
            yield f"size {dim} {label}", partial(_shorter, x, dim, length)
    for dtype in _dtypes(x.dtype):
        yield f"{dtype}".removeprefix("torch."), partial(x.to, dtype)
    yield from _layouts(x)
    if name in operator.index:
        yield from _indices(operator, call, name)
    if name == "taus":
        for value in (math.nan, math.inf, -1.0, 0.0):
            yield f"taus[-1] = {value}", partial(torch.tensor, [float(x[0]), value], dtype=x.dtype)


def _longer(x: Tensor, dim: int) -> Tensor:
    return torch.cat([x, x.narrow(dim, x.shape[dim] - 1, 1)], dim)


def _shorter(x: Tensor, dim: int, length: int) -> Tensor:
    return x.narrow(dim, 0, length).contiguous()


def _layouts(x: Tensor) -> Iterator[tuple[str, Change]]:
    if x.dim() == 0:
        return
    yield LAYOUT + "every second element", lambda: torch.stack([x, x], -1)[..., 0]
    yield LAYOUT + "an odd address", lambda: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
    yield LAYOUT + "every second row", lambda: torch.stack([x, x], 1)[:, 0]
    if x.dim() > 1:
        yield LAYOUT + "transposed", lambda: x.mT.contiguous().mT
        yield EXPANDED, lambda: x[:1].expand(x.shape)
    if x.dim() > 2:
        yield LAYOUT + "last dimension first", lambda: x.movedim(-1, 0).contiguous().movedim(0, -1)
        yield LAYOUT + "dimensions 0 and 1 exchanged", lambda: x.transpose(0, 1).contiguous().transpose(0, 1)


def _indices(operator: Operator, call: Call, name: str) -> Iterator[tuple[str, Change]]:
    x: Tensor = call[name]
    low, high = operator.index[name][0], operator.index[name][1](given_of(operator, call))

    def holding(place: int, value: int) -> Tensor:
        changed = x.clone()
        changed.view(-1)[place] = value
        return changed

    values = [("below", low - 1), ("above", high)]
    if x.dtype == torch.int16:
        values += [("2**15 - 1", 2**15 - 1), ("-2**15", -(2**15))]
    else:
        values += [("2**31 - 1", 2**31 - 1), ("-2**31", -(2**31))]
    if x.dtype == torch.int64:
        values += [("2**31", 2**31), ("2**32", 2**32), ("2**62", 2**62), ("-2**62", -(2**62))]
    for at, place in (("first", 0), ("middle", x.numel() // 2), ("last", -1)):
        for label, value in values:
            yield f"{at} value {label}", partial(holding, place, value)
    # Values in range that disagree with the other arrays.
    last = x.numel() - 1
    if name == "expert_offsets":
        yield "falls", lambda: holding(1, int(x[-1]))
        yield "starts at 1", lambda: holding(0, 1)
        yield "ends one earlier", lambda: x.clamp(max=int(x[-1]) - 1)
        yield "ends at R", lambda: holding(last, high - 1)
        yield "all 0", lambda: torch.zeros_like(x)
    elif name == "slot_row":
        rows = x.flatten().tolist()
        first, second, *_ = (index for index, row in enumerate(rows) if row >= 0)
        yield "a row twice, another never", lambda: holding(second, rows[first])
        yield "a used row that nobody fills", lambda: holding(first, -1)
        if -1 in rows:
            yield "a dropped choice revived", lambda: holding(rows.index(-1), rows[first])
            yield "an unused row filled", lambda: holding(rows.index(-1), high - 1)
    elif name in ("row_token", "row_choice"):
        yield "another value in row 0", lambda: holding(0, (int(x[0]) + 1) % high)
        yield "-1 in a used row", lambda: holding(0, -1)
        yield "0 in the last row", lambda: holding(last, 0)
        yield "rows rolled", lambda: x.roll(1)
