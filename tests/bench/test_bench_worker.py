"""What the bench does on a GPU, tested without one."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from bench import checks, measure, merging, nvml, registry, runs, timing, verifying
from bench.processes import Calls, Ended
from bench.worker import Worker, WorkerLost, _serve, unusable
from moe_kernels.verify import DISPUTED, Row, cases, check, together
from moe_kernels.verify.operation import Case, Operation
from tests.helpers.bench import ROW, SHAPE


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


def test_a_usable_gpu_has_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    assert unusable() == ""
    assert waited == [True]


def test_a_worker_serves_until_its_pipe_ends() -> None:
    calls, sent = iter([(math.sqrt, (-1.0,)), (math.hypot, (3, 4))]), list[tuple]()

    def recv() -> tuple:
        try:
            return next(calls)
        except StopIteration:
            raise EOFError from None

    _serve(SimpleNamespace(recv=recv, send=sent.append))
    (nothing, error, no_gpu_error), last = sent
    assert (nothing, error[:12], no_gpu_error) == (None, "ValueError: ", "")
    assert last == (5.0, "", "")


@pytest.mark.parametrize(
    ("answer", "error", "kept"),
    [
        ((5.0, "", ""), None, True),
        ((None, "ValueError: no", ""), RuntimeError("ValueError: no"), True),
        ((5.0, "", "CUDA error: lost"), WorkerLost("CUDA error: lost"), False),
        ((None, "ValueError: no", "CUDA error: lost"), WorkerLost("ValueError: no"), False),
    ],
)
def test_a_worker_that_lost_its_gpu_gives_no_result(answer: tuple, error: Exception | None, kept: bool) -> None:
    """Its process ends, also after a call that returned a result, since the GPU may have computed it wrong."""
    worker, asked = Worker(), []
    pipe = SimpleNamespace(send=asked.append, poll=lambda seconds: True, recv=lambda: answer, close=lambda: None)
    process = SimpleNamespace(kill=lambda: asked.append("kill"), join=lambda: None)
    worker._pipe, worker._process = pipe, process
    if error is None:
        assert worker(math.hypot, 3, 4) == 5.0
    else:
        with pytest.raises(RuntimeError, match=f"^{error}$") as raised:
            worker(math.hypot, 3, 4)
        assert type(raised.value) is type(error)
    assert asked == [(math.hypot, (3, 4)), *["kill"] * (not kept)]
    assert (worker._pipe, worker._process) == ((pipe, process) if kept else (None, None))


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


def test_a_kernel_is_not_measured_on_sizes_above_its_limits() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    rows = [Row("sinkhorn", backend, "float32", "cuda", 1, 0.0, 0.0, "ok", "") for backend in ("triton", "cuda")]
    jobs, _ = measure.plan(rows, measure.Request("papers"))
    measured = {(job.shape["n"], job.backends) for job in jobs if not job.curve}
    assert measured == {(4, ("triton", "cuda")), (16, ("triton", "cuda")), (64, ("triton", "cuda")), (256, ("triton",))}
    assert {job.backends for job in jobs if job.curve and job.shape["n"] == 512} == {("triton",)}
    jobs, _ = measure.plan(rows[1:], measure.Request("papers"))
    assert max(job.shape["n"] for job in jobs) == 64


@pytest.mark.usefixtures("tiny")
def test_results_are_written_during_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runs, "WRITE_SECONDS", 0)
    real, seen = measure.run, list[int]()

    def run(*arguments):
        for index, each in enumerate(real(*arguments)):
            if index == 2:
                seen.extend(len(entry["figures"]) for entry in merging.read(tmp_path)[0]["entries"])
                raise KeyboardInterrupt
            yield each

    monkeypatch.setattr(measure, "run", run)
    begun = runs.Run(tmp_path, measure.Request(dtypes=("float32",)), 0.0)
    begun.verify(["kwta"], ["cpu"])
    with pytest.raises(KeyboardInterrupt):
        begun.measure()
    assert seen == [2, 0, 0, 0]


def ended(status: int | None, *lines: str) -> Ended:
    return Ended(status, "".join(f"{line}\n" for line in lines))


def test_how_a_process_ended_decides_its_row() -> None:
    job = verifying.Job("kwta", "cuda", torch.float32, "cuda", (1, 2))
    begun = f"{verifying.CASE}{time.time() - 5:.1f} one"
    assert verifying.row_of(job, ended(None)).verdict == "not run"
    assert verifying.row_of(job, ended(None, begun)).note == "not run: out of time after 0 cases"  # slow, not hanging
    long_ago = f"{verifying.CASE}{time.time() - verifying.HUNG_SECONDS - 5:.1f} two"
    row = verifying.row_of(job, ended(None, begun, long_ago))
    assert (row.verdict, row.note) == ("FAILED", "two did not end within 30 s")
    row = verifying.row_of(job, ended(-6, begun, "CUDA error: no", "more"))
    assert (row.verdict, row.note) == ("FAILED", "its process ended with status -6 in one: CUDA error: no")
    told = verifying.RESULT + json.dumps(asdict(job.row("ok", "", 3)))
    assert verifying.row_of(job, ended(0, begun, told, "goodbye")) == job.row("ok", "", 3)
    assert verifying.row_of(job, ended(1, begun, told)).verdict == "FAILED"  # it may have ended at its exit
    assert verifying.checks_of(ended(None, long_ago))["repeatable"] == "FAILED: two did not end within 30 s"


def test_parts_of_a_kernel_make_one_row() -> None:
    job = verifying.Job("kwta", "cuda", torch.float32, "cuda", (0, 1))
    one, two = replace(job.row("ok", "worst: a", 3), error=1.0, allowed=4.0), job.row("ok", "", 4)
    assert together([two, one]) == replace(one, cases=7)
    assert together([one, job.row("not run", "late", 1)]) == replace(job.row("not run", "late"), cases=4)
    assert together([job.row("FAILED", "wrong", 2), one, job.row("not run", "late")]).note == "wrong"
    disputed = replace(two, note=f"{DISPUTED}: y of one")
    assert together([one, disputed]).note == disputed.note


@pytest.mark.parametrize("parts", [1, 2, 7, 100])
def test_parts_have_every_case_once(parts: int) -> None:
    names: list[str] = []
    given = {"small": True, "begun": names.append}
    rows = [check("topk_gate", "cpu", torch.float32, "cpu", part=(index, parts), **given) for index in range(parts)]
    assert names == [case.name for case in cases("topk_gate", small=True)]
    if parts <= len(names):
        whole = check("topk_gate", "cpu", torch.float32, "cpu", small=True)
        assert together(rows) == whole


def test_rows_have_their_gaps_on_another_device_too() -> None:
    strided = [case for case in cases("kwta", device="meta") if ", strided" in case.name]
    assert len(strided) > 20
    for name, inputs in strided:
        assert inputs["x"].stride(0) == inputs["x"].shape[1] + 3, name


class Moved(torch.Tensor):
    """A CPU tensor of a pretended GPU, whose `.to("cpu")` is a plain tensor."""

    def to(self, *arguments, **named):
        return self.as_subclass(torch.Tensor) if arguments == ("cpu",) else super().to(*arguments, **named)


def raises() -> int:
    raise RuntimeError("not implemented for 'Half'")


@pytest.mark.parametrize(
    ("kernel", "definition_there", "verdict", "note"),
    [
        (lambda: 0, lambda: 0, "ok", ""),
        (lambda: 1, lambda: 0, "FAILED", "worst: y of one, on the CPU too"),
        (lambda: 0, lambda: 1, "ok", f"{DISPUTED}: y of one"),
        (lambda: 1, lambda: 1, "ok", ""),
        (lambda: 0, raises, "ok", f"{DISPUTED}: the definition raises RuntimeError: not implemented for 'Half'"),
        (lambda: 1, raises, "FAILED", "worst: y of one, on the CPU too"),
    ],
)
def test_torchs_own_kernels_on_a_gpu_are_told_from_ours(monkeypatch, kernel, definition_there, verdict, note) -> None:
    def run(inputs, backend):
        x = inputs["x"]
        error = kernel() if backend != "reference" else definition_there() if isinstance(x, Moved) else 0
        return {"y": x.as_subclass(torch.Tensor) + error}

    operation = Operation(
        lambda dtype, device, small: iter([Case("one", {"x": torch.ones(3).as_subclass(Moved)})]),
        run,
        exact=frozenset({"y"}),
    )
    monkeypatch.setitem(check.__globals__["OPERATIONS"], "kwta", operation)
    row = check("kwta", "cuda", torch.float32, "cuda")
    assert row.verdict == verdict
    assert row.note.startswith(note) if note else row.note == ""


def test_a_process_that_is_late_says_where_it_is() -> None:
    with Calls() as calls:
        assert calls(os.getpid, seconds=30).status == 0
        late = calls(time.sleep, 60, seconds=0.5)
    assert late.status is None
    assert "bench/processes.py" in late.printed
    assert calls(os.getpid, seconds=30) == Ended(None, "")  # after the end of the block


def test_what_the_forks_have_imported_has_used_no_gpu() -> None:
    program = """
