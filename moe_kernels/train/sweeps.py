"""Options that were given several values: a table and a picture of the metric over them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moe_kernels import info
from moe_kernels.recipes import Recipe
from moe_kernels.train.plotting import plotting, save
from moe_kernels.train.report import Summary


def pivot(recipe: Recipe, summaries: Sequence[Summary]) -> str:
    """For every swept option a table, a row a side (with the values of the other swept options), a column a value."""
    found = []
    for name, values in recipe.swept().items():
        lines = _lines(recipe, summaries, name)
        rows = [(label, *(f"{metric:.4f}" for _, metric, _ in points)) for label, points in lines.items()]
        header = (f"{recipe.METRIC} by {name}", *(f"{value:g}" for value in values))
        found.append(info.table(header, rows))
    return "\n\n".join(found)


def sweep_picture(path: Path, recipe: Recipe, summaries: Sequence[Summary]) -> bool:
    """A panel a swept option, a line a side, with the spread over the seeds. False without options or matplotlib."""
    pyplot, swept = plotting(), recipe.swept()
    if pyplot is None or not swept:
        return False
    canvas, axes = pyplot.subplots(1, len(swept), squeeze=False, figsize=(5.5 * len(swept), 4.5), layout="constrained")
    for axis, name in zip(axes[0], swept, strict=True):
        for label, points in _lines(recipe, summaries, name).items():
            values, metrics, spreads = zip(*points, strict=True)
            axis.errorbar(values, metrics, yerr=[0 if s != s else s for s in spreads], marker="o", label=label)
        axis.set(xlabel=name, ylabel=f"test {recipe.METRIC}")
        positive = [value for value in swept[name] if value > 0]
        if len(positive) == len(swept[name]) and max(positive) > 20 * min(positive):
            axis.set_xscale("log")
        axis.legend(fontsize="small")
    save(canvas, path)
    return True


def _lines(recipe: Recipe, summaries: Sequence[Summary], option: str) -> dict[str, list[tuple[float, float, float]]]:
    """side, with the values of the other swept options -> value of `option`, mean and spread of the metric."""
    by_name = {each.side: each for each in summaries}
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for name, variant in recipe.variants().items():
        value = getattr(variant, option)
        label = name.replace(f" {option}={value:g}", "")
        lines.setdefault(label, []).append((value, *by_name[name].metric))
    return lines
