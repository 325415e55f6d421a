"""What the bench's commands print while they work, in a pipe or a file."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

pytest.importorskip("typer")
from bench.console import console, progress, status


def test_progress_in_a_file_is_a_line_every_few_seconds(monkeypatch) -> None:
    """Also while a single job runs. Once the block has ended nothing is printed."""
    lines: list[str] = []
    monkeypatch.setattr("bench.console.SILENT_SECONDS", 0.05)
    monkeypatch.setattr(console, "print", lambda text, **options: lines.append(text))
    with progress() as bar:
        task = bar.add_task("measuring", total=4)
        bar.update(task, advance=1, description="kwta")
        wait_until(lambda: len(lines) >= 2)
    assert all(re.fullmatch(r"kwta, 1 of 4; \d+ s so far", line) for line in lines)
    with status("drawing") as shown:
        shown.update("drawing more")
        wait_until(lambda: lines[-1].startswith("drawing more; "))
    count = len(lines)
    time.sleep(0.2)
    assert len(lines) == count


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)
