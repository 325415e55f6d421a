"""python -m bench: its arithmetic, its clockwork, its ledger and its refusals. Nothing here depends on a time."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from typer.testing import CliRunner

import bench.__main__ as command
from bench import checks, compare, ledger, measure, nvml, peers, registry, report, timing, tracing
from bench.entry import DIRECTIONS
from moe_kernels.backends import cpu
from moe_kernels.verify import Row, verify

ENTRY = registry.ENTRIES["kwta"]
SHAPE: registry.Shape = {"R": 4, "N": 100, "p": 0.5}
ROW = Row("kwta", "cpu", "float32", "cpu", 1, 0.0, 0.0, "ok", "")
PEER = "torch topk+scatter+mul"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench on kWTA alone, one shape of 4 rows and the small cases."""
    shapes = {"quick": [{"N": 100, "p": 0.5}], "scaling": [{"R": 4, "N": n, "p": 0.5} for n in (10, 1000)]}
    entry = replace(ENTRY, shapes=shapes, complete=lambda shape, device: {"R": 4, **shape})
    monkeypatch.setitem(registry.ENTRIES, "kwta", entry)
    operations = verify.__globals__["OPERATIONS"]
    monkeypatch.setitem(verify.__globals__, "OPERATIONS", {"kwta": operations["kwta"]})
    monkeypatch.setattr(command, "verify", partial(verify, small=True))
    monkeypatch.setattr(timing, "ceilings", lambda *args: {"copy": 10.0, "float32": 100.0})


# Registry


@pytest.mark.parametrize(
    ("dtype", "forward", "backward"),
    [(torch.float32, 2 * 4 * 100 * 4, 2 * 4 * 100 * 4 + 4 * 4 * 4), (torch.bfloat16, 1600, 1600 + 64)],
    ids=str,
)
def test_kwta_least_bytes_are_rows_in_and_out_and_four_words_of_bits_a_row(dtype, forward, backward) -> None:
    assert ENTRY.least_bytes(SHAPE, dtype, "forward") == forward
    assert ENTRY.least_bytes(SHAPE, dtype, "backward") == backward
    assert ENTRY.least_bytes(SHAPE, dtype, "training") == forward + 64 + backward


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_flops_agree_with_torchs_counter(direction: str) -> None:
    inputs = ENTRY.inputs(SHAPE, torch.float32, "cpu")
    with FlopCounterMode(display=False) as counter:
        ENTRY.kernel("cpu")[direction](inputs)
    assert ENTRY.flops(SHAPE, direction) == counter.get_total_flops() == (800 if direction == "training" else 400)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("op", list(registry.ENTRIES))
def test_kernels_and_peers_compute_the_same(op: str, direction: str) -> None:
    entry = registry.ENTRIES[op]
    if direction not in entry.directions:
        return
    inputs = entry.inputs(SHAPE if op == "kwta" else entry.shapes["quick"][0], torch.float32, "cpu")
    outputs = {name: peer[direction](inputs) for name, peer in entry.peers.items()}
    for output in outputs.values():
        torch.testing.assert_close(output, entry.kernel("cpu")[direction](inputs), check_dtype=False)


def test_cpu_shapes_are_large_enough_to_leave_the_caches() -> None:
    for shape in ENTRY.shapes["papers"]:
        assert 15e6 < ENTRY.least_bytes(ENTRY.complete(shape, "cpu"), torch.float32, "forward") < 17e6
        assert ENTRY.complete(shape, "cuda")["R"] == 8192


# Timing


class Clock:
    """A clock that stands still unless told."""

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


def test_a_drift_that_hits_all_calls_leaves_their_ratio() -> None:
    clock, slowness = Clock(), [1.0]

    def call(seconds: float) -> None:
        slowness[0] *= 1.01
        clock.spend(seconds * slowness[0])

    samples = timing.time_cpu({"a": partial(call, 1e-3), "b": partial(call, 2e-3)}, budget=0.4, clock=clock)
    assert samples["b"].median / samples["a"].median == pytest.approx(2, rel=0.02)


def test_the_undisturbed_clock_counts_a_sleep_and_work_alike() -> None:
    with timing.undisturbed_clock() as clock:
        start = clock()
        time.sleep(0.02)  # a kernel that sleeps is slow, and the clock must say so
        assert clock() - start > 0.01


