"""A picture with a panel for each combination of values of swept options, as Figure 4 of COMET fixed routing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_kernels.papers.recipes import text_of
from moe_kernels.papers.train.plotting import write_picture
from moe_kernels.papers.train.report import History

Value = tuple[str, float | str]  # the name of an option, "" for a width, and its value


def grid_picture(path: Path, histories: Sequence[History], metric: str, title: str) -> bool:
    """Draws the metric of the final runs by epoch: a line for the mean of each side over its seeds, a band of their
    range. The last option of the names has a row for each value, the others together a column for each.

    Returns False, and draws nothing, if the names of the runs have no options, or without matplotlib.
    """
    final = [each for each in histories if each.stage == "final"]
    named = {each.side: options_of(each.side) for each in final}
    kinds = {tuple(name for name, _ in values) for _, values in named.values()}
    if len(kinds) != 1 or not next(iter(kinds)):
        return False
    rows = sorted({values[-1] for _, values in named.values()})
    columns = sorted({values[:-1] for _, values in named.values()})
    colours = {side: f"C{number % 10}" for number, side in enumerate(dict.fromkeys(side for side, _ in named.values()))}

    def draw(axes: Any) -> None:
        for row, last in enumerate(rows):
            for column, first in enumerate(columns):
                axis = axes[row, column]
                for name, (side, values) in named.items():
                    if values == (*first, last):
                        _draw_line(axis, [each for each in final if each.side == name], metric, side, colours[side])
                axis.set_title(
                    ", ".join(f"{name or 'width'} {text_of(value)}" for name, value in (*first, last)), fontsize="small"
                )
        for axis in axes[-1]:
            axis.set_xlabel("epoch")
        for row in axes:
            row[0].set_ylabel(f"test {metric}")
        canvas = axes[0, 0].figure
        labelled = {
            label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        canvas.legend(labelled.values(), labelled, loc="outside lower center", ncols=min(len(labelled), 6))
        canvas.suptitle(title)

    size = (3.2 * len(columns) + 1, 2.6 * len(rows) + 1)
    return write_picture(path, draw, len(rows), len(columns), figsize=size, sharex=True)


def options_of(name: str) -> tuple[str, tuple[Value, ...]]:
    """ "comet 1000 keep=0.5" -> ("comet", (("", 1000.0), ("keep", 0.5)))."""
    side, *words = name.split()
    parts = (word.rpartition("=") for word in words)
    return side, tuple((option, _number(value)) for option, _, value in parts)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _draw_line(axis: Any, runs: Sequence[History], metric: str, label: str, colour: str) -> None:
    length = min(len(each.rows) for each in runs)
    columns = [[each.rows[number][f"test {metric}"] for each in runs] for number in range(length)]
    at = [row.get("epoch", row["step"]) for row in runs[0].rows[:length]]
    axis.plot(at, [sum(values) / len(values) for values in columns], label=label, color=colour)
    axis.fill_between(at, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.2)
