"""What the bench does on a GPU, tested without one."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from test_bench import SHAPE, tiny  # noqa: F401 a fixture

import bench.__main__ as command
from bench import checks, ledger, measure, registry, timing
from bench.worker import Worker, WorkerLost, _serve, unusable
from moe_kernels.verify import Row, verify


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker() as running:
        yield running


def test_a_worker_returns_the_result_or_raises_the_error(worker: Worker) -> None:
    assert worker(math.hypot, 3, 4) == 5
    first = worker(os.getpid)
    assert os.getpid() != first == worker(os.getpid)
    with pytest.raises(RuntimeError, match="ValueError: "):
        worker(math.sqrt, -1.0)
    assert worker(os.getpid) == first


def test_after_a_process_ends_or_hangs_the_next_call_starts_another(worker: Worker) -> None:
    first = worker(os.getpid)
    with pytest.raises(WorkerLost, match="its process ended with status 7"):
        worker(os._exit, 7)
    second = worker(os.getpid)
    with pytest.raises(WorkerLost, match=r"did not end within 0\.2 s"):
        worker(time.sleep, 60, seconds=0.2)
    assert len({first, second, worker(os.getpid)}) == 3


def test_a_worker_stops_after_a_gpu_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert unusable() == ""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    sent: list[tuple] = []
    _serve(SimpleNamespace(recv=lambda: (math.hypot, (3, 4)), send=sent.append))  # returns after the first GPU error
    assert sent == [(5.0, "", "RuntimeError: CUDA error: an illegal memory access was encountered")]


def test_a_crash_costs_the_figures_of_the_crashing_kernel_only(monkeypatch) -> None:
    requested: list[tuple] = []

    def worker(function, job, limits, budget, wanted, *, seconds):
        requested.append((job.op, job.backends, wanted))
        if job.op == "kwta" and "cuda" in job.backends:
            raise WorkerLost("its process ended with status -11")
        return measure.Found(figures=[{"backend": job.backends}])

    jobs = [measure.Job(op, SHAPE, torch.float32, "forward", "cuda", 1, ("triton", "cuda")) for op in ("kwta", "other")]
    first, second = measure.run(jobs, {}, 0.1, None, worker=worker)
    assert requested == [
        ("kwta", ("triton", "cuda"), None), ("kwta", ("triton",), ()), ("kwta", ("cuda",), ()),
        ("other", ("triton", "cuda"), None),
    ]  # fmt: skip
    assert first.figures == [{"backend": ("triton",)}]
    assert list(first.failed) == [("kwta", "cuda", "float32")]
    assert second.figures
    assert not second.failed


def test_a_gpu_run_begins_with_the_aims_in_16_bits() -> None:
    rows = [
        Row(op, backend, dtype, "cuda", 1, 0.0, 0.0, "ok", "")
        for backend in ("cuda", "triton")
        for op in registry.ENTRIES
        for dtype in ("float32", "bfloat16")
    ]
    jobs, _ = measure.plan(rows, measure.Request("papers", first="aims"))
    ordered = measure.round_robin(jobs)
    assert sorted(map(str, ordered)) == sorted(map(str, jobs))
    first = ordered[: len(registry.ENTRIES) + 9]
    assert {job.op for job in first} == set(registry.ENTRIES)
    in_16_bits = {
        job.op for job in first if torch.bfloat16 in registry.ENTRIES[job.op].dtypes and job.dtype == torch.bfloat16
    }
    assert {"grouped_gemm", "expert_mlp", "combine", "dispatch", "kwta", "tree_gate"} <= in_16_bits
    products = [job for job in ordered if job.op == "expert_mlp"]
    assert products[0].shape == {"T": 32768, "D": 2048, "H": 768, "E": 128, "K": 8, "routing": "uniform"}
    assert not any(
        job.dtype == torch.float32 and job.shape["T"] == 32768 and job.shape["D"] == 2048 for job in products
    )
    assert all(job.curve for job in ordered[-20:])


@pytest.mark.usefixtures("tiny")
def test_results_are_written_during_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "WRITE_SECONDS", 0)
    real, seen = measure.run, list[int]()

    def run(*arguments):
        for index, each in enumerate(real(*arguments)):
            if index == 2:
                seen.extend(len(entry["figures"]) for entry in ledger.read(tmp_path)[0]["entries"])
                raise KeyboardInterrupt
            yield each

    monkeypatch.setattr(measure, "run", run)
    rows = {row: {} for row in verify(["kwta"], ["cpu"], small=True)}
    with pytest.raises(KeyboardInterrupt):
        command._measure_and_check(rows, measure.Request(dtypes=("float32",)), 0.0, tmp_path)
    assert seen == [2, 0, 0, 0]


def test_each_verdict_on_a_gpu_has_its_own_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the other process does not import tests/ptx
    log = tmp_path / "nowhere yet" / "log"
    monkeypatch.setattr(checks, "DTYPES", (torch.float32,))
    found = checks.verify_all(["make_plan"], ["triton"], small=True, log=log)
    assert [(row.operation, row.backend, row.dtype, row.verdict) for row in found] == [
        ("make_plan", "triton", "float32", "ok")
    ]
    assert not log.exists()
    monkeypatch.setattr(checks, "VERIFY_PROGRAM", checks.VERIFY_PROGRAM + "print('goodbye')")
    assert [row.verdict for row in checks.verify_all(["make_plan"], ["triton"], small=True, log=log)] == ["ok"]
    outside = checks.verify_all(["make_plan"], ["triton"], small=True, seconds=0.5, log=log)
    assert {(row.verdict, row.note) for row in outside} == {("not run", checks.OUT_OF_TIME)}
    monkeypatch.setattr(checks, "VERIFY_PROGRAM", "print('line 1\\nthe last line'); import os; os.abort()")
    (row,) = checks.verify_all(["make_plan"], ["triton"], small=True, log=log)
    assert (row.verdict, row.note) == ("FAILED", "its process ended with status -6: the last line")
    assert "line 1" in log.read_text()


def test_a_suite_out_of_time_counts_the_tests_that_ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "[gw0] [ 1%] PASSED tests/test_kwta.py::one\n[gw1] [ 2%] FAILED tests/test_kwta.py::two[triton]\n"
    monkeypatch.setattr(checks, "run_captured", lambda command, seconds: (None, text))
    assert checks.suite(1.0, tmp_path / "log") == {"pytest": "FAILED: 1 tests, 1 passed before the time was out"}
    assert "two[triton]" in (tmp_path / "log").read_text()


def test_input_sets_exceed_l2_and_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(L2_cache_size=50 * 2**20))
    assert timing.sets_for(2**20) == 64
    assert timing.sets_for(10 * 2**20) == 15
    assert timing.sets_for(2**30) == 2
    assert timing.sets_for(10 * 2**20, held=4 * 2**30) == 4
    largest = registry.ENTRIES["make_plan"].shapes["aims"][0]
    inputs = registry.ENTRIES["make_plan"].inputs({**largest, "T": 64}, torch.float32, "cpu")
    assert max(each.numel() for each in inputs.values() if isinstance(each, torch.Tensor)) <= 64 * largest["E"]


def test_a_job_without_memory_fails_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure, "_samples", full)
    job = measure.Job("kwta", SHAPE, torch.float32, "forward", "cpu", 1, ("cpu",))
    (found,) = measure.run([job], {}, 0.1)
    assert (found.left_out, found.failed) == ([f"{job}: no room in the GPU's memory"], {})
