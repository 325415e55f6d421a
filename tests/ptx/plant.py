"""Edits that insert a defect into PTX: functions from text to text, for session.planted."""

from __future__ import annotations

import re

from .machine import Result
from .session import Edit


def replaced(pattern: str, by: str) -> Edit:
    def edit(text: str) -> str:
        edited, n = re.subn(pattern, by, text)
        assert n, f"no match of {pattern}"
        return edited

    return edit


def on_line(line: int, pattern: str, by: str) -> Edit:
    """An edit that replaces every match on one line (the first is 1) of the PTX, and fails if there is none."""

    def edit(text: str) -> str:
        lines = text.split("\n")
        lines[line - 1], n = re.subn(pattern, by, lines[line - 1])
        assert n, f"no match of {pattern} on line {line}: {lines[line - 1]}"
        return "\n".join(lines)

    return edit


def executed(result: Result, pattern: str) -> list[int]:
    """Line numbers, in the PTX, of the executed instructions whose text matches the pattern."""
    found = {
        result.kernel.lines[pc]
        for pc, text in enumerate(result.kernel.texts)
        if re.search(pattern, text) and result.counters["runs"][pc]
    }
    return sorted(found)
