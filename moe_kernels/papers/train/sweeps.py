"""Tables and a picture of the metric over the values of each swept option (one that has several values)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_kernels import info
from moe_kernels.papers.recipes import Recipe, text_of
from moe_kernels.papers.train.plotting import write_picture
from moe_kernels.papers.train.report import Summary, with_spread


def pivot(recipe: Recipe, summaries: Sequence[Summary]) -> str:
    """A table for each swept option: mean and spread of the metric over the seeds; and one of `Recipe.curves`.

    A table has a column for each value of the option, and a row for each combination of side and other swept options.
    """
    found = []
    curves = _curves(recipe, summaries)
    if curves:
        at = [f"{each[0]:g}" for each in next(iter(curves.values()))]
        rows = [(label, *(with_spread(each[1:]) for each in points)) for label, points in curves.items()]
        found.append(info.table((f"{recipe.METRIC} of one model by value", *at), rows))
    for name, values in recipe.swept().items():
        lines = _lines(recipe, summaries, name)
        rows = [(label, *(with_spread(each[1:]) for each in points)) for label, points in lines.items()]
        header = (f"{recipe.METRIC} by {name}", *map(text_of, values))
        found.append(info.table(header, rows))
    return "\n\n".join(found)


def sweep_picture(path: Path, recipe: Recipe, summaries: Sequence[Summary], title: str) -> bool:
    """Draws a panel for each swept option, with a line for each combination of side and other swept options.

    One more shows `Recipe.curves`. Bars show the spread over the seeds. Returns False, and draws nothing, if there is
    no panel, or without matplotlib.
    """
    panels = {name: _lines(recipe, summaries, name) for name in recipe.swept()}
    if curves := _curves(recipe, summaries):
        panels["value in evaluation"] = curves

    def draw(axes: Any) -> None:
        for axis, (name, lines) in zip(axes[0], panels.items(), strict=True):
            for label, points in lines.items():
                at, metrics, spreads = zip(*points, strict=True)
                bars = [0 if math.isnan(spread) else spread for spread in spreads]
                axis.errorbar(at, metrics, yerr=bars, marker="o", label=label)
            values = [point[0] for points in lines.values() for point in points]
            log = not isinstance(values[0], str) and min(values) > 0 and max(values) > 20 * min(values)
            axis.set(xlabel=name, ylabel=f"test {recipe.METRIC}", xscale="log" if log else "linear")
            axis.legend(fontsize="small")
        axes[0, 0].figure.suptitle(title)

    return bool(panels) and write_picture(path, draw, columns=len(panels), figsize=(5.5 * len(panels), 4.5))


def _curves(recipe: Recipe, summaries: Sequence[Summary]) -> dict[str, list[tuple[float, float, float]]]:
    """For each side and title of `Recipe.curves`, points (value, mean, spread), if the side has these columns."""
    return {
        f"{each.side}, {title}": [(value, *each.further[name]) for value, name in columns.items()]
        for each in summaries
        for title, columns in recipe.curves().items()
        if all(name in each.further for name in columns.values())
    }


def _lines(recipe: Recipe, summaries: Sequence[Summary], option: str) -> dict[str, list[tuple[Any, float, float]]]:
    """For each combination of side and other swept options, points (value of `option`, mean, spread) of the metric."""
    by_name = {each.side: each for each in summaries}
    lines: dict[str, list[tuple[Any, float, float]]] = {}
    for name, variant in recipe.variants().items():
        value = getattr(variant, option)
        label = name.replace(f" {option}={text_of(value)}", "")
        lines.setdefault(label, []).append((value, *by_name[name].metric))
    return lines
