"""What the commands of the bench do in which order, and what they print, without measuring anything."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from bench import __main__ as command
from bench import profile, tiles
from bench.console import console
from tests.helpers.bench import run
from tests.helpers.stored import Stored


class Recorder:
    """In place of runs.Run: keeps the names and arguments of its calls."""

    def __init__(self, out: Path, request: Any, seconds: float, until: float = math.inf) -> None:
        self.rows: dict[Any, Any] = {}
        self.failed, self.path, self.until = False, out, until
        left = until - time.monotonic()
        self.calls = [f"begin {request} {seconds} {'no end' if left == math.inf else f'{left / 60:.1f} minutes'}"]

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: self.calls.append(f"{name} {given} {named or ''}")

    def result(self) -> None:
        left = self.until - time.monotonic()
        self.calls.append(f"result, {'no end' if left == math.inf else f'{left / 60:.1f} minutes left'}")


LINES = (
    "run --op kwta,sinkhorn --backend cpu --dtype float32 --threads 3 --minutes 9 --size N=64 --seconds 0.1",
    "run --peers none --routing zipf --no-curves --shapes llm",
    "verify --shapes papers --op tree_gate",
    "gpu",
    "gpu --quick --backend cuda",
    "gpu --no-figures --no-proof --minutes 3",
    "gpu --quick --proof --op kwta",
)


def test_commands_verify_measure_and_prove_in_their_order(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Recorder] = []

    def begin(*given: Any) -> Recorder:
        made.append(Recorder(*given))
        return made[-1]

    monkeypatch.setattr(command, "_begin", begin)
    monkeypatch.setattr(command, "idle", lambda wanted, rows: "")
    monkeypatch.setattr(command.document, "write", lambda results, out: ("report.md", "report.html"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    lines = []
    for line in LINES:
        monkeypatch.setattr(torch.cuda, "is_available", lambda line=line: line.startswith("gpu"))
        done = run(*line.split(), "--out", tmp_path)
        assert done.exit_code == 0, done.output
        lines += [line, *(f"  {each}" for each in made[-1].calls), done.output]
    stored("bench_commands", "\n".join(lines).replace(str(tmp_path), "FOLDER"))
    made[-1].failed = True
    monkeypatch.setattr(command, "_begin", lambda *given: made[-1])
    assert run("verify", "--out", tmp_path).exit_code == 1


def test_a_profile_is_printed(stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [profile.Line("kwta_fwd", 2.0, 12.345, 0.75, 3.2), profile.Line("copy", None, 4.0, 0.25, 1.1)]
    jobs = []

    def profiled(job: Any, out: Path) -> profile.Profile:
        jobs.append(f"{job} by {job.backends} on {job.device}, {job.threads}")
        return profile.Profile(lines, 16.345, 4.0, out / "trace.json")

    monkeypatch.setattr(profile, "profile", profiled)
    monkeypatch.setattr(profile, "tools", lambda job, options, out: {"tool": " ".join(options)})
    monkeypatch.setattr(console, "width", 100)
    words = ("profile", "--op", "kwta", "--backend", "cpu", "--out", tmp_path)
    printed = ""
    for more in (("--shape", 2), ("--size", "N=77", "--threads", 3, "--dtype", "bfloat16", "--direction", "forward")):
        done = run(*words, *more)
        assert done.exit_code == 0, done.output
        printed += done.output
    assert "Nsight" not in run(*words, "--no-tools").output
    stored("bench_profile", "\n".join([printed, *jobs]).replace(str(tmp_path), "FOLDER"))


def test_found_tiles_are_printed_and_written(stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = [tiles.Trial("forward", "wide", "128x256", 1.5), tiles.Trial("forward", "wide", "64x64", 2.5)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(tiles, "sweep", lambda: iter([trials[:1], "128x512: no room", trials[1:]]))
    monkeypatch.setattr(tiles, "write", lambda path, device, found: path.write_text(f"{device} {len(found)}"))
    monkeypatch.setattr(console, "width", 100)
    done = run("tiles", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    written = [each.read_text() for each in sorted(tmp_path.iterdir())]
    printed = re.sub(r"\d{8}T\d{4}Z", "DATE", done.output.replace(str(tmp_path), "FOLDER"))
    stored("bench_tiles", "\n".join([printed, *written]))


def test_tiles_are_not_sought_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tiles, "sweep", lambda: pytest.fail("measured"))
    done = run("tiles", "--out", tmp_path)
    assert (done.exit_code, done.output) == (2, "No GPU that torch can use.\n")
    assert not [*tmp_path.iterdir()]


def test_a_run_on_a_gpu_updates_the_readme_from_the_stored_results_alone(monkeypatch, tmp_path: Path) -> None:
    """The result is written, and the report made of all results in the folder, also if the run breaks off."""
    results, readme, written = tmp_path / "results", tmp_path / "README.md", []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command.ledger, "RESULTS", results.resolve())
    monkeypatch.setattr(command.report, "README", readme)
    monkeypatch.setattr(command.report, "rendered", lambda text, found: f"{text} with {found}")
    monkeypatch.setattr(command.merging, "read", lambda *folder: [each.name for each in folder] or "all")
    monkeypatch.setattr(command.document, "write", lambda found, out: written.append((found, out)) or ())
    run_of = Recorder(tmp_path, "", 0.0)
    monkeypatch.setattr(command, "_begin", lambda *given: run_of)
    for out, text in ((tmp_path / "other", "text"), (tmp_path / "other" / ".." / "results", "text with all")):
        readme.write_text("text")
        assert run("gpu", "--quick", "--out", out).exit_code == 0
        assert readme.read_text() == text
        assert written.pop() == ([out.name], out)
    monkeypatch.setattr(Recorder, "measure", lambda *given: 1 / 0, raising=False)
    run_of.calls.clear()
    assert isinstance(run("gpu", "--out", results).exception, ZeroDivisionError)
    assert [call.split()[0] for call in run_of.calls] == ["verify", "write", "print_paths"]
    assert len(written) == 1


@pytest.mark.parametrize(
    ("gpus", "said"),
    [([], "none"), ([("A", 80), ("B", 24)], "A (80 GiB), B (24 GiB)")],
)
def test_a_run_begins_with_a_description_of_the_machine(monkeypatch, gpus: list, said: str) -> None:
    facts = {"cpu": "Some CPU", "cores": 3, "isa": "avx2", "driver": "9", "python": "3", "torch": "2", "triton": "-"}
    facts |= {"gpus": [{"name": name, "memory_gib": size} for name, size in gpus]}
    monkeypatch.setattr(command.info, "machine", lambda: facts)
    with console.capture() as printed:
        command._describe_machine()
    assert printed.get() == f"CPU Some CPU, 3 cores, avx2; GPU {said}; driver 9\nPython 3, torch 2, Triton -\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, {"peers": None, "threads": (1, 4), "routings": command.ROUTINGS}),
        ({"peers": ["none"]}, {"peers": ()}),
        ({"peers": ["none,TOPK", "pot"]}, {"peers": ("TOPK", "pot")}),
        ({"threads": [3, 2]}, {"threads": (3, 2)}),
        ({"routing": ["zipf"], "curves": True}, {"routings": ("zipf",), "curves": True}),
        (
            {"shapes": command.Shapes.llm, "dtype": ["float16", "float32"]},
            {"shapes": "llm", "dtypes": ("float16", "float32")},
        ),
    ],
)
def test_options_select_what_is_measured(monkeypatch, options: dict, said: dict) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    given = {"shapes": command.Shapes.quick, "routing": None, "peers": None, "dtype": ["bfloat16"], "threads": None}
    found = command._request(**(given | {"curves": False} | options))
    expected = {"shapes": "quick", "dtypes": ("bfloat16",), "curves": False} | said
    assert {name: getattr(found, name) for name in expected} == expected
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert command._request(**(given | {"curves": False})).threads == (1,)


def test_the_drawn_result_is_of_a_gpu_and_then_the_newest_that_was_measured(monkeypatch, tmp_path: Path) -> None:
    def result(gpu: bool, date: str, figures: int = 1) -> dict:
        return {"gpu": gpu, "date": date, "entries": [{"figures": []}, {"figures": [{}] * figures}]}

    from bench import plot

    drawn: list[tuple] = []
    found = [result(False, "5"), result(True, "2"), result(True, "3"), result(True, "4", figures=0), result(True, "1")]
    monkeypatch.setattr(command.ledger, "ROOT", tmp_path)
    monkeypatch.setattr(command.report, "README", tmp_path / "README.md")
    monkeypatch.setattr(command.report, "rendered", lambda text, results: f"{text} {len(results)}")
    monkeypatch.setattr(plot, "speedups", lambda result: drawn.append((result["gpu"], result["date"])) or b"<svg>")
    (tmp_path / "docs").mkdir()
    for results, expected in ((found, [(True, "3")]), (found[:1], [(False, "5")]), (found[3:4], [])):
        (tmp_path / "README.md").write_text("text")
        monkeypatch.setattr(command.merging, "read", lambda results=results: results)
        assert run("report", "--readme").output == "README.md and docs/measured.svg rewritten\n"
        assert (tmp_path / "README.md").read_text() == f"text {len(results)}"
        assert drawn == expected
        drawn.clear()
    assert (tmp_path / "docs" / "measured.svg").read_bytes() == b"<svg>"