def test_a_sample_is_the_median_and_the_outer_tenths() -> None:
    assert timing.Sample.of([float(i) for i in range(11)][::-1]) == timing.Sample(5.0, 1.0, 9.0, 11)


def test_a_figure_follows_from_its_samples() -> None:
    job = measure.Job("kwta", SHAPE, torch.float32, "forward", "cpu", 2, ("cpu",))
    second = partial(timing.Sample, low=0.0, high=0.0, count=1)
    found = measure.figure(job, "cpu", second(1e-6), {PEER: second(8e-6)}, second(4e-7), {"copy": 6.4, "float32": 1.0})
    assert found["setting"] == "2 threads"
    assert found["us"] == pytest.approx(1.0)
    assert found["gb_per_s"] == pytest.approx(3.2)  # 3200 bytes in a microsecond
    assert found["gflop_per_s"] == pytest.approx(0.4)
    assert found["ceiling_percent"] == pytest.approx(50)  # the copy allows 0.5 us, the product 0.4
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
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.missing() == "nvidia-ml-py is not installed"
    assert nvml.watch(lambda: None, 1, 0.0) == {}


# Refusals


def test_only_right_kernels_are_measured() -> None:
    rows = [
        ROW,
        replace(ROW, dtype="bfloat16", verdict="FAILED", note="worst: mask"),
        replace(ROW, backend="triton"),
        replace(ROW, backend="cuda", dtype="-", device="-", verdict="not run", note="no GPU"),
        replace(ROW, operation="unheard"),
    ]
    jobs, refused = measure.plan(rows, measure.Request(threads=(1, 2), curves=False))
    assert {(job.op, job.backends, job.dtype) for job in jobs} == {("kwta", ("cpu",), torch.float32)}
    assert {job.threads for job in jobs} == {1, 2}
    assert len(jobs) == 2 * len(ENTRY.shapes["quick"]) * len(DIRECTIONS)
    assert [line.split(": ", 1)[1] for line in refused] == [
        "wrong, so not measured (worst: mask)",
        "interpreted on the CPU, so not measured",
        "no GPU",
        "no entry in bench/registry.py",
    ]


