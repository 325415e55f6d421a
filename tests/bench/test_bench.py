"""Tests of python -m bench."""

from __future__ import annotations

import fcntl
import json
import re
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.planted import plant

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from bench import __main__ as command
from bench import checks, ledger, measure, merging, nvml, peers, registry, runs, timing, tracing
from bench.entry import DIRECTIONS, entry
from moe_kernels import backends
from moe_kernels.cases.kwta import KWTA
from moe_kernels.verify import Row, relative_error, verify
from tests.helpers.bench import ENTRY, PEER, ROW, SHAPE, run

CPU = ("--backend", "cpu", "--dtype", "float32", "--threads", "1", "--seconds", "0")


@pytest.mark.parametrize(
    ("dtype", "forward", "backward"),
    [(torch.float32, 2 * 4 * 100 * 4, 2 * 4 * 100 * 4 + 4 * 4 * 4), (torch.bfloat16, 1600, 1600 + 64)],
    ids=str,
)
def test_kwta_least_bytes_are_rows_in_and_out_and_four_words_of_bits_a_row(dtype, forward, backward) -> None:
    assert ENTRY.least_bytes(SHAPE, dtype, "forward") == forward
    assert ENTRY.least_bytes(SHAPE, dtype, "backward") == backward
    assert ENTRY.least_bytes(SHAPE, dtype, "training") == forward + 64 + backward


@pytest.mark.parametrize(
    ("op", "direction"), [(op, each) for op, entry in registry.ENTRIES.items() for each in entry.directions]
)
def test_kernels_and_peers_compute_the_same(op: str, direction: str) -> None:
    entry = registry.ENTRIES[op]
    inputs = entry.inputs(SHAPE if op == "kwta" else entry.shapes["quick"][0], torch.float32, "cpu")
    outputs = {name: peer[direction](inputs) for name, peer in entry.peers.items()}
    ours = measure.tensors_of(entry.kernel("cpu")[direction](inputs))
    for name, output in outputs.items():
        for got, expected in zip(measure.tensors_of(output), ours, strict=True):
            tolerance = 1e-5 if expected.is_floating_point() else 0  # sums in another order
            assert relative_error(got, expected) <= tolerance, name


