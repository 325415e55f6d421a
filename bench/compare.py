"""Two results side by side: what became slower, beyond a tolerance, between one run and another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bench.ledger import Result

KEY = ("op", "backend", "dtype", "direction", "shape", "setting")


class Change(NamedTuple):
    """A figure that both results hold; `slowdown` is 1.1 where the second takes a tenth longer.

    On a GPU microseconds are compared; on a CPU, whose times drift with its neighbours, times over memcpy's.
    """

    figure: tuple[str, ...]
    before: float
    after: float
    slowdown: float


def changes(before: Result, after: Result) -> list[Change]:
    """Every figure that both results hold, the greatest slowdown first."""
    old, found = dict(_figures(before)), []
    for key, value in _figures(after):
        if key in old:
            found.append(Change(key, old[key], value, value / old[key]))
    return sorted(found, key=lambda change: -change.slowdown)


def _figures(result: Result) -> Iterator[tuple[tuple[str, ...], float]]:
    for entry in result["entries"]:
        for figure in entry["figures"]:
            unit = "us" if figure["setting"] == "cuda" else "over_memcpy"
            yield tuple(figure[name] for name in KEY), figure[unit]
