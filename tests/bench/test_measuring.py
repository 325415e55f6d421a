"""How jobs share the time, what a lost process costs, and which remarks a measurement leaves."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
from bench import measure, nvml, peers, profile, registry, timing
from bench.worker import WorkerLost
from moe_kernels.info import Placement
from tests.helpers.bench import ENTRY, PEER, ROW, SHAPE

JOB = measure.Job("kwta", SHAPE, torch.float32, "forward", "cpu", 1, ("cpu",))
NOW = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    passing = SimpleNamespace(now=NOW)
    monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: passing.now))
    return passing


def test_samples_get_half_of_a_jobs_share_of_the_time(clock, monkeypatch) -> None:
    given: list[tuple] = []

    def measured(*arguments: Any) -> measure.Found:
        given.append(arguments)
        clock.now += 10.0
        return measure.Found()

    monkeypatch.setattr(measure, "measure_one", measured)
    found = list(measure.run([JOB] * 4, {}, 6.0, ("torch",), until=NOW + 40.0))
    assert given == [(JOB, {}, 5.0, ("torch",))] * 4
    assert len(found) == 4
    given.clear()
    list(measure.run([JOB], {}, 6.0))
    assert given == [(JOB, {}, 6.0, None)]  # without a limit all of the budget


def test_no_job_starts_after_the_end(clock, monkeypatch) -> None:
    def measured(*arguments: Any) -> measure.Found:
        clock.now += 10.0
        return measure.Found(figures=[{}])

    monkeypatch.setattr(measure, "measure_one", measured)
    found = list(measure.run([JOB] * 4, {}, 6.0, until=NOW + 20.0))
    assert [len(each.figures) for each in found] == [1, 1, 1, 0]  # the third began at the end
    assert found[-1] == measure.Found(left_out=[f"{JOB}: out of time"])


@pytest.mark.parametrize(
    ("left", "taken", "limit", "late"),
    [
        (math.inf, 60.0, 60, False),  # it hangs
        (100.0, 60.0, 60, False),
        (10.0, 15.0, 15, True),  # five seconds more than the run has
        (10.0, 3.0, 15, False),  # its process ended early
        (10.0, 10.0, 15, False),  # at the end of the run, not after it
        (55.0, 60.0, 60, False),  # it had the time of any job
        (54.0, 59.5, 59, True),
    ],
)
def test_a_process_that_is_lost_fails_its_kernel_unless_the_time_was_out(clock, left, taken, limit, late) -> None:
    def worker(function, *arguments, seconds):
        assert (function, seconds) == (measure.measure_one, limit)
        clock.now += taken
        raise WorkerLost("did not end")

    (found,) = measure.run([JOB], {}, 6.0, until=NOW + left, worker=worker)
    if late:
        assert found == measure.Found(left_out=[f"{JOB}: out of time"])
    else:
        why = f"{JOB}: did not end"
        assert found == measure.Found(left_out=[why], failed={("kwta", "cpu", "float32"): why})


def test_on_a_cpu_a_failed_job_is_not_repeated(monkeypatch) -> None:
    asked: list[measure.Job] = []

    def measured(job, *given):
        asked.append(job)
        return measure._failed(job, "raised")

    monkeypatch.setattr(measure, "measure_one", measured)
    (found,) = measure.run([replace(JOB, backends=("cpu", "triton"))], {}, 6.0)
    assert len(asked) == 1
    assert set(found.failed) == {("kwta", "cpu", "float32"), ("kwta", "triton", "float32")}


def test_a_gpus_cache_is_emptied_after_every_job(monkeypatch) -> None:
    emptied: list[bool] = []
    sample = timing.Sample(1e-3, 1e-3, 1e-3, 1)
    samples = {measure.MEMCPY: sample, "cuda": sample, "triton": replace(sample, median=2e-3), "peer": sample}
    more = {name: {"flops": 400, "launch_us": us} for us, name in enumerate(("cuda", "triton"))}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(measure, "_samples", lambda *given: (samples, more))
    job = replace(JOB, device="cuda", backends=("cuda", "triton"), curve=True)
    found = measure.measure_one(job, {"cuda": {"copy": 9.0}}, 0.1, None)
    assert (emptied, found.figures) == ([True], [])  # a point of a curve is no figure
    assert [(each["backend"], each["us"], each["launch_us"]) for each in found.curves] == [
        ("cuda", pytest.approx(1e3), 0), ("triton", pytest.approx(2e3), 1),
    ]  # fmt: skip
    assert [each["peers"] for each in found.curves] == [{"peer": 1.0}, {"peer": 0.5}]
    monkeypatch.setattr(measure, "_samples", lambda *given: 1 / 0)
    assert measure.measure_one(job, {}, 0.1, None).failed
    assert len(emptied) == 2
    measure.measure_one(JOB, {}, 0.1, None)
    assert len(emptied) == 2


def test_a_figure_without_a_measured_product_has_the_ceiling_of_a_copy() -> None:
    sample = timing.Sample(1e-6, 1e-6, 1e-6, 1)
    for limits in ({"copy": 6.4}, {"copy": 6.4, "bfloat16": 1e-9}):
        found = measure.figure(JOB, "cpu", sample, {}, sample, limits, 10**9)
        assert found["ceiling_percent"] == pytest.approx(50)
    found = measure.figure(JOB, "cpu", sample, {}, sample, {"copy": 6.4, "float32": 0.5}, 400)
    assert found["ceiling_percent"] == pytest.approx(80)  # of the product, which takes longer


def test_reasons_are_kept_once_and_the_newest_failure_of_a_kernel() -> None:
    key = ("kwta", "cpu", "float32")
    found = measure.Found([{"us": 1}], [{"us": 2}], ["a"], {key: "first"})
    found.add(measure.Found([{"us": 1}], [{"us": 2}], ["b", "a"], {key: "second"}))
    assert found == measure.Found([{"us": 1}] * 2, [{"us": 2}] * 2, ["a", "b"], {key: "second"})


def test_ceilings_are_measured_for_each_setting_with_its_threads(monkeypatch) -> None:
    asked: list[tuple] = []
    monkeypatch.setattr(
        timing, "ceilings", lambda *given: asked.append((*given, torch.get_num_threads())) or {"copy": len(asked)}
    )
    before = torch.get_num_threads()
    jobs = [replace(JOB, threads=2), JOB, replace(JOB, dtype=torch.bfloat16), JOB]
    jobs.append(replace(JOB, device="cuda", dtype=torch.float16))
    assert measure.ceilings(jobs) == {"1 thread": {"copy": 1}, "2 threads": {"copy": 2}, "cuda": {"copy": 3}}
    both = [torch.bfloat16, torch.float32]
    assert asked == [("cpu", both, 1), ("cpu", both, 2), ("cuda", [torch.float16], 1)]
    assert torch.get_num_threads() == before


def test_kernels_that_differ_from_pytorch_are_remarked_with_their_difference() -> None:
    inputs, found = {"x": torch.tensor([3.0, 4.0])}, measure.Found()
    calls = {
        "exact": lambda inputs: inputs["x"],
        "allowed": lambda inputs: inputs["x"] * (1 + 0.99 * measure.TOLERANCE),
        "off": lambda inputs: inputs["x"] * 1.25,
    }
    job = replace(JOB, backends=tuple(calls))
    others = {"package": lambda inputs: pytest.fail("only PyTorch decides"), PEER: lambda inputs: inputs["x"]}
    measure._compare(job, calls, others, inputs, found)
    assert found.left_out == [f"{job}: the relative difference of off from {PEER} is 0.25"]
    measure._compare(job, calls, {"package": others["package"]}, inputs, found)
    assert len(found.left_out) == 1


def test_a_peer_of_a_package_without_a_function_is_not_called(monkeypatch) -> None:
    monkeypatch.setattr(peers, "PACKAGES", {"kwta": [peers.Peer("planned", "math"), peers.Peer("other", "none_such")]})
    calls, missing = peers.available("kwta", ENTRY, "cpu", torch.float32)
    assert (list(calls), missing) == ([PEER], {"planned": "", "other": "none_such is not installed"})
    assert peers.available("kwta", ENTRY, "cpu", torch.float32, ["OTH"]) == ({}, {"other": missing["other"]})
    assert peers.known({"kwta": ENTRY}) == {PEER, "planned", "other"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"device": "cuda", "backend": "triton"}, ""),
        ({"backend": "triton"}, "interpreted on the CPU, so not measured"),
        ({"verdict": "FAILED", "note": "worst: y"}, "wrong, so not measured (worst: y)"),
        ({"verdict": "not run", "note": "no GPU", "backend": "cuda"}, "no GPU"),
        ({"operation": "unheard"}, "no entry in bench/registry.py"),
    ],
    ids=str,
)
def test_why_a_kernel_is_not_measured(changes: dict, reason: str) -> None:
    assert measure.reason_against(replace(ROW, **changes)) == reason


def test_a_verified_dtype_that_is_not_measured_is_named(monkeypatch) -> None:
    monkeypatch.setitem(registry.ENTRIES, "kwta", replace(ENTRY, dtypes=(torch.float32,)))
    rows = [replace(ROW, dtype="bfloat16"), replace(ROW, dtype="float16"), ROW]
    jobs, left_out = measure.plan(rows, measure.Request(curves=False))
    assert left_out == ["kwta bfloat16: verified, but not among the dtypes that are measured"]
    assert {job.dtype for job in jobs} == {torch.float32}


def test_a_curve_is_forward_in_the_first_dtype_on_most_threads() -> None:
    rows = [replace(ROW, dtype="bfloat16"), ROW, replace(ROW, device="cuda", backend="cuda")]
    jobs, _ = measure.plan(rows, measure.Request(threads=(3, 1)))
    curves = [job for job in jobs if job.curve]
    assert [job.shape for job in curves if job.device == "cpu"] == ENTRY.shapes["scaling"]
    assert {(job.device, job.dtype, job.direction, job.threads) for job in curves} == {
        ("cpu", torch.bfloat16, "forward", 3), ("cuda", torch.float32, "forward", 1),
    }  # fmt: skip


GPU, INTERPRETED, MISSING = Placement("cuda", ""), Placement("cpu", ""), Placement(None, "no compiler")


@pytest.mark.parametrize(
    ("backend", "places", "found"),
    [
        (None, {"cpu": MISSING, "triton": GPU, "cuda": GPU}, ("triton", "cuda")),
        (None, {"cpu": INTERPRETED, "triton": GPU}, ("cpu", "cpu")),
        ("cuda", {"cpu": INTERPRETED, "triton": GPU, "cuda": GPU}, ("cuda", "cuda")),
        (None, {"cpu": MISSING, "triton": INTERPRETED, "cuda": MISSING},
         "cpu: no compiler; triton: interpreted on the CPU; cuda: no compiler"),
        ("triton", {"cpu": INTERPRETED, "triton": INTERPRETED}, "triton: interpreted on the CPU"),
    ],
)  # fmt: skip
def test_the_first_backend_that_runs_is_profiled(monkeypatch, backend, places: dict, found) -> None:
    asked: list[tuple] = []
    monkeypatch.setattr(profile, "placement", lambda *given: asked.append(given) or places.get(given[1], MISSING))
    job, reason = profile.job_of("kwta", backend, "bfloat16", "training", "quick", 1, 3)
    assert asked == [("kwta", name, torch.bfloat16) for name in ([backend] if backend else profile.KERNELS)]
    if job is None:
        assert reason == found
        return
    shape = ENTRY.complete(ENTRY.shapes["quick"][1], found[1])
    assert job == measure.Job("kwta", shape, torch.bfloat16, "training", found[1], 3, (found[0],))
    assert reason == ""


@pytest.mark.parametrize(
    ("direction", "shapes", "index", "there"),
    [
        ("forward", "one", 0, True),
        ("forward", "one", 1, False),
        ("training", "one", 0, False),
        ("forward", "x", 0, False),
    ],
)
def test_a_profile_of_a_shape_that_is_not_there_says_what_there_is(monkeypatch, direction, shapes, index, there):
    entry = replace(ENTRY, directions=("forward", "backward"), shapes={"one": [SHAPE]})
    monkeypatch.setitem(registry.ENTRIES, "kwta", entry)
    job, reason = profile.job_of("kwta", "cpu", "float32", direction, shapes, index, 1)
    assert (job is not None) == there
    assert reason == (
        "" if there else f"kwta has directions forward, backward and {shapes.count('one')} {shapes} shapes"
    )


@pytest.mark.parametrize(("uuid", "handle"), [("1234", "GPU-1234"), (None, 0)])
def test_the_sensors_are_those_of_torchs_first_gpu(monkeypatch, uuid, handle) -> None:
    seen: list[int] = []

    def properties(index: int) -> SimpleNamespace:
        seen.append(index)
        return SimpleNamespace(uuid=uuid)

    fake = SimpleNamespace(nvmlDeviceGetHandleByUUID=lambda uuid: uuid, nvmlDeviceGetHandleByIndex=lambda index: index)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert (nvml._handle(fake), seen) == (handle, [0])


def test_every_bit_of_throttling_has_its_name() -> None:
    names = {1: "", 2: "application clocks", 4: "power cap", 8: "hardware slowdown", 16: "sync boost"}
    names |= {32: "software thermal", 64: "hardware thermal", 128: "power brake", 256: "display clocks"}
    for bit, name in names.items():
        fake = SimpleNamespace(
            NVML_CLOCK_SM=0, NVML_CLOCK_MEM=1, NVML_TEMPERATURE_GPU=0,
            nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu, bit=bit: bit | 1,
            nvmlDeviceGetClockInfo=lambda gpu, which: 0, nvmlDeviceGetPowerUsage=lambda gpu: 0,
            nvmlDeviceGetTemperature=lambda gpu, which: 0,
        )  # fmt: skip
        assert nvml._reading(fake, "gpu")["throttled"] == [name] * bool(name)


def test_sensors_are_read_every_20_ms_for_the_given_time(monkeypatch) -> None:
    """A launch of 8 ms: three fill a period. Power is 1, 2, ... W, the energy 3 J each time that it is read."""
    clock, launched, joules, watts = SimpleNamespace(now=5.0), [], iter((1000, 4000)), iter(range(1, 99))

    def launch() -> None:
        launched.append(1)
        clock.now += 0.008

    def reading(*given: Any) -> dict:
        reasons = [["power cap"], [], ["sync boost", "power cap"]]
        return {"watts": next(watts), "throttled": reasons[len(launched) // 3 - 1]}

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=RuntimeError))
    for name, stub in (("missing", lambda: ""), ("_handle", lambda *given: "gpu"), ("_reading", reading)):
        monkeypatch.setattr(nvml, name, stub)
    monkeypatch.setattr(nvml, "_millijoules", lambda *given: next(joules))
    monkeypatch.setattr(nvml, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = nvml.watch(launch, 5, 0.06)
    assert len(launched) == 9
    assert found == {"watts": 2, "throttled": "power cap, sync boost", "joules_per_call": pytest.approx(3 / 45)}
