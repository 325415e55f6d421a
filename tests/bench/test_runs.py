"""A run of the bench: the order of its steps, their limits, and what it writes, with stand-ins for kernels and GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from bench import checks, ledger, measure, runs, verifying
from bench.console import console
from bench.worker import WorkerLost
from tests.helpers.bench import ROW, SHAPE

ON_GPU = replace(ROW, backend="cuda", device="cuda")
WRONG = replace(ON_GPU, operation="sinkhorn", verdict="FAILED", note="worst: y", cases=2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time of the run, which passes only if a test says so."""
    passing = SimpleNamespace(now=100.0)
    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: passing.now))
    return passing


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = runs.info.machine() | {"gpus": [{"name": "Some GPU", "memory_gib": 80}]}
    monkeypatch.setattr(runs.info, "machine", lambda: machine)
    monkeypatch.setattr(runs, "_without_sensors", lambda device: [f"no sensors of {device}"])


def begun(out: Path, until: float = math.inf, **changes: Any) -> runs.Run:
    run = runs.Run(out, measure.Request(peers=("torch",)), 0.25, until)
    for name, value in changes.items():
        setattr(run, name, value)
    return run


def test_gpu_kernels_are_verified_in_processes_and_the_others_here(clock, gpu, monkeypatch, tmp_path: Path) -> None:
    asked: list[tuple] = []
    run = begun(tmp_path, until=300.0)

    def here(ops, names, *, small) -> Iterator[Any]:
        asked.append(("here", ops, names, small))
        yield ROW

    def verify_all(*given) -> Iterator[Any]:
        asked.append(("processes", *given))
        for row, words in ((WRONG, {}), (ON_GPU, {"repeatable": "ok"})):
            yield row, words
            assert ledger.load(run.path)["entries"][-1]["operation"] == row.operation  # it is written at once

    monkeypatch.setattr(runs, "verify", here)
    monkeypatch.setattr(verifying, "verify_all", verify_all)
    monkeypatch.setattr(verifying, "captured_steps", lambda *given: pytest.fail("not all operations were asked for"))
    with console.capture() as printed:
        run.verify(["sinkhorn", "kwta"], ["cuda", "cpu", "triton"], small=True, share=0.5)
    assert asked == [
        ("here", ["sinkhorn", "kwta"], ["cpu"], False),
        ("processes", ("sinkhorn", "kwta"), ["cuda", "triton"], True, 100.0, run.log),
    ]
    assert list(run.rows.items()) == [(ROW, {}), (ON_GPU, {"repeatable": "ok"}), (WRONG, {})]
    assert printed.get().splitlines()[:3] == [
        "FAILED sinkhorn cuda float32: worst: y",  # as soon as it is known, and once more below the number
        "2 of 3 kernels (operation, backend, dtype) agree with the definition",
        "FAILED sinkhorn cuda float32: worst: y",
    ]


def test_captured_steps_are_verified_with_all_operations(clock, gpu, monkeypatch, tmp_path: Path) -> None:
    asked: list[tuple] = []
    run = begun(tmp_path, until=300.0)

    def captured_steps(*given) -> Iterator[tuple[str, str]]:
        asked.append(given)
        for word in ("ok", "FAILED: bits"):
            yield f"a step, {word}", word
            assert ledger.load(run.path)["suite"][f"a step, {word}"] == word

    monkeypatch.setattr(runs, "verify", lambda *given, **named: pytest.fail("no CPU kernel was asked for"))
    monkeypatch.setattr(verifying, "verify_all", lambda ops, *given: asked.append(ops) or iter([(ON_GPU, {})]))
    monkeypatch.setattr(verifying, "captured_steps", captured_steps)
    run.verify([], ["triton", "cuda"])
    assert asked == [tuple(runs.OPERATIONS), (["triton", "cuda"], 100.0, run.log)]
    assert run.failed


def test_without_a_gpu_every_backend_is_verified_here(monkeypatch, tmp_path: Path) -> None:
    asked: list[tuple] = []
    monkeypatch.setattr(runs, "verify", lambda *given, small: asked.append((*given, small)) or iter([ROW]))
    monkeypatch.setattr(verifying, "verify_all", lambda *given: pytest.fail("there is no GPU"))
    monkeypatch.setattr(verifying, "captured_steps", lambda *given: pytest.fail("there is no GPU"))
    run = begun(tmp_path)
    monkeypatch.setattr(type(run), "device", "cpu")
    run.verify([], [])
    assert asked == [([], list(runs.KERNELS), False)]


JOBS = [measure.Job("kwta", SHAPE | {"R": rows}, torch.float32, "forward", "cpu", 1, ("cpu",)) for rows in range(1, 7)]