class Clock:
    """A clock that advances only by `spend`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


def test_samples_are_seconds_a_call_whatever_the_repeats() -> None:
    clock = Clock()
    calls = {"short": lambda: clock.spend(2e-6), "long": lambda: clock.spend(3e-3)}
    samples = timing.time_cpu(calls, budget=0.1, clock=clock)
    assert samples["short"].median == pytest.approx(2e-6)
    assert samples["long"].median == pytest.approx(3e-3)
    # A round takes 100 calls of 2 us and one of 3 ms.
    assert samples["short"].count == samples["long"].count == pytest.approx(0.1 / 3.2e-3, abs=1)


def test_calls_take_turns_in_changing_order() -> None:
    clock, turns = Clock(), list[str]()

    def measure_of(name: str) -> float:
        turns.append(name)
        clock.spend(1)
        return 1.0

    timing.interleave({name: partial(measure_of, name) for name in "abc"}, budget=30, clock=clock)
    rounds = [tuple(turns[i : i + 3]) for i in range(0, len(turns), 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 1


def test_the_undisturbed_clock_counts_a_sleep() -> None:
    with timing.undisturbed_clock() as clock:
        start = clock()
        time.sleep(0.02)
        assert clock() - start > 0.01


def test_a_sample_is_the_median_and_the_outer_tenths() -> None:
    assert timing.Sample.of([float(i) for i in range(11)][::-1]) == timing.Sample(5.0, 1.0, 9.0, 11)


def test_a_figure_follows_from_its_samples() -> None:
    job = measure.Job("kwta", SHAPE, torch.float32, "forward", "cpu", 2, ("cpu",))
    second = partial(timing.Sample, low=0.0, high=0.0, count=1)
    own = timing.Sample(1e-6, 9e-7, 3e-6, 7)
    ceilings = {"copy": 6.4, "float32": 1.0}
    found = measure.figure(job, "cpu", own, {PEER: second(8e-6)}, second(4e-7), ceilings, 400)
    assert [found[name] for name in ("low_us", "high_us", "samples")] == pytest.approx([0.9, 3, 7])
    assert found["setting"] == "2 threads"
    assert found["us"] == pytest.approx(1.0)
    assert found["gb_per_s"] == pytest.approx(3.2)  # 3200 bytes in a microsecond
    assert found["gflop_per_s"] == pytest.approx(0.4)
    assert found["ceiling_percent"] == pytest.approx(50)  # copying the bytes takes 0.5 us, the FLOPs take 0.4 us
    assert found["over_memcpy"] == pytest.approx(2.5)
    assert found["peers"] == {PEER: pytest.approx(8)}


def test_peak_memory_counts_what_is_held_at_once() -> None:
    x = torch.randn(1000)
    assert tracing.peak_bytes(lambda: x + 1, "cpu") == pytest.approx(4000, abs=100)
    assert tracing.peak_bytes(lambda: (x + 1) + (x + 2), "cpu") == pytest.approx(12000, abs=300)
    assert tracing.peak_bytes(lambda: torch.add(x, 1, out=x), "cpu") < 200


def test_telemetry_gives_medians_reasons_and_energy_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    joules = iter((5.0, 7.0))
    fake = SimpleNamespace(
        NVMLError=RuntimeError, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0, nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: "gpu", nvmlDeviceGetClockInfo=lambda gpu, which: 1000 * which,
        nvmlDeviceGetPowerUsage=lambda gpu: 350_000, nvmlDeviceGetTemperature=lambda gpu, which: 60,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: 0x4 | 0x20,
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: 1000 * next(joules),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    launched: list[int] = []
    found = nvml.watch(lambda: launched.append(1), 4, 0.0)
    assert found.pop("joules_per_call") == pytest.approx(2.0 / (4 * len(launched)))
    assert found == {
        "sm_mhz": 1000, "memory_mhz": 2000, "watts": 350.0, "celsius": 60, "throttled": "power cap, software thermal",
    }  # fmt: skip

    def hidden(gpu):
        raise fake.NVMLError("Not Supported")

    monkeypatch.setattr(fake, "nvmlDeviceGetPowerUsage", hidden)
    fake.nvmlDeviceGetTotalEnergyConsumption = lambda gpu: 0
    assert nvml.watch(lambda: None, 1, 0.0) == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.missing() == "nvidia-ml-py is not installed"
    assert nvml.watch(lambda: None, 1, 0.0) == {}


def test_only_correct_kernels_are_measured() -> None:
    rows = [
        ROW,
        replace(ROW, dtype="bfloat16", verdict="FAILED", note="worst: mask"),
        replace(ROW, backend="triton"),
        replace(ROW, backend="cuda", dtype="-", device="-", verdict="not run", note="no GPU"),
        replace(ROW, operation="unheard"),
    ]
    jobs, left_out = measure.plan(rows, measure.Request(threads=(1, 2), curves=False))
    assert {(job.op, job.backends, job.dtype) for job in jobs} == {("kwta", ("cpu",), torch.float32)}
    assert {job.threads for job in jobs} == {1, 2}
    assert len(jobs) == 2 * len(ENTRY.shapes["quick"]) * len(DIRECTIONS)
    assert [line.split(": ", 1)[1] for line in left_out] == [
        "wrong, so not measured (worst: mask)",
        "interpreted on the CPU, so not measured",
        "no GPU",
        "no entry in bench/registry.py",
    ]


@pytest.mark.usefixtures("tiny")
def test_run_writes_results_report_and_picture(tmp_path: Path) -> None:
    done = run("run", *CPU, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    entry = result["entries"][0]
    assert entry["sources"] == ledger.digest("kwta", "cpu")
    assert [(each["direction"], each["flops"]) for each in entry["figures"]] == [
        ("forward", 400), ("backward", 400), ("training", 800),
    ]  # fmt: skip
    assert [len(each["figures"]) for each in result["entries"]] == [3, 0, 0, 0]
    assert [each["shape"] for each in entry["curves"]] == ["R=4 N=10 p=0.5", "R=4 N=1000 p=0.5"]
    assert entry["figures"][2]["peak_mib"] > 0
    text = (tmp_path / "report.md").read_text()
    assert "| kwta | cpu | float32 | forward | R=4 N=100 p=0.5 | 1 thread |" in text
    assert "| kwta | cpu | float32 | 1 thread | R=4 N=10 p=0.5 | R=4 N=1000 p=0.5 |" in text
    html = (tmp_path / "report.html").read_text()
    assert re.findall(r'<img src="data:image/png;base64,iVBORw0KGgo[^"]+" alt="(\w+)"', html) == [
        "roofline", "peers", "scaling",
    ]  # fmt: skip
    assert sorted(each.suffix for each in tmp_path.iterdir()) == [".html", ".json", ".md"]
    assert "<td>R=4 N=100 p=0.5</td>" in html


@pytest.mark.parametrize(
    "arguments",
    [
        ("exchange", "--size", "a,b"),
        ("profile", "--op", "kwta", "--shape", -99),
        ("predict", "--op", "kwta", "--size", "Q=4"),
    ],
)
def test_an_option_of_no_meaning_is_named(arguments) -> None:
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert arguments[-2] in done.output


def test_measuring_ends_with_its_share_of_the_time(tiny: None, monkeypatch, tmp_path) -> None:
    ends = []
    monkeypatch.setattr(measure, "run", lambda jobs, limits, seconds, peers, until, worker: ends.append(until) or ())
    runs.Run(tmp_path, measure.Request(), 0.1, time.monotonic() + 1000).measure(0.25)
    assert ends[0] - time.monotonic() == pytest.approx(250, abs=20)


def test_a_kernel_that_fails_keeps_its_remarks(monkeypatch) -> None:
    def samples(job, budget, peers, found):
        found.left_out.append("peer a: not installed")
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(measure, "_samples", samples)
    job = measure.Job("kwta", SHAPE, torch.float32, "forward", "cpu", 1, ("cpu",))
    found = measure.measure_one(job, {}, 0.1, None)
    assert found.left_out[0] == "peer a: not installed"
    assert found.left_out[1].endswith("RuntimeError: no such kernel")
    assert list(found.failed) == [("kwta", "cpu", "float32")]


def test_an_entry_may_replace_what_follows_from_its_call() -> None:
    found = entry(KWTA, {}, shapes={}, dtypes=(torch.float16,), directions=("forward",))
    assert (found.dtypes, found.directions) == ((torch.float16,), ("forward",))
    assert torch.float16 in registry.ENTRIES["kwta"].dtypes


@pytest.mark.parametrize("name", ["run", "verify"])
@pytest.mark.parametrize("option", ["--op", "--backend"])
def test_a_wrong_name_leaves_no_result(tmp_path, name, option) -> None:
    done = run(name, option, "kwtaa", "--out", tmp_path)
    assert done.exit_code == 2, done.output
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["run", "verify"])
def test_a_requested_backend_that_cannot_run_gives_status_2_and_no_result(monkeypatch, tmp_path, name) -> None:
    rows = [replace(ROW, backend="triton", device="-", verdict="not run", note="a reason")]
    monkeypatch.setattr(runs, "verify", lambda *args, **kwargs: rows)
    monkeypatch.setattr(runs.Run, "measure", lambda *args: pytest.fail("measured without a kernel"))
    done = run(name, "--backend", "triton", "--out", tmp_path)
    assert done.exit_code == 2, done.output
    assert done.output.splitlines()[-1] == "triton cannot run: a reason"
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("tiny")
def test_run_refuses_to_measure_a_wrong_kernel_and_fails(monkeypatch, tmp_path: Path) -> None:
    def wrong(correct, x, *args):
        y, bits = correct(x, *args)
        return (y.neg_() if x.dtype == torch.float32 else y), bits

    plant(monkeypatch, "kwta_fwd", wrong)
    assert run("run", *CPU, "--dtype", "bfloat16", "--no-curves", "--out", tmp_path).exit_code == 1
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    by_dtype = {entry["dtype"]: entry for entry in result["entries"]}
    assert by_dtype["float32"]["verdict"] == "FAILED"
    assert by_dtype["float32"]["figures"] == []
    assert len(by_dtype["bfloat16"]["figures"]) == 3
    assert any(line.startswith("kwta cpu float32: wrong") for line in result["not_measured"])


@pytest.mark.usefixtures("tiny")
def test_a_kernel_that_raises_on_one_shape_fails_and_the_others_keep_their_figures(monkeypatch, tmp_path: Path) -> None:
    def raising(correct, x, *args):
        if x.shape[1] == 10:
            raise RuntimeError("kwta_fwd: out of memory\nmore")
        return correct(x, *args)

    rows = list(verify(["kwta"], ["cpu"], small=True))
    monkeypatch.setattr(runs, "verify", lambda *args, **kwargs: rows)
    plant(monkeypatch, "kwta_fwd", raising)
    assert run("run", *CPU, "--out", tmp_path).exit_code == 1
    (result,) = merging.read(tmp_path)
    entry = result["entries"][0]
    why = "kwta R=4 N=10 p=0.5 float32 forward, 1 thread: RuntimeError: kwta_fwd: out of memory"
    assert (entry["verdict"], entry["note"]) == ("FAILED", why)
    assert why in result["not_measured"]
    assert len(entry["figures"]) == 3
    assert [each["shape"] for each in entry["curves"]] == ["R=4 N=1000 p=0.5"]


def test_a_check_that_raises_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(row: Row) -> str:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(checks, "repeatable", broken)
    assert checks.kernel_checks(ROW) == {"repeatable": "FAILED: RuntimeError: an illegal memory access"}


def test_sanitizers_run_with_one_allocation_a_tensor_and_ignore_failing_calls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text("""#!/bin/sh
[ "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 ] || exit 1
case "$*" in
  *"import torch"*) ;;
  *"--tool memcheck"*"--report-api-errors no"*"--op kwta --backend cuda" | *"--tool synccheck"*) ;;
  *) echo "a race"; exit 9 ;;
