"""Checks of kernels and commands, and the verdicts of kernels that are verified in processes."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
from bench import checks, registry, verifying
from bench.processes import Ended
from moe_kernels.info import Placement
from moe_kernels.verify import DTYPES, OPERATIONS, dtype_name
from tests.helpers.bench import ENTRY, ROW


def calls_of(monkeypatch: pytest.MonkeyPatch, **calls: Any) -> None:
    monkeypatch.setitem(registry.ENTRIES, "kwta", replace(ENTRY, kernel=lambda backend: calls))


@pytest.mark.parametrize("changed", [None, 1, checks.REPEATS - 1, checks.REPEATS])
def test_twenty_runs_are_compared_with_the_first_even_in_one_buffer(monkeypatch, changed: int | None) -> None:
    buffer, made = torch.zeros(4), []

    def forward(inputs: Any) -> torch.Tensor:
        made.append(buffer.fill_(float(len(made) == changed)))
        return buffer

    calls_of(monkeypatch, forward=lambda inputs: torch.ones(2), training=forward)
    within = changed is not None and changed < checks.REPEATS
    assert checks.repeatable(ROW) == ("FAILED: training differed within 20 runs" if within else "ok")
    assert len(made) == (changed + 1 if within else checks.REPEATS)


def test_nans_of_equal_bits_repeat_and_zeros_of_two_signs_do_not(monkeypatch) -> None:
    outputs = [torch.tensor([[math.nan, 1.0]]).expand(3, 2), torch.tensor([1, 2])]
    calls_of(monkeypatch, forward=lambda inputs: outputs)
    assert checks.repeatable(ROW) == "ok"
    signs = iter([0.0, -0.0])
    calls_of(monkeypatch, forward=lambda inputs: (torch.ones(1), torch.tensor([next(signs)])))
    assert checks.repeatable(ROW) == "FAILED: forward differed within 20 runs"


def test_the_direction_that_waits_for_the_gpu_is_named(monkeypatch) -> None:
    calls_of(monkeypatch, forward=lambda inputs: "", training=lambda inputs: "a synchronizing operation")
    monkeypatch.setattr(checks, "host_sync_error", lambda call: call())
    assert checks.no_host_sync(ROW) == "FAILED: training: a synchronizing operation"
    calls_of(monkeypatch, forward=lambda inputs: "")
    assert checks.no_host_sync(ROW) == "ok"


@pytest.mark.parametrize(
    ("status", "text", "verdict", "logged"),
    [
        (0, "fine\n", "ok", False),
        (1, "oh\nno\n\n", "FAILED: status 1: no", True),
        (2, "", "FAILED: status 2: no output", True),
        (-6, "Aborted", "FAILED: status -6: Aborted", True),
        (None, "half", "not run: out of time", True),
    ],
)
def test_the_output_of_a_command_is_kept_unless_it_succeeds(monkeypatch, tmp_path, status, text, verdict, logged):
    given = []
    monkeypatch.setattr(
        checks, "run_captured", lambda *arguments, **named: given.append((arguments, named)) or (status, text)
    )
    log = tmp_path / "a new" / "folder" / "log"
    assert checks.run(iter(["one", "two"]), 7.0, log, NAME="value") == verdict
    assert given == [((["one", "two"], 7.0), {"NAME": "value"})]
    assert log.exists() == logged
    if logged:
        checks.append_log(log, "more", "end")
        assert log.read_text() == f"==== one two\n{text}\n==== more\nend\n"
    checks.append_log(None, "nowhere", "end")


def test_a_log_has_the_end_of_a_long_output(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "LOG_CHARACTERS", 5)
    checks.append_log(tmp_path / "log", "one", "0123456789")
    assert (tmp_path / "log").read_text() == "==== one\n56789\n"


def test_a_command_has_the_given_variables_and_both_its_outputs() -> None:
    program = "import os, sys; print(os.environ['OF_A_TEST'], os.getcwd()); sys.stderr.write('to stderr')"
    status, text = checks.run_captured([sys.executable, "-c", program], OF_A_TEST="here")
    assert (status, sorted(text.splitlines())) == (0, sorted([f"here {checks.ROOT}", "to stderr"]))


@pytest.mark.parametrize(
    ("seconds", "cores", "xdist", "options"),
    [
        (None, 8, True, ["-q", "-n", "4"]),
        (60.0, 8, True, ["-v", "-k", checks.GPU_TESTS, "-n", "4"]),
        (0.0, 1, True, ["-v", "-k", checks.GPU_TESTS, "-n", "1"]),
        (None, 8, False, ["-q"]),
    ],
)
def test_the_suite_is_whole_without_a_limit_and_of_a_gpu_with_one(
    monkeypatch, tmp_path, seconds, cores, xdist, options
) -> None:
    given = []
    monkeypatch.setattr(checks, "cores", lambda: cores)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: {"xdist": xdist or None}[name])
    monkeypatch.setattr(checks, "run_captured", lambda *arguments: given.append(arguments) or (0, "3 passed"))
    assert checks.suite(seconds, tmp_path / "log") == {"pytest": "ok"}
    assert given == [([sys.executable, "-m", "pytest", "--no-header", "--color=no", *options], seconds)]
    assert not (tmp_path / "log").exists()
    monkeypatch.setattr(checks, "run_captured", lambda *arguments: (1, "1 failed, 2 passed"))
    assert checks.suite(seconds, tmp_path / "log") == {"pytest": "FAILED: status 1: 1 failed, 2 passed"}
    assert (tmp_path / "log").read_text() == "==== pytest\n1 failed, 2 passed\n"
    monkeypatch.setattr(checks, "run_captured", lambda *arguments: (None, "a PASSED\nb PASSED\nUNPASSED\n"))
    assert checks.suite(seconds) == {"pytest": "not run: out of time, 2 passed before the time was out"}


def test_cores_are_those_that_the_process_may_use(monkeypatch) -> None:
    monkeypatch.setattr(checks.os, "sched_getaffinity", lambda process: {0: {1, 4, 6}}[process], raising=False)
    monkeypatch.setattr(checks.os, "cpu_count", lambda: 64)
    assert checks.cores() == 3
    monkeypatch.delattr(checks.os, "sched_getaffinity")
    assert checks.cores() == 64
    monkeypatch.setattr(checks.os, "cpu_count", lambda: None)
    assert checks.cores() == 1


def ended(status: int | None, *lines: str) -> Ended:
    return Ended(status, "".join(f"{line}\n" for line in lines))


JOB = verifying.Job("kwta", "cuda", torch.float32, "cuda", (0, 2))


@pytest.mark.parametrize(
    ("found", "bad"),
    [
        (ROW, False),
        (replace(ROW, verdict="FAILED"), True),
        (replace(ROW, verdict="not run", note="FAILED"), False),
        ({"repeatable": "ok", "no host sync": "not run: out of time"}, False),
        ({"repeatable": "ok", "no host sync": "FAILED: forward"}, True),
        ({}, False),
    ],
)
def test_output_of_failures_alone_is_logged(found: Any, bad: bool) -> None:
    assert verifying._bad(found) == bad


def test_a_job_says_which_part_it_is_and_its_row_has_an_error_if_it_failed() -> None:
    assert [str(each) for each in (JOB, JOB._replace(part=(0, 0)))] == [
        "kwta cuda float32, part 1 of 2", "kwta cuda float32, checks",
    ]  # fmt: skip
    assert JOB.row("FAILED", "why").error == math.inf
    assert JOB.row("not run", "why", 3) == replace(
        ROW, backend="cuda", device="cuda", cases=3, verdict="not run", note="why"
    )


def test_a_process_out_of_time_counts_the_cases_that_ended() -> None:
    begun = [f"{verifying.CASE}{time.time() - 5:.1f} case {index}" for index in range(4)]
    row = verifying.row_of(JOB, ended(None, *begun, "more"))
    assert (row.verdict, row.note) == ("not run", "not run: out of time after 3 cases")
    assert verifying.row_of(JOB, ended(None)).note == "not run: out of time after 0 cases"
    for age, hangs in ((verifying.HUNG_SECONDS - 3, False), (verifying.HUNG_SECONDS + 3, True)):
        late = ended(None, f"{verifying.CASE}{time.time() - age:.1f} the last")
        assert (verifying.failure(late) != "") == hangs
        assert (verifying.checks_of(late)["no host sync"] == checks.OUT_OF_TIME) != hangs
    assert verifying.failure(ended(3)) == "its process ended with status 3 in its start: no output"
    said = "its process ended with status 3 in case 3: an Error of one"
    assert verifying.failure(ended(3, *begun, "an error", "an Error of one", "more")) == said
    told = json.dumps({"repeatable": "ok"})
    assert verifying.checks_of(ended(0, *begun, f"{verifying.RESULT}{{}}", verifying.RESULT + told)) == {
        "repeatable": "ok"
    }


@pytest.mark.parametrize("small", [True, False])
def test_every_part_is_verified_and_the_checks_come_with_the_row(monkeypatch, tmp_path: Path, small: bool) -> None:
    """Operations of two parts and of one, on one backend that runs in float32 alone and one that runs nothing."""
    given, log = [], tmp_path / "log"

    def placement(op, backend, dtype):
        if backend == "triton":
            return Placement(None, "Triton is not installed")
        return Placement("cuda", "") if dtype == torch.float32 else Placement(None, f"not in {dtype_name(dtype)}")

    def finished(jobs, call, until):
        given.append((list(jobs), call, until))
        for job in jobs:
            wrong = job.op == "combine" and not job.is_check
            row = job.row("FAILED" if wrong else "ok", "", 3)
            told = {"repeatable": f"of {job.op}"} if job.is_check else asdict(replace(row, error=float(job.part[0])))
            yield job, ended(0, f"output of {job}", verifying.RESULT + json.dumps(told))

    monkeypatch.setattr(verifying, "placement", placement)
    monkeypatch.setattr(verifying, "_finished", finished)
    monkeypatch.setattr(verifying.time, "monotonic", lambda: 100.0)
    found = list(verifying.verify_all(["combine", "sinkhorn"], ["triton", "cuda"], small, 50.0, log))
    not_run = [(row.backend, row.note) for row, words in found if row.verdict == "not run" and words == {}]
    others = [("cuda", f"not in {dtype_name(dtype)}") for dtype in DTYPES if dtype != torch.float32]
    assert not_run == [("triton", "Triton is not installed")] * 2 * len(DTYPES) + others * 2
    ran = {row.operation: (row.verdict, row.cases, words) for row, words in found if row.verdict != "not run"}
    words = {} if small else {"repeatable": "of sinkhorn"}
    assert ran == {"sinkhorn": ("ok", 6, words), "combine": ("FAILED", 3, {})}
    ((jobs, call, until),) = given
    assert (call.func, call.keywords, until) == (verifying._call, {"small": small}, 150.0)
    assert [(job.op, job.part) for job in jobs] == [
        ("sinkhorn", (0, 2)), ("sinkhorn", (1, 2)), *[("sinkhorn", (0, 0))] * (not small),
        ("combine", (0, 1)), *[("combine", (0, 0))] * (not small),
    ]  # fmt: skip
    assert [line for line in log.read_text().splitlines() if line.startswith("====")] == [
        "==== combine cuda float32, part 1 of 1"
    ]


def test_a_process_gets_the_part_that_it_verifies() -> None:
    def calls(function, *given, seconds):
        return (function, given, seconds)

    assert verifying._call(calls, JOB, 7.0, True) == (
        verifying.verify_part, ("kwta", "cuda", "float32", "cuda", True, (0, 2)), 7.0,
    )  # fmt: skip
    assert verifying._call(calls, JOB._replace(part=(0, 0)), 7.0, False) == (
        verifying.check_kernel, ("kwta", "cuda", "float32"), 7.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "word", "logged"),
    [
        (ended(0, verifying.RESULT + '"ok"'), "ok", False),
        (ended(0, verifying.RESULT + '"FAILED: bits"'), "FAILED: bits", True),
        (ended(1, "an error"), "FAILED: its process ended with status 1 in its start: an error", True),
        (ended(None), checks.OUT_OF_TIME, False),
    ],
)
def test_every_captured_step_has_a_verdict(monkeypatch, tmp_path: Path, how: Ended, word: str, logged: bool) -> None:
    monkeypatch.setattr(verifying.captured, "checks", lambda: [("a layer", "bfloat16"), ("a gate", "float32")])
    monkeypatch.setattr(verifying.time, "monotonic", lambda: 100.0)

    def finished(jobs, call, until):
        assert until == 150.0
        for job in jobs:
            assert call(lambda *given, seconds: (given, seconds), job, 7.0) == ((verifying.check_captured, *job), 7.0)
            yield job, how

    monkeypatch.setattr(verifying, "_finished", finished)
    found = dict(verifying.captured_steps(["triton", "cuda"], 50.0, tmp_path / "log"))
    assert found == {
        f"captured step of {layer}, {backend}, {dtype}": word
        for backend in ("triton", "cuda") for layer, dtype in verifying.captured.checks()
    }  # fmt: skip
    assert (tmp_path / "log").exists() == logged


@pytest.mark.parametrize(("left", "seconds"), [(1000.0, 90.0), (20.0, 20.0), (1.0, None)])
def test_a_process_gets_the_time_that_is_left_up_to_its_limit(monkeypatch, left: float, seconds: float | None) -> None:
    given: list[tuple] = []
    monkeypatch.setattr(verifying.time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(checks, "cores", lambda: 1)
    jobs = ["one", "two"]
    found = dict(
        verifying._finished(jobs, lambda calls, job, limit: given.append((job, limit)) or ended(0, job), 100.0 + left)
    )
    assert found == {job: ended(0, job) if seconds else Ended(None, "") for job in jobs}
    assert given == ([(job, seconds) for job in jobs] if seconds else [])


def test_a_process_tells_the_cases_that_it_begins_and_its_result(capsys) -> None:
    verifying.verify_part("topk_gate", "cpu", "float32", "cpu", True, (1, 3))
    lines = capsys.readouterr().out.splitlines()
    told = json.loads(lines[-1].removeprefix(verifying.RESULT))
    assert (told["operation"], told["backend"], told["dtype"], told["verdict"]) == (
        "topk_gate", "cpu", "float32", "ok",
    )  # fmt: skip
    assert len(lines) == 1 + told["cases"]
    total = sum(1 for _ in OPERATIONS["topk_gate"].cases(torch.float32, "cpu", True))
    assert told["cases"] == 2 * total // 3 - total // 3
    assert all(abs(float(line.split()[1]) - time.time()) < 60 for line in lines[:-1])


def test_a_process_checks_a_kernel_on_the_gpu(monkeypatch, capsys) -> None:
    asked = []
    monkeypatch.setattr(checks, "kernel_checks", lambda row: asked.append(row) or {"repeatable": "ok"})
    verifying.check_kernel("kwta", "triton", "bfloat16")
    assert [(row.operation, row.backend, row.dtype, row.device, row.verdict) for row in asked] == [
        ("kwta", "triton", "bfloat16", "cuda", "ok")
    ]
    printed = capsys.readouterr().out
    assert verifying.checks_of(Ended(0, printed)) == {"repeatable": "ok"}
    assert verifying.failure(Ended(-11, printed)).startswith("its process ended with status -11 in its checks: ")
