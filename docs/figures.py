"""A Sphinx extension: replaces `<!-- figures: kwta -->` in a page by the measured figures of kwta."""

from __future__ import annotations

import re
from typing import Any

from bench import ledger, report

MARK = re.compile(r"<!-- figures: ([\w ]+) -->")


def setup(app: Any) -> None:
    app.connect("source-read", _insert)


def _insert(app: Any, name: str, source: list[str]) -> None:
    source[0] = MARK.sub(lambda match: figures(match[1].split()), source[0])


def figures(operations: list[str]) -> str:
    """Markdown: for each device the figures of these operations in bench/results, as ranges over the shapes."""
    parts = []
    for result in ledger.read():
        entries = [entry for entry in result["entries"] if entry["operation"] in operations]
        rows = [row for entry in entries if not ledger.is_stale(entry) for row in report.summary(entry, result["gpu"])]
        if rows:
            parts.append(f"Measured on {result['device']}, {result['date']}:\n\n{report.table(rows, result['gpu'])}")
    return "\n\n".join(parts) or "No measurement of the present sources."
