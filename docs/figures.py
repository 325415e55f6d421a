"""A Sphinx extension: replaces `<!-- figures: kwta -->` in a page by the measured and predicted figures of kwta, and
`<!-- results of recipes -->` by the states of the files in bench/results/recipes."""

from __future__ import annotations

import functools
import re
from typing import Any

from bench import ledger, merging, predict, report
from moe_kernels.papers import results

RECIPES = "<!-- results of recipes -->"
MARK = re.compile(r"<!-- figures: ([\w ]+) -->")


def setup(app: Any) -> None:
    app.connect("source-read", _insert)


def _insert(app: Any, name: str, source: list[str]) -> None:
    source[0] = MARK.sub(lambda match: figures(match[1].split()), source[0])
    if RECIPES in source[0]:  # without this question each of 32 pages would ask for the states, for 0.1 s
        source[0] = source[0].replace(RECIPES, states())


def states() -> str:
    """A Markdown table: whether the code of each recipe's and study's result is the present one."""
    rows = [f"| `{name}` | {state} |" for name, state in results.states()]
    return "\n".join(["| file | code |", "|---|---|", *rows])


def figures(operations: list[str]) -> str:
    """Markdown tables of these operations: figures measured with the present sources, then predicted ones."""
    parts = []
    for result in _measured():
        entries = [entry for entry in result["entries"] if entry["operation"] in operations]
        rows = [row for entry in entries if not ledger.is_stale(entry) for row in report.summary(entry, result["gpu"])]
        if rows:
            parts.append(f"Measured on {result['device']}, {result['date']}:\n\n{report.table(rows, result['gpu'])}")
    parts = parts or ["No measurement of the present sources."]
    counted = [each for each in _predicted() if each.count["operation"] in operations]
    if table := predict.short(counted):
        parts.append(f"Predicted, not measured; no GPU has run this (`python -m bench predict`):\n\n{table}")
    return "\n\n".join(parts)


# Ten pages have figures; what these come from is read and computed once.
_measured = functools.cache(merging.read)
_predicted = functools.cache(lambda: predict.predict(predict.GPUS["A100"]))