esac
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = {tool: word for _, words in checks.sanitizers([("kwta", "cuda")]) for tool, word in words.items()}
    assert found == {"memcheck": "ok", "racecheck": "FAILED: status 9: a race", "synccheck": "ok"}
    program.write_text("#!/bin/sh\necho Device not supported; exit 1\n")
    problem = "not run: compute-sanitizer does not run here: status 1: Device not supported"
    assert list(checks.sanitizers([("kwta", "cuda")])) == [
        (("kwta", "cuda"), dict.fromkeys(checks.SANITIZERS, problem))
    ]


def test_a_sanitizer_has_the_time_that_others_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock on which every look takes a second."""
    given: list[float] = []
    monkeypatch.setattr(checks, "time", SimpleNamespace(monotonic=iter(range(1000)).__next__))
    monkeypatch.setattr(checks.shutil, "which", lambda name: "compute-sanitizer")
    monkeypatch.setattr(checks, "sanitizer_problem", lambda *given: "")
    monkeypatch.setattr(checks, "run", lambda command, seconds, log, **environment: given.append(seconds) or "ok")
    assert len(list(checks.sanitizers([("kwta", "cuda")], 100))) == len(checks.SANITIZERS)
    assert sorted(given, reverse=True) == [99 - n for n in range(len(checks.SANITIZERS))]


@pytest.mark.usefixtures("tiny")
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU this runs the whole test suite")
def test_verify_writes_a_result_that_the_ledger_reads(tmp_path: Path) -> None:
    done = run("verify", "--backend", "cpu", "--seconds", 0, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "No GPU here" in done.output
    (result,) = merging.read(tmp_path)
    assert all(entry["checks"] == {"repeatable": "ok"} for entry in result["entries"])
    assert ledger.state("kwta", "cpu", [result]) == f"verified {result['date']} on {result['device']}"


@pytest.mark.parametrize("option", ["--op", "--backend", "--routing", "--peers", "--dtype", "--shapes"])
def test_an_unknown_value_of_an_option_is_an_error(option: str) -> None:
    done = run("run", option, "nonsense")
    assert done.exit_code == 2
    assert "nonsense" in done.output


def test_a_request_chooses_routings_and_sets_of_shapes() -> None:
    rows = [replace(ROW, operation="dispatch"), ROW]
    jobs, left_out = measure.plan(rows, measure.Request("llm", ("float32",), (1,), ("zipf", "uniform"), curves=False))
    assert {job.shape["routing"] for job in jobs if job.op == "dispatch"} == {"zipf", "uniform"}
    assert any(job.op == "kwta" for job in jobs)
    assert max(job.shape["T"] * job.shape["K"] * job.shape["D"] for job in jobs if job.op == "dispatch") == 2**25
    assert left_out == []


def test_an_operation_without_shapes_of_a_set_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ENTRIES, "kwta", replace(ENTRY, shapes={"quick": ENTRY.shapes["quick"]}))
    _, left_out = measure.plan([ROW], measure.Request("llm"))
    assert left_out == [
        "kwta: has no shapes called llm, or none with the requested routing",
        "kwta: has no shapes called scaling",
    ]


@pytest.mark.parametrize("op", list(registry.ENTRIES))
def test_a_scaling_curve_varies_one_size_over_two_decades(op: str) -> None:
    shapes = registry.ENTRIES[op].shapes["scaling"]
    varying = [name for name in shapes[0] if len({shape[name] for shape in shapes}) > 1]
    assert len(varying) == 1
    sizes = [shape[varying[0]] for shape in shapes]
    assert sizes == sorted(sizes)
    assert sizes[-1] / sizes[0] >= 100


def test_a_peer_is_one_function_and_is_reported_when_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PACKAGES", {})
    peers.peer("kwta", "here", "math")(lambda inputs: inputs["x"] * inputs["mask"])
    peers.peer("kwta", "not installed", "a_missing_package")(lambda inputs: None)
    peers.peer("kwta", "on GPUs", "math", device="cuda")(lambda inputs: None)
    peers.peer("kwta", "wrong", "math")(lambda inputs: -inputs["x"] * inputs["mask"])
    peers.peer("kwta", "broken", "math")(lambda inputs: {}["nothing"])
    own = {**ENTRY.peers, "of torch": {"training": lambda inputs: torch.empty(2) @ torch.empty(3)}}
    monkeypatch.setitem(registry.ENTRIES, "kwta", replace(ENTRY, peers=own))
    job = measure.Job("kwta", SHAPE, torch.float32, "training", "cpu", 1, ("cpu",))
    (found,) = measure.run([job], {"1 thread": {"copy": 1.0}}, 0.0)
    assert set(found.figures[0]["peers"]) == set(found.figures[0]["peers_peak_mib"]) == {PEER, "here"}
    assert sorted(found.left_out) == [
        "peer broken of kwta: fails: KeyError: 'nothing'",
        "peer not installed of kwta: a_missing_package is not installed",
        "peer of torch of kwta: fails: RuntimeError: inconsistent tensor size, expected tensor [2] and src [3] to have "
        "the same number of elements, but got 2 and 3 elements respectively",
        "peer on GPUs of kwta: takes cuda tensors only",
        "peer wrong of kwta: gives another result, relative error 2",
    ]


@pytest.mark.parametrize(("wanted", "names"), [(None, {PEER}), (("TOPK",), {PEER}), (("pot",), set()), ((), set())])
def test_peers_are_chosen_by_parts_of_their_names(wanted, names) -> None:
    calls, _ = peers.available("kwta", ENTRY, "cpu", torch.float32, wanted)
    assert set(calls) == names


@pytest.mark.parametrize("direction", ["forward", "training"])
def test_pot_computes_what_sinkhorn_does(direction: str) -> None:
    pytest.importorskip("ot")
    entry = registry.ENTRIES["sinkhorn"]
    inputs = entry.inputs({"B": 3, "n": 5, "R": 4, "tau": 0.5}, torch.float32, "cpu")
    calls, missing = peers.available("sinkhorn", entry, "cpu", torch.float32)
    assert list(missing) == ["flash-sinkhorn"]
    torch.testing.assert_close(calls["POT"][direction](inputs), entry.kernel("cpu")[direction](inputs))


@pytest.mark.usefixtures("tiny")
def test_indices_and_masks_are_compared_too() -> None:
    x = torch.ones(3)
    right = (x, torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([True, False]), None)
    assert len(measure.tensors_of(right)) == 3
    for place, wrong in ((1, torch.tensor([1, 2, 4])), (2, torch.tensor([True, True]))):
        other = [*right[:place], wrong, *right[place + 1 :]]
        assert measure._difference(other, right) > measure.TOLERANCE
    assert measure._difference(list(right), right) == 0


def test_a_kernel_with_random_results_is_not_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.repeatable(ROW) == "ok"
    calls = {"forward": lambda inputs: torch.rand(3)}
    monkeypatch.setitem(registry.ENTRIES, "kwta", replace(ENTRY, kernel=lambda backend: calls))
    assert checks.repeatable(ROW) == "FAILED: forward differed within 20 runs"


def test_the_verdict_of_a_command_has_its_status_and_last_line() -> None:
    assert checks.run([sys.executable, "-c", "pass"]) == "ok"
    assert checks.run([sys.executable, "-c", "print('oh'); exit(3)"]) == "FAILED: status 3: oh"


def test_a_command_out_of_time_is_killed_with_its_children(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    script = "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); time.sleep(60)"
    outer = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    log = tmp_path / "log"
    assert checks.run([sys.executable, "-c", outer, script, str(held)], 1.0, log) == "not run: out of time"
    assert str(held) in log.read_text()
    with held.open() as file:
        for _ in range(100):  # the kill takes effect a moment later
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.05)
        else:
            pytest.fail("a child of the killed command still runs")


def test_round_robin_alternates_operations() -> None:
    rows = [ROW, replace(ROW, operation="dispatch")]
    jobs, _ = measure.plan(rows, measure.Request(threads=(1,)))
    ordered = measure.round_robin(jobs)
    assert sorted(map(str, ordered)) == sorted(map(str, jobs))
    assert [job.op for job in ordered[:4]] == ["kwta", "dispatch"] * 2


def test_round_robin_begins_with_narrow_dtypes() -> None:
    job = measure.Job("kwta", SHAPE, torch.float32, "forward", "cpu", 1, ("cpu",))
    jobs = [job, replace(job, op="dispatch"), replace(job, dtype=torch.bfloat16), replace(job, curve=True)]
    ordered = measure.round_robin(jobs)
    assert [(each.op, each.dtype.itemsize, each.curve) for each in ordered] == [
        ("kwta", 2, False), ("kwta", 4, False), ("dispatch", 4, False), ("kwta", 4, True),
    ]  # fmt: skip


def test_a_job_without_time_is_reported() -> None:
    job = measure.Job("kwta", SHAPE, torch.float32, "forward", "cpu", 1, ("cpu",))
    (found,) = measure.run([job], {}, 0.1, until=time.monotonic() - 1)
    assert (found.figures, found.left_out) == ([], [f"{job}: out of time"])


def test_a_backend_that_is_not_built_ends_in_one_line(monkeypatch, capsys) -> None:
    def raises() -> None:
        raise backends.BackendError("kwta: backend 'cpu' cannot run here")

    monkeypatch.setattr(command, "app", raises)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert (ended.value.code, capsys.readouterr().out) == (2, "bench: kwta: backend 'cpu' cannot run here\n")
