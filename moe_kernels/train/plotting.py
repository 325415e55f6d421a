"""Pictures without a screen, and whole or not at all."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def plotting() -> Any:
    """matplotlib's pyplot, drawing to files alone; None where it is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(canvas: Any, path: Path) -> None:
    """Writes the canvas to `path` and closes it; an interruption leaves what stood there."""
    part = path.with_name(f"part-{path.name}")
    canvas.savefig(part, dpi=120)
    part.replace(path)
    plotting().close(canvas)