@pytest.mark.parametrize(("until", "share", "end"), [(math.inf, 1.0, math.inf), (300.0, 1.0, 300.0), (300, 0.25, 150)])
def test_measuring_takes_turns_if_its_time_is_limited(clock, monkeypatch, tmp_path, until, share, end) -> None:
    asked: list[tuple] = []
    monkeypatch.setattr(measure, "plan", lambda rows, request: (JOBS, ["one: why"]))
    monkeypatch.setattr(measure, "round_robin", lambda jobs: jobs[::-1])
    monkeypatch.setattr(measure, "ceilings", lambda jobs: {"1 thread": {"copy": len(jobs)}})
    monkeypatch.setattr(measure, "run", lambda *given: asked.append(given) or [measure.Found()] * len(JOBS))
    run = begun(tmp_path, until, rows={ROW: {}})
    monkeypatch.setattr(type(run), "device", "cpu")
    run.measure(share)
    jobs = JOBS if until == math.inf else JOBS[::-1]
    assert asked == [(jobs, {"1 thread": {"copy": 6}}, 0.25, ("torch",), end, None)]
    found = ledger.load(run.path)
    assert found["ceilings"] == {"1 thread": {"copy": 6}}
    assert found["not_measured"] == ["one: why", "clocks, power and energy: no GPU"]


def test_a_result_is_written_when_over_five_seconds_have_passed(clock, monkeypatch, tmp_path: Path) -> None:
    """A job takes 2.5 s here, so that every third one is followed by a write."""
    written: list[int] = []

    def measured(*given) -> Iterator[measure.Found]:
        for index, _ in enumerate(JOBS):
            clock.now += 2.5
            yield measure.Found(left_out=[f"job {index}"])

    monkeypatch.setattr(measure, "plan", lambda rows, request: (JOBS, []))
    monkeypatch.setattr(measure, "ceilings", lambda jobs: {})
    monkeypatch.setattr(measure, "run", measured)
    run = begun(tmp_path)
    monkeypatch.setattr(type(run), "device", "cpu")
    monkeypatch.setattr(run, "write", lambda: written.append(len(run.found.left_out)))
    run.measure()
    assert written == [0, 3, 6, 6]


@pytest.mark.parametrize("raised", [None, WorkerLost("did not end within 60 s"), RuntimeError("no product")])
def test_on_a_gpu_another_process_measures(clock, gpu, monkeypatch, tmp_path: Path, raised) -> None:
    asked: list[tuple] = []

    def worker(function, *given, seconds) -> dict:
        asked.append((function, given, seconds))
        if raised:
            raise raised
        return {"cuda": {"copy": 9.0}}

    monkeypatch.setattr(runs, "Worker", lambda: nullcontext(worker))
    monkeypatch.setattr(measure, "plan", lambda rows, request: (JOBS, []))
    monkeypatch.setattr(measure, "run", lambda jobs, *given: asked.append((jobs, *given)) or [measure.Found()] * 6)
    run = begun(tmp_path)
    if raised:
        monkeypatch.setattr(measure, "run", lambda jobs, *given: asked.append((jobs, *given)) or [])
    run.measure()
    limits: dict = {} if raised else {"cuda": {"copy": 9.0}}
    assert asked == [
        (measure.ceilings, (JOBS,), 60),
        ([] if raised else JOBS, limits, 0.25, ("torch",), math.inf, worker),
    ]
    why = f"nothing was measured: a copy or a product of torch failed: {raised}"
    assert ledger.load(run.path)["not_measured"] == [*[why] * bool(raised), "no sensors of cuda"]


def test_only_rows_of_the_cpu_are_checked_on_the_cpu(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "kernel_checks", lambda row: {"repeatable": f"ok {row.backend}"})
    run = begun(tmp_path, rows={ROW: {}, ON_GPU: {"no host sync": "ok"}})
    run.check_on_cpu()
    assert run.rows == {ROW: {"repeatable": "ok cpu"}, ON_GPU: {"no host sync": "ok"}}
    assert [each["checks"] for each in ledger.load(run.path)["entries"]] == list(run.rows.values())


PROVED = (
    replace(ON_GPU, operation="tree_gate"),
    ON_GPU,
    replace(ON_GPU, dtype="bfloat16"),
    WRONG,
    replace(ON_GPU, backend="triton", device="cpu"),
)


@pytest.mark.parametrize(("until", "half", "whole"), [(math.inf, None, None), (500.0, 200.0, 400.0)])
def test_the_suite_and_sanitizers_prove_what_is_right_on_a_gpu(
    clock, gpu, monkeypatch, tmp_path: Path, until, half, whole
) -> None:
    asked: list[tuple] = []

    def sanitizers(*given) -> Iterator[tuple[tuple[str, str], dict[str, str]]]:
        asked.append(given)
        yield ("kwta", "cuda"), {"memcheck": "ok"}
        (entry, *_) = (each for each in ledger.load(run.path)["entries"] if each["operation"] == "kwta")
        assert entry["checks"]["memcheck"] == "ok"

    def suite(*given) -> dict[str, str]:
        asked.append(given)
        assert ledger.load(run.path)["suite"]["pytest"] == checks.OUT_OF_TIME  # if the run ended here
        return {"pytest": "ok"}

    monkeypatch.setattr(checks, "suite", suite)
    monkeypatch.setattr(checks, "sanitizers", sanitizers)
    run = begun(tmp_path, until, rows={row: {} for row in PROVED}, suite={"a step": "ok"})
    run.prove(True)
    pairs = [("kwta", "cuda"), ("tree_gate", "cuda")]
    assert asked == [(half, run.log), (pairs, whole, run.log)]
    late = dict.fromkeys(checks.SANITIZERS, checks.OUT_OF_TIME)
    assert run.sanitized == {pairs[0]: late | {"memcheck": "ok"}, pairs[1]: late}
    assert run.suite == {"a step": "ok", "pytest": "ok"}


