"""Several runs of one device as one result, and the records of runs that are not merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from bench import ledger, merging
from tests.helpers.measured import result_of


def runs_of(tree: Path, *entries: dict[str, Any]) -> list[ledger.Result]:
    """Runs of one kernel, newest first, each with these changes of its entry; `figures=N` for N figures."""
    found = []
    for age, changes in enumerate(entries):
        result = result_of(tree, "cuda", date=f"2026-01-{20 - age}", note="")
        (entry,) = result["entries"]
        (figure,) = entry["figures"]
        count = changes.get("figures", 0)
        figures = [figure | {"shape": f"R={each}", "us": float(age)} for each in range(count)]
        entry |= changes | {"figures": figures, "date": result["date"]}
        found.append(result)
    return found


FAILED = {"verdict": "FAILED", "note": "one: why"}  # which the runs have in not_measured: it failed while measured


@pytest.mark.parametrize(
    ("entries", "verdict"),
    [
        ([{"figures": 1}, {}, FAILED], "ok"),  # measured in the newest run, though not in the one before
        ([{}, {"figures": 1}, FAILED], "ok"),
        ([{}, {}, FAILED], "FAILED"),
        ([{}, FAILED, {"figures": 1}], "FAILED"),  # it was measured before it failed
        ([FAILED, {"figures": 1}], "FAILED"),
        ([{"cases": 4}, {"verdict": "FAILED", "note": "worst: y", "cases": 3}], "ok"),
        ([{"cases": 2}, {"cases": 9}, {"verdict": "FAILED", "note": "worst: y", "cases": 3}], "FAILED"),
        ([{"verdict": "FAILED", "note": "worst: y", "cases": 2}, {"cases": 9}], "FAILED"),
    ],
)
def test_a_failure_stands_until_a_later_run_shows_the_contrary(tree: Path, entries: list, verdict: str) -> None:
    results = runs_of(tree, *entries)
    (merged,) = merging.merged(results[::-1], tree)
    (found,) = merged["entries"]
    assert found["verdict"] == verdict
    assert "failed_measuring" not in found


def test_a_failure_brings_its_own_words_and_the_newest_run_the_rest(tree: Path) -> None:
    old = {"verdict": "FAILED", "note": "worst: y", "cases": 9, "error": 2.0, "allowed": 1.0}
    new, failed = runs_of(tree, {"cases": 3, "figures": 1}, old | {"figures": 2})
    (merged,) = merging.merged([failed, new], tree)
    (found,) = merged["entries"]
    assert {name: found[name] for name in (*old, "date")} == old | {"date": "2026-01-19"}
    assert [(each["shape"], each["us"]) for each in found["figures"]] == [("R=0", 0.0), ("R=1", 1.0)]


def test_facts_are_the_newest_and_each_ceiling_the_newest_that_was_measured(tree: Path) -> None:
    first, second, third = runs_of(tree, {}, {}, {})
    first |= {"ceilings": {"cuda": {"copy": 1.0}}, "suite": {"pytest": "not run: out of time"}}
    second |= {"ceilings": {"cuda": {"copy": 2.0}, "1 thread": {"copy": 3.0}}, "suite": {"pytest": "FAILED: 1"}}
    third |= {"ceilings": {"2 threads": {"copy": 4.0}}, "suite": {"pytest": "ok", "a step": "ok"}}
    (found,) = merging.merged([second, third, first], tree)
    assert found["date"] == "2026-01-20"
    assert found["ceilings"] == {"cuda": {"copy": 1.0}, "1 thread": {"copy": 3.0}, "2 threads": {"copy": 4.0}}
    assert found["suite"] == {"pytest": "FAILED: 1 (2026-01-19)", "a step": "ok (2026-01-18)"}


def test_runs_of_one_day_count_by_the_time_at_which_they_began(tree: Path) -> None:
    results = runs_of(tree, {"cases": 1}, {"cases": 2}, {"cases": 3})
    for result, started in zip(results, ("08:30", "11:00", "09:15"), strict=True):
        result |= {"date": "2026-01-20", "started": f"2026-01-20T{started}:00+00:00"}
    (found,) = merging.merged(results, tree)
    assert found["entries"][0]["cases"] == 2


def test_devices_are_in_the_order_of_their_names_and_kernels_apart(tree: Path) -> None:
    (first, second) = runs_of(tree, {"cases": 1}, {"cases": 2})
    second["entries"][0]["device"] = "cpu"  # interpreted
    (other,) = runs_of(tree, {"cases": 5})
    other["device"] = "Another GPU"
    found = merging.merged([first, second, other], tree)
    assert [each["device"] for each in found] == ["Another GPU", "Some GPU"]
    assert [(each["device"], each["cases"]) for each in found[1]["entries"]] == [("cuda", 1), ("cpu", 2)]


def test_checks_and_figures_of_other_sources_are_left_out(tree: Path) -> None:
    new, old = runs_of(tree, {"figures": 1}, {"figures": 2, "sources": "before", "checks": {"memcheck": "ok"}})
    (merged,) = merging.merged([old, new], tree)
    (found,) = merged["entries"]
    assert (len(found["figures"]), found["checks"]) == (1, {})
