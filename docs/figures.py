"""A Sphinx extension: replaces `<!-- figures: kwta -->` in a page by the measured and predicted figures of kwta."""

from __future__ import annotations

import re
from typing import Any

from bench import ledger, merging, predict, report

MARK = re.compile(r"<!-- figures: ([\w ]+) -->")


def setup(app: Any) -> None:
    app.connect("source-read", _insert)


def _insert(app: Any, name: str, source: list[str]) -> None:
    source[0] = MARK.sub(lambda match: figures(match[1].split()), source[0])


def figures(operations: list[str]) -> str:
    """Markdown tables of these operations: figures measured with the present sources, then predicted ones."""
    parts = []
    for result in merging.read():
        entries = [entry for entry in result["entries"] if entry["operation"] in operations]
        rows = [row for entry in entries if not ledger.is_stale(entry) for row in report.summary(entry, result["gpu"])]
        if rows:
            parts.append(f"Measured on {result['device']}, {result['date']}:\n\n{report.table(rows, result['gpu'])}")
    parts = parts or ["No measurement of the present sources."]
    counted = [each for each in predict.predict(predict.GPUS["A100"]) if each.count["operation"] in operations]
    if table := predict.short(counted):
        parts.append(f"Predicted, not measured; no GPU has run this (`python -m bench predict`):\n\n{table}")
    return "\n\n".join(parts)
