"""Tables and a picture of the metric over the values of each swept option (one that has several values)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_kernels import info
from moe_kernels.papers.recipes import Recipe
from moe_kernels.papers.train.plotting import write_picture
from moe_kernels.papers.train.report import Summary, with_spread


def pivot(recipe: Recipe, summaries: Sequence[Summary]) -> str:
    """A table for each swept option: mean and spread of the metric over the seeds.

    A table has a column for each value of the option, and a row for each combination of side and other swept options.
    """
    found = []
    for name, values in recipe.swept().items():
        lines = _lines(recipe, summaries, name)
        rows = [(label, *(with_spread(each[1:]) for each in points)) for label, points in lines.items()]
        header = (f"{recipe.METRIC} by {name}", *(f"{value:g}" for value in values))
        found.append(info.table(header, rows))
    return "\n\n".join(found)


def sweep_picture(path: Path, recipe: Recipe, summaries: Sequence[Summary], title: str) -> bool:
    """Draws a panel for each swept option, with a line for each combination of side and other swept options.

    Bars show the spread over the seeds. Returns False, and draws nothing, without swept options or without matplotlib.
    """
    swept = recipe.swept()

    def draw(axes: Any) -> None:
        for axis, (name, values) in zip(axes[0], swept.items(), strict=True):
            for label, points in _lines(recipe, summaries, name).items():
                at, metrics, spreads = zip(*points, strict=True)
                bars = [0 if math.isnan(spread) else spread for spread in spreads]
                axis.errorbar(at, metrics, yerr=bars, marker="o", label=label)
            log = min(values) > 0 and max(values) > 20 * min(values)
            axis.set(xlabel=name, ylabel=f"test {recipe.METRIC}", xscale="log" if log else "linear")
            axis.legend(fontsize="small")
        axes[0, 0].figure.suptitle(title)

    return bool(swept) and write_picture(path, draw, columns=len(swept), figsize=(5.5 * len(swept), 4.5))


def _lines(recipe: Recipe, summaries: Sequence[Summary], option: str) -> dict[str, list[tuple[float, float, float]]]:
    """For each combination of side and other swept options, points (value of `option`, mean, spread) of the metric."""
    by_name = {each.side: each for each in summaries}
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for name, variant in recipe.variants().items():
        value = getattr(variant, option)
        label = name.replace(f" {option}={value:g}", "")
        lines.setdefault(label, []).append((value, *by_name[name].metric))
    return lines
