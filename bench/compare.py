"""Two results side by side: what became slower, beyond a tolerance, between one run and another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from bench.ledger import Result

KEY = ("op", "backend", "dtype", "direction", "shape", "setting")


class Change(NamedTuple):
    """A figure that both results hold; `slowdown` is 1.1 where the second takes a tenth longer.

    On a GPU microseconds are compared. A CPU's drift with its neighbours, so there it is times over memcpy's and over
    each peer's, of which the change nearest to none counts: a kernel that changed did so against all of them.
    """

    figure: tuple[str, ...]
    before: float
    after: float
    slowdown: float


def changes(before: Result, after: Result) -> list[Change]:
    """Every figure that both results hold, the greatest slowdown first."""
    old, found = dict(_figures(before)), []
    for key, new in _figures(after):
        if key in old:
            was, now = _yardsticks(old[key]), _yardsticks(new)
            slowdowns = [now[name] / was[name] for name in was if name in now]
            slowdown = min(slowdowns, key=lambda each: abs(each - 1)) if slowdowns else 1.0
            first = next(iter(was))
            found.append(Change(key, was[first], now[first], slowdown))
    return sorted(found, key=lambda change: -change.slowdown)


def _yardsticks(figure: dict[str, Any]) -> dict[str, float]:
    """Times of a figure in units that the machine's other work leaves alone, by name."""
    if figure["setting"] == "cuda":
        return {"us": figure["us"]}
    return {"memcpy": figure["over_memcpy"], **{name: 1 / ratio for name, ratio in figure["peers"].items()}}


def _figures(result: Result) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    for entry in result["entries"]:
        for figure in entry["figures"]:
            yield tuple(figure[name] for name in KEY), figure
