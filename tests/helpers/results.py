"""What a run of a recipe says, without what differs from run to run: times, the machine and folders."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

TIMED = {"seconds", "setup_seconds"}


def told(found: dict[str, Any], printed: str, folder: Path, pictures: list[str]) -> str:
    """The settings and rows of a result.json, what the run printed, and its pictures."""
    lines = [f"{name}: {value}" for name, value in found["settings"].items()]
    lines += ["", *(str(_lasting(each)) for each in found["runs"])]
    return "\n".join([*lines, "", *_printed(printed, folder), "", *pictures])


def options_of(kind: type) -> str:
    """A line for each option of a recipe or study: name, default, help and limits."""
    lines = []
    for each in dataclasses.fields(kind):
        rest = {key: value for key, value in each.metadata.items() if value not in (None, False)}
        lines.append(f"  {each.name} = {each.default!r}: {rest}")
    return "\n".join(lines)


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _lasting(each) for name, each in value.items() if name not in TIMED}
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return [_lasting(each) for each in value] if isinstance(value, list) else value


def _printed(text: str, folder: Path) -> list[str]:
    """Without the backend's name and tables' columns from "ms/step" on, memory, and rounding errors."""
    lines, until = [], None
    for line in text.replace(str(folder), "FOLDER").splitlines():
        if not line:
            until = None
        elif line.startswith("side ") and "ms/step" in line:
            until = line.index("ms/step")
        if not line.startswith(("peak memory", "agreement of")):
            lines.append(re.sub(r"[\d.]+ ms/step$|, backend \w+$", "", line[:until]))
    return lines