@pytest.mark.usefixtures("tiny")
def test_run_writes_results_report_and_picture(tmp_path: Path) -> None:
    arguments = ["run", "--backend", "cpu", "--dtype", "float32", "--threads", "1", "--seconds", "0"]
    done = CliRunner().invoke(command.app, [*arguments, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    entry = result["entries"][0]
    assert entry["sources"] == ledger.digest("kwta", "cpu")
    assert [figure["direction"] for figure in entry["figures"]] == list(DIRECTIONS)
    assert [len(each["figures"]) for each in result["entries"]] == [3, 0, 0, 0]
    assert [each["shape"] for each in entry["curves"]] == ["R=4 N=10 p=0.5", "R=4 N=1000 p=0.5"]
    assert entry["figures"][2]["peak_mib"] > 0
    text = (tmp_path / "report.md").read_text()
    assert "| kwta | cpu | float32 | forward | R=4 N=100 p=0.5 | 1 thread |" in text
    assert "![kwta.png](kwta.png)" in text
    assert (tmp_path / "kwta.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("tiny")
def test_run_refuses_to_measure_a_wrong_kernel_and_fails(monkeypatch, tmp_path: Path) -> None:
    right = cpu.kwta_fwd

    def wrong(x, *args):
        y, bits = right(x, *args)
        return (y.neg_() if x.dtype == torch.float32 else y), bits

    monkeypatch.setattr(cpu, "kwta_fwd", wrong)
    arguments = [
        "run",
        "--backend",
        "cpu",
        "--dtype",
        "float32",
        "--dtype",
        "bfloat16",
        "--threads",
        "1",
        "--no-curves",
    ]
    done = CliRunner().invoke(command.app, [*arguments, "--seconds", "0", "--out", str(tmp_path)])
    assert done.exit_code == 1
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    by_dtype = {entry["dtype"]: entry for entry in result["entries"]}
    assert by_dtype["float32"]["verdict"] == "FAILED"
    assert by_dtype["float32"]["figures"] == []
    assert len(by_dtype["bfloat16"]["figures"]) == 3
    assert any(line.startswith("kwta cpu float32: wrong") for line in result["not_measured"])


@pytest.mark.usefixtures("tiny")
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU this runs the whole test suite")
def test_verify_writes_a_result_that_the_ledger_reads(tmp_path: Path) -> None:
    done = CliRunner().invoke(command.app, ["verify", "--backend", "cpu", "--seconds", "0", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "No GPU here" in done.output
    (result,) = ledger.read(tmp_path)
    assert all(entry["checks"] == {"repeatable": "ok"} for entry in result["entries"])
    assert ledger.state("kwta", "cpu", [result]) == f"verified {result['date']} on {result['device']}"


@pytest.mark.parametrize("option", ["--op", "--backend", "--routing", "--peers", "--dtype", "--shapes"])
def test_an_unknown_word_is_refused(option: str) -> None:
    done = CliRunner().invoke(command.app, ["run", option, "nonsense"])
    assert done.exit_code == 2
    assert "nonsense" in done.output


def test_a_request_chooses_routings_and_sets_of_shapes() -> None:
    rows = [replace(ROW, operation="dispatch"), ROW]
    jobs, refused = measure.plan(rows, measure.Request("llm", ("float32",), (1,), ("zipf", "uniform"), curves=False))
    assert {job.shape["routing"] for job in jobs if job.op == "dispatch"} == {"zipf", "uniform"}
    assert any(job.op == "kwta" for job in jobs)
    assert max(job.shape["T"] for job in jobs if job.op == "dispatch") == 4096  # a CPU's
    assert refused == []


def test_what_has_no_shapes_of_a_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ENTRIES, "kwta", replace(ENTRY, shapes={"quick": ENTRY.shapes["quick"]}))
    _, refused = measure.plan([ROW], measure.Request("llm"))
    assert refused == ["kwta: has no shapes called llm with that routing", "kwta: has no shapes called scaling"]


@pytest.mark.parametrize("op", list(registry.ENTRIES))
def test_a_scaling_curve_varies_one_size_over_two_decades(op: str) -> None:
    shapes = registry.ENTRIES[op].shapes["scaling"]
    varying = [name for name in shapes[0] if len({shape[name] for shape in shapes}) > 1]
    assert len(varying) == 1
    sizes = [shape[varying[0]] for shape in shapes]
    assert sizes == sorted(sizes)
    assert sizes[-1] / sizes[0] >= 100


# Peers


def test_a_peer_is_one_function_and_is_named_when_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PACKAGES", {})
    peers.peer("kwta", "here", "math")(lambda inputs: inputs["leaf"] * inputs["mask"])
    peers.peer("kwta", "not installed", "a_package_that_nobody_has")(lambda inputs: None)
    peers.peer("kwta", "on GPUs", "math", device="cuda")(lambda inputs: None)
    peers.peer("kwta", "wrong", "math")(lambda inputs: -inputs["leaf"] * inputs["mask"])
    peers.peer("kwta", "broken", "math")(lambda inputs: {}["nothing"])
    job = measure.Job("kwta", SHAPE, torch.float32, "training", "cpu", 1, ("cpu",))
    (found,) = measure.run([job], {"1 thread": {"copy": 1.0}}, 0.0)
    assert set(found.figures[0]["peers"]) == set(found.figures[0]["peers_peak_mib"]) == {PEER, "here"}
    assert sorted(found.left_out) == [
        "peer broken of kwta: fails: KeyError: 'nothing'",
        "peer not installed of kwta: a_package_that_nobody_has is not installed",
        "peer on GPUs of kwta: takes cuda tensors only",
        "peer wrong of kwta: gives another result, off by 2 of its norm",
    ]


@pytest.mark.parametrize(("wanted", "names"), [(None, {PEER}), (("TOPK",), {PEER}), (("pot",), set()), ((), set())])
def test_peers_are_chosen_by_parts_of_their_names(wanted, names) -> None:
    calls, _, _ = peers.available("kwta", ENTRY, "cpu", torch.float32, wanted)
    assert set(calls) == names


@pytest.mark.parametrize("direction", ["forward", "training"])
def test_pot_computes_what_sinkhorn_does(direction: str) -> None:
    entry = registry.ENTRIES["sinkhorn"]
    inputs = entry.inputs({"B": 3, "n": 5, "R": 4, "tau": 0.5}, torch.float32, "cpu")
    calls, missing, _ = peers.available("sinkhorn", entry, "cpu", torch.float32)
    assert list(missing) == ["flash-sinkhorn"]
    torch.testing.assert_close(calls["POT"][direction](inputs), entry.kernel("cpu")[direction](inputs))


@pytest.mark.usefixtures("tiny")
def test_a_kernel_that_changes_its_mind_is_not_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.repeatable(ROW) == "ok"
    calls = {"forward": lambda inputs: torch.rand(3)}
    monkeypatch.setitem(registry.ENTRIES, "kwta", replace(ENTRY, kernel=lambda backend: calls))
    assert checks.repeatable(ROW) == "FAILED: forward differed within 20 runs"


def test_a_command_that_fails_says_so() -> None:
    assert checks.run([sys.executable, "-c", "pass"]) == "ok"
    assert checks.run([sys.executable, "-c", "print('oh'); exit(3)"]) == "FAILED: status 3: oh"


# Ledger and report


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with kwta on the CPU and in CUDA, and no Triton kernel."""
    for name in ("moe_kernels/ops/kwta.py", "csrc/cpu/kwta.cpp", "csrc/cuda/kwta.cu", "csrc/include/moe/warp.cuh"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"// {name}\n")
    return tmp_path


def result_of(tree: Path, backend: str, *, gpu: bool = True, date: str = "2026-01-02", **changes) -> ledger.Result:
    figure = {
        "op": "kwta", "backend": backend, "dtype": "float32", "direction": "forward", "shape": "R=4 N=100 p=0.5",
        "setting": "cuda" if gpu else "2 threads", "us": 123456.0, "low_us": 1.0, "high_us": 2.0, "samples": 5,
        "gb_per_s": 7.0, "gflop_per_s": 1.0, "ceiling_percent": 87.0, "over_memcpy": 1.5, "peers": {PEER: 21.0},
    }  # fmt: skip
    entry = {
        "operation": "kwta", "backend": backend, "dtype": "float32", "device": "cuda" if gpu else "cpu",
        "sources": ledger.digest("kwta", backend, tree), "verdict": "ok", "checks": {}, "figures": [figure],
    }  # fmt: skip
    facts = {"device": "Some GPU" if gpu else "Some CPU", "gpu": gpu, "date": date, "machine": {"cpu": "Some CPU"}}
    return {**facts, "entries": [entry | changes]}


def test_ledger_states(tree: Path) -> None:
    state = partial(ledger.state, "kwta", root=tree)
    assert state("cuda", []) == "never run on a GPU"
    assert state("cpu", []) == "tested on every change"
    assert state("triton", []) == "-"
    result = result_of(tree, "cuda")
    assert state("cuda", [result]) == "verified 2026-01-02 on Some GPU"
    assert state("cuda", [result_of(tree, "cuda", verdict="FAILED")]) == "FAILED 2026-01-02 on Some GPU"
    bad_check = {"memcheck": "FAILED: status 9", "racecheck": "not run: not installed"}
    assert state("cuda", [result_of(tree, "cuda", checks=bad_check)]) == "FAILED 2026-01-02 on Some GPU"
    newer = result_of(tree, "cuda", date="2026-03-04")
    assert state("cuda", [result, newer]) == "verified 2026-03-04 on Some GPU"
    assert state("cpu", [result_of(tree, "cpu", gpu=False)]) == "verified 2026-01-02 on Some CPU"


@pytest.mark.parametrize("source", ["csrc/cuda/kwta.cu", "csrc/include/moe/warp.cuh", "moe_kernels/ops/kwta.py"])
def test_a_result_is_stale_once_a_source_changes(tree: Path, source: str) -> None:
    result = result_of(tree, "cuda")
    (tree / source).write_text("// something else\n")
    assert ledger.state("kwta", "cuda", [result], tree) == "stale: sources changed since 2026-01-02"


def test_sources_of_another_backend_or_operation_leave_a_result_fresh(tree: Path) -> None:
    result = result_of(tree, "cuda")
    (tree / "csrc/cpu/kwta.cpp").write_text("// faster\n")
    (tree / "csrc/cuda/sinkhorn.cu").write_text("// new\n")
    assert ledger.state("kwta", "cuda", [result], tree).startswith("verified")


def test_a_kernel_that_was_interpreted_has_not_run_on_a_gpu(tree: Path) -> None:
    interpreted = result_of(tree, "cuda", gpu=False)
    assert ledger.state("kwta", "cuda", [interpreted], tree) == "never run on a GPU"


def test_results_survive_writing_and_reading(tree: Path) -> None:
    result = result_of(tree, "cuda")
    assert ledger.write(result, tree / "results").name == "some-gpu.json"
    assert ledger.read(tree / "results") == [result]


def test_measured_shows_gpu_times_and_only_ratios_of_cpus(tree: Path) -> None:
    gpu = report.measured([result_of(tree, "cuda")], tree)
    assert "| `kwta` | cuda | float32 | forward | 1 | 1.23e+05 | 7 | 87 | 1.5 | torch topk+scatter+mul 21 |" in gpu
    on_cpu = report.measured([result_of(tree, "cpu", gpu=False)], tree)
    assert "| `kwta` | cpu | float32 | forward, 2 threads | 1 | 1.5 | torch topk+scatter+mul 21 |" in on_cpu
    assert "No GPU was there" in on_cpu
    result = result_of(tree, "cuda") | {"entries": result_of(tree, "cpu", gpu=False)["entries"]}
    cpu_beside_gpu = report.measured([result], tree)
    assert "| `kwta` | cpu | float32 | forward, 2 threads | 1 |  |  |  | 1.5 |" in cpu_beside_gpu


def test_measured_gives_the_range_over_shapes_and_marks_what_is_stale(tree: Path) -> None:
    result = result_of(tree, "cuda")
    figures = result["entries"][0]["figures"]
    figures.append(figures[0] | {"shape": "another", "peers": {PEER: 9.5}})
    (tree / "csrc/cuda/kwta.cu").write_text("// changed\n")
    text = report.measured([result], tree)
    assert "| `kwta` (stale) | cuda | float32 | forward | 2 |" in text
    assert "torch topk+scatter+mul 9.5 to 21" in text


@pytest.mark.parametrize(("factor", "status"), [(1.1, 0), (0.5, 0), (2.0, 1)])
def test_compare_catches_a_kernel_made_slower(tree: Path, factor: float, status: int) -> None:
    before, after = result_of(tree, "cuda"), result_of(tree, "cuda")
    after["entries"][0]["figures"][0]["us"] *= factor
    paths = []
    for name, result in {"before": before, "after": after}.items():
        paths.append(str(ledger.write(result, tree / name)))
    done = CliRunner().invoke(command.app, ["compare", *paths])
    assert done.exit_code == status, done.output
    assert (f"x{factor:.2f}" in done.output) == (factor != 1.1)


def test_compare_reads_cpus_by_memcpy_and_skips_what_only_one_run_has(tree: Path) -> None:
    before, after = (result_of(tree, "cpu", gpu=False) for _ in range(2))
    figures = after["entries"][0]["figures"]
    figures.append(figures[0] | {"shape": "new"})
    figures[0] = figures[0] | {"us": 5.0, "over_memcpy": 3.0}
    (change,) = compare.changes(before, after)
    assert (change.before, change.after, change.slowdown) == (1.5, 3.0, 2.0)


def test_figures_of_a_busy_machine_are_marked(tree: Path) -> None:
    result = result_of(tree, "cpu", gpu=False)
    figure = result["entries"][0]["figures"][0]
    assert "busy" not in report.measured([result], tree)
    figure["high_us"] = 2.1 * figure["low_us"]
    assert "forward, 2 threads (busy machine)" in report.measured([result], tree)
    assert report.figure_cells(figure)[6].endswith("!")


README = "# Title\n<!-- {0}:begin -->\nold\n<!-- {0}:end -->\ntext\n<!-- {1}:begin -->\n<!-- {1}:end -->\nend\n"


def test_readme_sections_are_rewritten_and_go_out_of_date(tree: Path) -> None:
    readme, results = tree / "README.md", [result_of(tree, "cuda")]
    readme.write_text(README.format(*report.SECTIONS))
    assert "-old" in report.outdated(readme, results, tree)
    readme.write_text(report.rendered(readme.read_text(), results, tree))
    text = readme.read_text()
    assert "| `kwta` | the definition |" not in text  # this tree has no reference
    assert "verified 2026-01-02 on Some GPU" in text
    assert text.startswith("# Title\n")
    assert text.endswith("end\n")
    assert report.outdated(readme, results, tree) == ""
    (tree / "csrc/cuda/kwta.cu").write_text("// changed\n")
    assert "+" in report.outdated(readme, results, tree)


def test_a_readme_without_markers_is_refused(tree: Path) -> None:
    with pytest.raises(ValueError, match="operations:begin"):
        report.rendered("# Title\n", [], tree)


def test_readme_of_this_checkout_is_up_to_date() -> None:
    assert report.outdated() == "", "run python -m bench report --readme"
