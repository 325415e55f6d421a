"""Compares two results of the bench: how much longer a call takes in the second."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from bench.ledger import Result

KEY = ("op", "backend", "dtype", "direction", "shape", "setting")


class Change(NamedTuple):
    """The change of one call. figure: the call's values of KEY. slowdown: 1.1 if the call takes a tenth longer.

    On a GPU microseconds are compared. On a CPU microseconds drift with the load, so the call's time is divided by the
    time of a memcpy and by that of each peer in the same run. `slowdown` is the change of the quotient that changed
    least, since a slower kernel changes all quotients.

    before, after: microseconds on a GPU, multiples of the memcpy's time on a CPU.
    """

    figure: tuple[str, ...]
    before: float
    after: float
    slowdown: float


def changes(before: Result, after: Result) -> list[Change]:
    old, found = dict(_figures(before)), []
    for key, new in _figures(after):
        if key in old:
            was, now = _relative_times(old[key]), _relative_times(new)
            slowdowns = [now[name] / was[name] for name in was if name in now]
            slowdown = min(slowdowns, key=lambda each: abs(each - 1)) if slowdowns else 1.0
            first = next(iter(was))
            found.append(Change(key, was[first], now[first], slowdown))
    return sorted(found, key=lambda change: -change.slowdown)


def _relative_times(figure: dict[str, Any]) -> dict[str, float]:
    if figure["setting"] == "cuda":
        return {"us": figure["us"]}
    return {"memcpy": figure["over_memcpy"], **{name: 1 / ratio for name, ratio in figure["peers"].items()}}


def _figures(result: Result) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    for entry in result["entries"]:
        for figure in entry["figures"]:
            yield tuple(figure[name] for name in KEY), figure
