"""Tables in Markdown, and their cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; "|" in a cell becomes "/"."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)


def microseconds(value: float) -> str:
    """Three significant digits; whole microseconds from 100 on."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
