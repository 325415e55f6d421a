"""Several runs of one device as one result: each kernel's newest verdict and figures of the same sources."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import ledger
from bench.compare import KEY


def read(folder: Path = ledger.RESULTS, root: Path = ledger.ROOT) -> list[ledger.Result]:
    """The `merged` results of a folder."""
    return merged(map(ledger.load, sorted(folder.glob("*.json"))), root)


def merged(results: Iterable[ledger.Result], root: Path = ledger.ROOT) -> list[ledger.Result]:
    """One result for each device, in the order of the devices' names; see `_device`."""
    by_device: dict[str, list[ledger.Result]] = {}
    for result in results:
        by_device.setdefault(result["device"], []).append(result)
    return [_device(sorted(runs, key=ledger.time_of, reverse=True), root) for _, runs in sorted(by_device.items())]


def _device(runs: list[ledger.Result], root: Path) -> ledger.Result:
    """The runs, newest first, as one: facts of the newest run, ceilings and verdicts of the test suite of the newest
    that has them, and for each kernel `_kernel` of its entries."""
    if len(runs) == 1:
        return runs[0]
    kernels: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for run in runs:
        for entry in run["entries"]:
            key = tuple(entry[name] for name in ("operation", "backend", "dtype", "device"))
            measuring = entry["verdict"] == "FAILED" and entry["note"] in run["not_measured"]
            kernels.setdefault(key, []).append(entry | {"failed_measuring": measuring})
    found = runs[0] | {"entries": [_kernel(entries, root) for entries in kernels.values()]}
    found["ceilings"] = _newest_of(run["ceilings"] for run in runs)
    suite = _newest_of(_dated(run) for run in runs)
    return found | ({"suite": suite} if suite else {})


def _kernel(entries: list[dict[str, Any]], root: Path) -> dict[str, Any]:
    """The newest entry of the sources as they are, or of the newest run if they have changed since all runs; with the
    figures and checks that it lacks from older entries of the same sources.

    A failure stands until as many cases pass and, if it failed while it was measured, until it is measured.
    """
    chosen = next((entry for entry in entries if not ledger.is_stale(entry, root)), entries[0])
    same = [entry for entry in entries if entry["sources"] == chosen["sources"]]
    newest, measured = same[0], False
    for older in same:
        unseen = older["cases"] > newest["cases"] or (older["failed_measuring"] and not measured)
        if older["verdict"] == "FAILED" and newest["verdict"] == "ok" and unseen:
            newest = newest | {name: older[name] for name in ("verdict", "note", "cases", "error", "allowed", "date")}
        measured = measured or bool(older["figures"])
    figures = {}
    for name in ledger.FIGURES:
        known: dict[tuple[Any, ...], Any] = {}
        for entry in same:
            for figure in entry[name]:
                known.setdefault(tuple(figure[key] for key in KEY), figure)
        figures[name] = list(known.values())
    found = newest | figures | {"checks": _newest_of(entry["checks"] for entry in same)}
    del found["failed_measuring"]
    return found


def _dated(run: ledger.Result) -> dict[str, str]:
    """The verdicts of the test suite and of captured steps with their date: no digest tells whether they are stale."""
    return {name: f"{word} ({run['date']})" for name, word in run.get("suite", {}).items()}


def _newest_of(found: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The dictionaries, newest first, as one; a check that was not run yields to an older one that was."""
    known: dict[str, Any] = {}
    for each in found:
        for name, value in each.items():
            if name not in known or str(known[name]).startswith("not run"):
                known[name] = value
    return known
