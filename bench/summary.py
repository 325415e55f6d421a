"""The summary that a run prints: verdicts, a row for each operation and backend, and failures of the measurement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from bench import ledger, report
from moe_kernels.verify import DISPUTED, Row

HEADER = ("operation", "backend", "verified", "forward, x PyTorch", "training, x PyTorch", "% of the ceiling")
OUT_OF_TIME = ": out of time"  # the end of measure.py's lines about jobs for which no time was left


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Lines with the number of kernels that agree, each kernel that does not, and the backends that ran nothing."""
    ran = [row for row in rows if row.verdict != "not run"]
    wrong = [row for row in ran if row.verdict == "FAILED"]
    lines = [f"{len(ran) - len(wrong)} of {len(ran)} kernels (operation, backend, dtype) agree with the definition"]
    lines += [failure(row) for row in wrong]
    lines += [f"{row.operation} {row.backend} {row.dtype} {row.note}" for row in ran if row.note.startswith(DISPUTED)]
    idle = sorted({row.backend for row in rows} - {row.backend for row in ran})
    if idle:
        without_gpu = not torch.cuda.is_available() and "cpu" not in idle
        why = "no GPU that torch can use" if without_gpu else "the report says why"
        lines.append(f"not run: {', '.join(idle)}: {why}")
    return lines


def failure(row: Row) -> str:
    return f"FAILED {row.operation} {row.backend} {row.dtype}: {row.note}"


def rows(result: ledger.Result) -> list[tuple[str, ...]]:
    """Rows under HEADER. Cells are ranges over shapes and dtypes in the first setting, such as one thread."""
    kernels: dict[tuple[str, str], list[dict]] = {}
    for entry in result["entries"]:
        kernels.setdefault((entry["operation"], entry["backend"]), []).append(entry)
    return [(*key, *_cells(entries)) for key, entries in kernels.items()]


def _cells(entries: list[dict]) -> Iterable[str]:
    wrong = [entry["dtype"] for entry in entries if not ledger.passed(entry)]
    figures = [each for entry in entries for each in entry["figures"]]
    figures = [each for each in figures if each["setting"] == figures[0]["setting"]]
    yield f"FAILED: {', '.join(wrong)}" if wrong else "ok"
    for direction in ("forward", "training"):
        yield report.against_torch([each for each in figures if each["direction"] == direction]) or "-"
    yield report.span([each["ceiling_percent"] for each in figures]) if figures else "-"


def missing(result: ledger.Result) -> list[str]:
    """A line for each kernel that failed while measured and, if the time ran out, one that says how much is missing."""
    late = sum(line.endswith(OUT_OF_TIME) for line in result["not_measured"])
    lines = [f"FAILED {entry['note']}" for entry in result["entries"] if entry["note"] in result["not_measured"]]
    taken = sum(len(entry["figures"]) + len(entry["curves"]) for entry in result["entries"])
    return lines + ([f"{taken} figures measured; jobs for which no time was left: {late}"] if late else [])
