"""Writes pictures without a display, completely or not at all."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_kernels.papers.train.checkpoint import write


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
    buffer = io.BytesIO()
    canvas.savefig(buffer, dpi=120, format=path.suffix[1:])
    write(path, buffer.getvalue())
