"""Writes pictures without a display, completely or not at all."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_picture(path: Path, draw: Callable[[Any], object], rows: int = 1, columns: int = 1, **options: Any) -> bool:
    """Calls draw(axes), matplotlib axes (rows, columns), and writes the picture; False if matplotlib is not installed.

    options: arguments of pyplot.subplots.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(rows, columns, squeeze=False, layout="constrained", **options)
    draw(axes)
    save(canvas, path)
    pyplot.close(canvas)
    return True


def save(canvas: Any, path: Path) -> None:
    """Writes the canvas to another file and then renames it, so that an interruption leaves the old file at `path`."""
    part = path.with_name(f"part-{path.name}")
    canvas.savefig(part, dpi=120)
    part.replace(path)
