"""Pictures of one run: how many times as fast as its peer an operation is, and how near the machine's ceiling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def draw(result: dict[str, Any], folder: Path) -> list[str]:
    """Writes <operation>.png for every measured operation and returns the names."""
    figures = [figure for entry in result["entries"] for figure in entry["figures"]]
    return [_operation(op, figures, result["device"], folder) for op in sorted({figure["op"] for figure in figures})]


def _operation(op: str, figures: list[dict[str, Any]], device: str, folder: Path) -> str:
    mine = [figure for figure in figures if figure["op"] == op]
    directions = list(dict.fromkeys(figure["direction"] for figure in mine))
    size = (4.5 * len(directions), 7)
    canvas, axes = plt.subplots(2, len(directions), figsize=size, sharex=True, squeeze=False, layout="constrained")
    for column, direction in enumerate(directions):
        lines: dict[str, list[dict[str, Any]]] = {}
        for figure in (each for each in mine if each["direction"] == direction):
            lines.setdefault(f"{figure['backend']} {figure['dtype']}, {figure['setting']}", []).append(figure)
        top, bottom = axes[0][column], axes[1][column]
        for name, each in lines.items():
            shapes = [figure["shape"].replace(" ", "\n") for figure in each]
            if each[0]["peers"]:
                top.plot(shapes, [min(figure["peers"].values()) for figure in each], "o-", label=name)
            bottom.plot(shapes, [figure["ceiling_percent"] for figure in each], "o-", label=name)
        top.set(title=direction, yscale="log")
        top.yaxis.set_major_formatter("{x:g}")
        top.yaxis.set_minor_formatter("{x:g}")
        bottom.set_ylim(bottom=0)
    axes[0][0].set_ylabel("times as fast as the best peer")
    axes[1][0].set_ylabel("percent of the measured ceiling")
    axes[1][0].legend(fontsize="small")
    canvas.suptitle(f"{op} on {device}")
    canvas.savefig(folder / f"{op}.png", dpi=120)
    plt.close(canvas)
    return f"{op}.png"