import importlib, sys, torch
from bench.processes import PRELOADED
def used(*arguments): raise SystemExit("a GPU was used")
torch.cuda._lazy_init = torch.cuda.init = torch.cuda.get_device_properties = used
for name in ("_cuda_init", "_cuda_getDeviceCount", "_cuda_getCurrentRawStream"): setattr(torch._C, name, used)
torch.cuda._is_compiled = lambda: True
for name in PRELOADED: importlib.import_module(name)
assert "torch._dynamo" in sys.modules
"""
    assert checks.run([sys.executable, "-c", program], PYTORCH_NVML_BASED_CUDA_CHECK="1") == "ok"


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


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ["repeatable"]),
        ({"device": "cuda"}, ["repeatable", "no host sync"]),
        ({"verdict": "FAILED"}, []),
        ({"verdict": "not run"}, []),
        ({"operation": "kwta_mask"}, []),
    ],
    ids=str,
)
def test_correct_kernels_with_an_entry_are_checked(monkeypatch: pytest.MonkeyPatch, changes: dict, names: list) -> None:
    for each in ("repeatable", "no_host_sync"):
        monkeypatch.setattr(checks, each, lambda row: "ok")
    assert checks.kernel_checks(replace(ROW, **changes)) == dict.fromkeys(names, "ok")


@pytest.mark.parametrize(("seconds", "verdict"), [(None, "ok"), (1.0, "ok"), (0.99, "not run: out of time")])
def test_sanitizers_start_nothing_in_the_last_second(monkeypatch, tmp_path: Path, seconds, verdict) -> None:
    started = []
    monkeypatch.setattr(checks.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(checks, "sanitizer_problem", lambda program, seconds: "")
    monkeypatch.setattr(checks, "run", lambda *given, **named: started.append((given, named)) or "ok")
    monkeypatch.setattr(checks, "time", SimpleNamespace(monotonic=lambda: 7.0))
    found = list(checks.sanitizers([("kwta", "cuda")], seconds, tmp_path / "log"))
    assert sorted(found, key=str) == [(("kwta", "cuda"), {tool: verdict}) for tool in sorted(checks.SANITIZERS)]
    assert len(started) == (3 if verdict == "ok" else 0)
    for (command, left, log), variables in started:
        assert command[:2] == ["/bin/compute-sanitizer", "--tool"]
        assert command[-7:] == ["moe_kernels", "verify", "--small", "--op", "kwta", "--backend", "cuda"]
        assert (left, log, variables) == (seconds, tmp_path / "log", checks.SANITIZER_ENV)


@pytest.mark.parametrize(
    ("program", "tried", "problem"),
    [
        (None, "ok", "compute-sanitizer is not installed"),
        ("here", "ok", ""),
        ("here", "FAILED: status 9: no GPU", "compute-sanitizer does not run here: status 9: no GPU"),
        ("here", "not run: out of time", "compute-sanitizer does not run here: not run: out of time"),
    ],
)
def test_why_sanitizers_do_not_run_is_said_of_each(monkeypatch: pytest.MonkeyPatch, program, tried, problem) -> None:
    monkeypatch.setattr(checks, "run", lambda *given, **named: tried)
    monkeypatch.setattr(checks.shutil, "which", lambda name: program)
    assert checks.sanitizer_problem(program) == problem
    if problem:
        verdicts = dict.fromkeys(checks.SANITIZERS, f"not run: {problem}")
        assert list(checks.sanitizers([("kwta", "cuda"), ("kwta", "triton")])) == [
            (("kwta", "cuda"), verdicts), (("kwta", "triton"), verdicts),
        ]  # fmt: skip


def test_nvml_that_fails_is_named_and_a_gpu_without_a_meter_has_no_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def fail(*given):
        raise NVMLError("Driver Not Loaded")

    names = ("nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetClockInfo", "nvmlDeviceGetPowerUsage")
    names += ("nvmlDeviceGetTemperature", "nvmlDeviceGetCurrentClocksThrottleReasons")
    constants = {"NVML_CLOCK_SM": 0, "NVML_CLOCK_MEM": 1, "NVML_TEMPERATURE_GPU": 0, "NVMLError": NVMLError}
    fake = SimpleNamespace(**{name: lambda *given: 8 for name in names}, **constants)
    fake.nvmlDeviceGetTotalEnergyConsumption = fail
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert nvml.missing() == ""
    assert nvml.watch(lambda: None, 1, 0.0) == {
        "sm_mhz": 8, "memory_mhz": 8, "watts": 0.008, "celsius": 8, "throttled": "hardware slowdown",
    }  # fmt: skip
    for name in ("nvmlInit", "nvmlDeviceGetHandleByIndex"):
        with monkeypatch.context() as patch:
            patch.setattr(fake, name, fail)
            assert nvml.missing() == "NVML: Driver Not Loaded"
            assert nvml.watch(lambda: pytest.fail("launched"), 1, 0.0) == {}
