"""Edits of PTX that plant a defect: functions from text to text, for session.planted."""

from __future__ import annotations

import re
from collections.abc import Callable

from .machine import Result

Edit = Callable[[str], str]


def replaced(pattern: str, by: str, *, count: int = 0) -> Edit:
    """Every match of the pattern, or the first `count`, in the text without comments; one at least."""

    def edit(text: str) -> str:
        edited, n = re.subn(pattern, by, text, count=count)
        assert n, f"nothing to plant: {pattern}"
        return edited

    return edit


def on_line(line: int, pattern: str, by: str) -> Edit:
    """The match on one line, as records name it."""

    def edit(text: str) -> str:
        lines = text.split("\n")
        lines[line - 1], n = re.subn(pattern, by, lines[line - 1])
        assert n, f"nothing to plant on line {line}: {lines[line - 1]}"
        return "\n".join(lines)

    return edit


def executed(result: Result, pattern: str) -> list[int]:
    """PTX lines of the instructions that match and that the launch executed."""
    found = {
        result.kernel.lines[pc]
        for pc, text in enumerate(result.kernel.texts)
        if re.search(pattern, text) and result.counters["runs"][pc]
    }
    return sorted(found)
