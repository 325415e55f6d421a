"""The bench on a GPU: kernels that end their process, and machines that are gone before the end."""

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
from bench.apart import Apart, Lost, _serve, unusable
from moe_kernels.verify import Row, verify


@pytest.fixture
def apart() -> Iterator[Apart]:
    with Apart() as here:
        yield here


def test_a_call_apart_returns_or_raises_there(apart: Apart) -> None:
    assert apart(math.hypot, 3, 4) == 5
    first = apart(os.getpid)
    assert os.getpid() != first == apart(os.getpid)
    with pytest.raises(RuntimeError, match="ValueError: "):
        apart(math.sqrt, -1.0)
    assert apart(os.getpid) == first


def test_a_process_that_ends_or_hangs_is_lost_and_the_next_call_gets_another(apart: Apart) -> None:
    first = apart(os.getpid)
    with pytest.raises(Lost, match="its process ended with status 7"):
        apart(os._exit, 7)
    second = apart(os.getpid)
    with pytest.raises(Lost, match="did not end within 0 s"):
        apart(time.sleep, 60, seconds=0.2)
    assert len({first, second, apart(os.getpid)}) == 3


def test_a_process_whose_gpu_takes_no_more_work_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert unusable() == ""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    sent: list[tuple] = []
    _serve(
        SimpleNamespace(recv=lambda: (math.hypot, (3, 4)), send=sent.append)
    )  # it returns after the first broken result
    assert sent == [(5.0, "", "RuntimeError: CUDA error: an illegal memory access was encountered")]


def test_a_job_that_loses_its_process_fails_alone_and_who_is_to_blame_has_no_figure(monkeypatch) -> None:
    asked: list[tuple] = []

    def apart(function, job, limits, budget, wanted, *, seconds):
        asked.append((job.op, job.backends, wanted))
        if job.op == "kwta" and "cuda" in job.backends:
            raise Lost("its process ended with status -11")
        return measure.Found(figures=[{"backend": job.backends}])

    jobs = [measure.Job(op, SHAPE, torch.float32, "forward", "cuda", 1, ("triton", "cuda")) for op in ("kwta", "other")]
    first, second = measure.run(jobs, {}, 0.1, None, apart=apart)
    assert asked == [
        ("kwta", ("triton", "cuda"), None), ("kwta", ("triton",), ()), ("kwta", ("cuda",), ()),
        ("other", ("triton", "cuda"), None),
    ]  # fmt: skip
    assert first.figures == [{"backend": ("triton",)}]
    assert list(first.failed) == [("kwta", "cuda", "float32")]
    assert second.figures
    assert not second.failed


def test_the_gpus_ten_minutes_begin_with_the_aims_in_16_bits() -> None:
    rows = [
        Row(op, backend, dtype, "cuda", 1, 0.0, 0.0, "ok", "")
        for backend in ("cuda", "triton")
        for op in registry.ENTRIES
        for dtype in ("float32", "bfloat16")
    ]
    jobs, _ = measure.plan(rows, measure.Request("papers", first="aims"))
    turns = measure.in_turns(jobs)
    assert sorted(map(str, turns)) == sorted(map(str, jobs))
    first = turns[: len(registry.ENTRIES) + 9]
    assert {job.op for job in first} == set(registry.ENTRIES)
    wide = {
        job.op for job in first if torch.bfloat16 in registry.ENTRIES[job.op].dtypes and job.dtype == torch.bfloat16
    }
    assert {"grouped_gemm", "expert_mlp", "combine", "dispatch", "kwta", "tree_gate"} <= wide
    products = [job for job in turns if job.op == "expert_mlp"]
    assert products[0].shape == {"T": 32768, "D": 2048, "H": 768, "E": 128, "K": 8, "routing": "uniform"}
    assert not any(
        job.dtype == torch.float32 and job.shape["T"] == 32768 and job.shape["D"] == 2048 for job in products
    )
    assert all(job.curve for job in turns[-20:])


@pytest.mark.usefixtures("tiny")
def test_what_was_measured_is_written_before_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "EVERY", 0)
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
        command._proved(rows, measure.Request(dtypes=("float32",)), 0.0, tmp_path)
    assert seen == [2, 0, 0, 0]


def test_a_verdict_on_a_gpu_is_one_processs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the other process has no executor of PTX
    log = tmp_path / "nowhere yet" / "log"
    monkeypatch.setattr(checks, "DTYPES", (torch.float32,))
    found = checks.verified(["make_plan"], ["triton"], small=True, log=log)
    assert [(row.operation, row.backend, row.dtype, row.verdict) for row in found] == [
        ("make_plan", "triton", "float32", "ok")
    ]
    assert not log.exists()
    monkeypatch.setattr(checks, "VERIFIES", checks.VERIFIES + "print('goodbye')")
    assert [row.verdict for row in checks.verified(["make_plan"], ["triton"], small=True, log=log)] == ["ok"]
    outside = checks.verified(["make_plan"], ["triton"], small=True, seconds=0.5, log=log)
    assert {(row.verdict, row.note) for row in outside} == {("not run", checks.OUT_OF_TIME)}
    monkeypatch.setattr(checks, "VERIFIES", "print('line 1\\nthe last words'); import os; os.abort()")
    (row,) = checks.verified(["make_plan"], ["triton"], small=True, log=log)
    assert (row.verdict, row.note) == ("FAILED", "its process ended with status -6: the last words")
    assert "line 1" in log.read_text()


def test_a_suite_out_of_time_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "[gw0] [ 1%] PASSED tests/test_kwta.py::one\n[gw1] [ 2%] FAILED tests/test_kwta.py::two[triton]\n"
    monkeypatch.setattr(checks, "finished", lambda command, seconds: (None, text))
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


def test_a_job_without_room_speaks_against_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure, "_samples", full)
    job = measure.Job("kwta", SHAPE, torch.float32, "forward", "cpu", 1, ("cpu",))
    (found,) = measure.run([job], {}, 0.1)
    assert (found.left_out, found.failed) == ([f"{job}: no room in the GPU's memory"], {})