@pytest.mark.parametrize(
    ("device", "proof", "said"),
    [("cuda", False, "not run: --no-proof"), ("cpu", True, "not run: no GPU"), ("cpu", False, "not run: no GPU")],
)
def test_what_is_not_proved_says_why(monkeypatch, tmp_path: Path, device, proof, said) -> None:
    for name in ("suite", "sanitizers"):
        monkeypatch.setattr(checks, name, lambda *given: pytest.fail("it ran"))
    run = begun(tmp_path, rows={ON_GPU: {}} if device == "cuda" else {ROW: {}})
    monkeypatch.setattr(type(run), "device", device)
    run.prove(proof)
    assert ledger.load(run.path)["suite"] == {"pytest": said}
    assert run.sanitized == ({("kwta", "cuda"): dict.fromkeys(checks.SANITIZERS, said)} if device == "cuda" else {})


def test_an_entry_has_the_checks_and_figures_of_its_row_alone(gpu, tmp_path: Path) -> None:
    def figure(backend: str, dtype: str, us: float) -> dict:
        return {"op": "kwta", "backend": backend, "dtype": dtype, "us": us}

    bfloat16, interpreted = replace(ON_GPU, dtype="bfloat16"), replace(ROW, backend="cuda", dtype="float16")
    run = begun(tmp_path, rows={ROW: {}, ON_GPU: {"repeatable": "ok"}, bfloat16: {}, interpreted: {}})
    run.rows[replace(ON_GPU, backend="triton", verdict="not run")] = {}
    run.sanitized = {("kwta", "cuda"): {"memcheck": "ok"}}
    keys = ("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")
    run.found.figures = [figure(*key, us) for us, key in enumerate(keys)] + [figure("cuda", "float32", 7.0)]
    run.found.curves = [figure("cuda", "bfloat16", 8.0)]
    run.found.left_out = ["one: why"]
    run.found.failed = {("kwta", "cuda", "bfloat16"): "kwta: raised"}
    result = run.result()
    entries = result["entries"]
    assert [(each["backend"], each["dtype"]) for each in entries] == [*keys, ("cuda", "float16")]
    assert [each["checks"] for each in entries] == [
        {}, {"repeatable": "ok", "memcheck": "ok"}, {"memcheck": "ok"}, {},
    ]  # fmt: skip
    assert [[one["us"] for one in each["figures"]] for each in entries] == [[0], [1, 7.0], [2], []]
    assert [[one["us"] for one in each["curves"]] for each in entries] == [[], [], [8.0], []]
    assert [(each["verdict"], each["note"]) for each in entries] == [
        ("ok", ""), ("ok", ""), ("FAILED", "kwta: raised"), ("ok", ""),
    ]  # fmt: skip
    assert [each["sources"] for each in entries] == [ledger.digest("kwta", name) for name, _ in (*keys, ("cuda", ""))]
    assert (result["device"], result["gpu"], result["machine"]) == ("Some GPU", True, run.facts)
    assert result["not_measured"] == ["one: why", "no sensors of cuda"]
    assert result["started"][:10] == run.began.date().isoformat()


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, False),
        ({"suite": {"pytest": "not run: no GPU", "a step": "FAILED: bits"}}, True),
        ({"rows": {ROW: {"repeatable": "FAILED: forward differed"}}}, True),
        ({"rows": {ROW: {}, WRONG: {}}}, True),
        ({"sanitized": {("kwta", "cuda"): {"racecheck": "FAILED: a race"}}}, True),
        ({"sanitized": {("kwta", "cuda"): {"racecheck": "not run: out of time"}}}, False),
    ],
)
def test_a_run_has_failed_if_a_kernel_a_check_or_the_suite_has(tmp_path: Path, changes, failed) -> None:
    assert begun(tmp_path, **({"rows": {ROW: {}, ON_GPU: {}}, "suite": {"pytest": "ok"}} | changes)).failed == failed


def test_the_files_that_a_run_has_written_are_printed(tmp_path: Path) -> None:
    run = begun(tmp_path)
    for log in ((), (run.log,)):
        for path in log:
            path.touch()
        with console.capture() as printed:
            run.print_paths([tmp_path / "report.md"])
        assert printed.get().splitlines() == [f"wrote {path}" for path in (run.path, tmp_path / "report.md", *log)]
