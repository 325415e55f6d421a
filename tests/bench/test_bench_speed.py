"""Times and profiles of python -m bench."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.planted import plant

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from bench import compare, ledger, measure, peers, profile, registry, routing, timing, tracing
from bench.runs import Run
from moe_kernels.verify import threads
from tests.helpers.bench import ROW, run

JOBS = [
    measure.Job("kwta", {"R": 512, "N": 512, "p": 0.5}, torch.float32, direction, "cpu", 1, ("cpu",))
    for direction in ("forward", "backward")
]


def measured(out: Path) -> Run:
    run = Run(out, measure.Request(), 0.2)
    run.rows, run.limits = {ROW: {}}, measure.ceilings(JOBS)
    for each in measure.run(JOBS, run.limits, 0.2):
        run.found.add(each)
    run.write()
    return run


def repeated(kernel: Callable[..., object], *args: object) -> object:
    for _ in range(7):  # fewer extra calls might not show on a busy machine
        kernel(*args)
    return kernel(*args)


def delayed(kernel: Callable[..., object], *args: object) -> object:
    time.sleep(2e-3)
    return kernel(*args)


@pytest.mark.parametrize("slower", [repeated, delayed])
def test_compare_finds_the_kernel_that_was_made_slower(monkeypatch, tmp_path: Path, slower) -> None:
    before = measured(tmp_path)
    plant(monkeypatch, "kwta_fwd", slower)
    after = measured(tmp_path)
    worst = compare.changes(before.result(), after.result())[0]
    assert worst.figure[3] == "forward"
    assert worst.slowdown > 1.5
    paths = [before.path, after.path]
    done = run("compare", *paths, "--tolerance", 0.5)
    assert done.exit_code == 1, done.output


def test_a_figure_agrees_with_the_cpu_time_that_the_same_call_takes() -> None:
    """Measures the call with time.thread_time. One agreement in ten tries is enough, as the machine may be busy."""
    entry, job = registry.ENTRIES["kwta"], JOBS[0]
    inputs = entry.inputs(job.shape, job.dtype, "cpu")
    call = entry.kernel("cpu")["forward"]

    def by_thread_time() -> float:
        taken = []
        for _ in range(100):
            start = time.thread_time()
            call(inputs)
            taken.append(time.thread_time() - start)
        return statistics.median(taken)

    with threads(1):
        for _ in range(10):
            sample, other = timing.time_cpu({"call": lambda: call(inputs)}, 0.2)["call"], by_thread_time()
            if 0.9 * sample.low <= other <= 1.1 * sample.high:
                return
    pytest.fail(f"thread_time says {other}, the bench {sample}")


class Work(TorchDispatchMode):
    """Counts the bytes that copies read and write, and the FLOPs of products."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.copy_.default:
            self.done += sum(each.numel() * each.element_size() for each in args[:2])
        elif op is torch.ops.aten.mm.out:
            self.done += 2 * args[0].shape[0] * args[0].shape[1] * args[1].shape[1]
        return op(*args, **(kwargs or {}))


def test_ceilings_are_bytes_and_flops_over_seconds(monkeypatch) -> None:
    """If every call took a nanosecond for five bytes or FLOPs that it really does, all ceilings would be 5."""

    def time_cpu(calls, budget):
        samples = {}
        for name, call in calls.items():
            with Work() as work:
                call()
            assert work.done > 0
            seconds = work.done / 5e9
            samples[name] = timing.Sample(seconds, 0.5 * seconds, 2 * seconds, 3)
        return samples

    monkeypatch.setattr(timing, "time_cpu", time_cpu)
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    found = timing.ceilings("cpu", dtypes)
    assert found == {name: pytest.approx(5) for name in ("copy", "float32", "bfloat16")}


T, D, H, K, E, B, N = 6, 5, 3, 2, 7, 3, 5  # tokens, features, hidden, choices, experts, matrices and their side
ROWS, MATRIX, NODES = T * K, E * D * H, K * (2 * E - 1) * D
# Numbers of elements that a forward and a backward pass read and write, and of 4-byte indices in each pass.
MOVED = {
    "topk_gate": ((T * E, ROWS), (ROWS, ROWS, T * E), (ROWS, ROWS)),
    "make_plan": ((), (), (ROWS * 4 + 3 * E, 0)),
    "dispatch": ((T * D, ROWS * D), (ROWS * D, T * D), (ROWS, ROWS)),
    "combine": ((ROWS * D, ROWS, T * D), (T * D, ROWS * D, ROWS, ROWS * D, ROWS), (ROWS, ROWS)),
    "grouped_gemm": ((T * D, MATRIX, ROWS * H), (T * D, MATRIX, ROWS * H, T * D, MATRIX), (0, 0)),
    "expert_mlp": (
        (T * D, MATRIX, MATRIX, ROWS, T * D),
        (T * D, MATRIX, MATRIX, ROWS, T * D, T * D, MATRIX, MATRIX, ROWS),
        (0, 0),
    ),
    "expert_norms": (
        (T * D, MATRIX, MATRIX, T * E),
        (T * D, MATRIX, MATRIX, T * E, T * D, MATRIX, MATRIX),
        (0, 0),
    ),
    "sinkhorn": ((B * N * N,) * 2, (B * N * N,) * 3, (0, 0)),
    "tree_gate": ((T * D, NODES, T * E, T * K * E), (T * D, NODES, T * E, T * D, NODES), (0, 0)),
    "tree_route": ((T * D, NODES, T * K), (), (T * K, 0)),
}
SHAPE = {"T": T, "D": D, "H": H, "K": K, "E": E, "P": D, "routing": "uniform", "B": B, "n": N, "tau": 0.5}
ITERATIONS = 4
PRODUCT, TREES = 2 * ROWS * D * H, 2 * T * D * K
# FLOPs of a forward pass, and of a forward and a backward pass; of sinkhorn for each iteration.
FLOPS = {
    "topk_gate": (0, 0),
    "make_plan": (0, 0),
    "dispatch": (0, ROWS * D),
    "combine": (2 * ROWS * D, 5 * ROWS * D),
    "grouped_gemm": (PRODUCT, 3 * PRODUCT),
    "expert_mlp": (2 * PRODUCT + 2 * ROWS * D, 6 * PRODUCT + 3 * ROWS * D),
    "expert_norms": (4 * T * MATRIX, 12 * T * MATRIX),  # a CPU saves so few outputs
    "sinkhorn": (4 * B * N * N, 16 * B * N * N),
    "tree_gate": (TREES * (2 * E - 1), 3 * TREES * (2 * E - 1)),
    "tree_route": (TREES * 4, 0),  # three nodes and a leaf
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", MOVED)
def test_least_bytes_are_those_of_inputs_and_outputs(op: str, dtype: torch.dtype) -> None:
    forward, backward, indices = MOVED[op]
    entry = registry.ENTRIES[op]
    passes = [dtype.itemsize * sum(each) + 4 * words for each, words in zip((forward, backward), indices, strict=True)]
    assert entry.least_bytes(SHAPE, dtype, "forward") == passes[0]
    if "training" in entry.directions:
        assert entry.least_bytes(SHAPE, dtype, "training") == sum(passes)


def test_few_tokens_read_the_nodes_on_their_paths_alone() -> None:
    """Two tokens on four nodes each, of the thirteen of a tree with seven leaves."""
    moved = registry.ENTRIES["tree_route"].least_bytes({**SHAPE, "T": 2}, torch.float32, "forward")
    assert moved == 4 * (2 * D + K * 2 * 4 * D + 2 * K) + 4 * 2 * K


@pytest.mark.parametrize("op", FLOPS)
def test_flops_are_those_of_the_formulas(op: str) -> None:
    entry = registry.ENTRIES[op]
    shape = SHAPE | ({"R": ITERATIONS} if op == "sinkhorn" else {})  # R: also the rows of a plan
    inputs = entry.inputs(shape, torch.float32, "cpu")
    for direction in entry.directions:
        if direction in ("forward", "training"):
            found = measure._flops(lambda direction=direction: entry.kernel("cpu")[direction](inputs))
            each = ITERATIONS if op == "sinkhorn" else 1
            assert found == each * FLOPS[op][direction == "training"], direction


def test_routings_have_the_shares_that_they_name() -> None:
    torch.manual_seed(0)
    shares = {}
    for kind in ("uniform", "zipf", "adversarial"):
        drawn = routing.logits({"T": 100_000, "E": 8, "routing": kind}, "cpu").argmax(-1)
        shares[kind] = drawn.bincount(minlength=8) / 100_000
    zipf = torch.arange(1, 9) ** -1.2
    expected = {"uniform": torch.full((8,), 1 / 8), "zipf": zipf / zipf.sum()}
    expected["adversarial"] = torch.tensor([1 / 2, *[1 / 10] * 5, 0, 0])
    torch.testing.assert_close(shares, expected, rtol=0, atol=0.01)
    found = routing.loads({"T": 500, "D": 4, "E": 8, "K": 2})
    assert all(each == sorted(each, reverse=True) and sum(each) == 1000 for each in found["tokens"].values())
    assert found["tokens"]["adversarial"][-2:] == [0, 0]


@pytest.mark.parametrize(
    ("mib", "held_mib", "sets"),
    [
        (1, 1, 64),  # 150 sets would be three times L2, but there are at most 64
        (10, 1, 15),  # 15 x 10 MiB is three times L2
        (11, 1, 14),  # rounded up from 13.6
        (10, 2048, 8),  # 16 GiB allocated
        (1600, 1, 2),  # fewer than two sets would leave the inputs in L2
        (10, 2**20, 2),
    ],
)
def test_calls_on_all_sets_move_three_times_l2(monkeypatch, mib: int, held_mib: int, sets: int) -> None:
    properties = SimpleNamespace(L2_cache_size=50 * 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert timing.sets_for(mib * 2**20, held_mib * 2**20) == sets
    properties.L2_cache_size = 2**40
    assert timing.sets_for(2**29, 1) == 8  # 4 GiB moved


def test_times_of_a_gpu_are_seconds_a_call(monkeypatch) -> None:
    """On a GPU whose events count the launches between them, 5 ms each."""
    launched = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = len(launched)

        def synchronize(self) -> None:
            assert self.at == len(launched)

        def elapsed_time(self, end: Event) -> float:
            return 5.0 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = timing.time_gpu({"one": lambda: launched.append(1), "two": lambda: launched.extend([1, 1])}, 10, 0.0)
    assert [found[name].median for name in ("one", "two")] == pytest.approx([5e-4, 1e-3])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: len(launched) * 7e-6)
    assert timing.launch_seconds(lambda: launched.append(1)) == pytest.approx(7e-6)


def test_memcpy_moves_the_least_bytes_of_the_call(monkeypatch) -> None:
    moved = []

    def time_cpu(calls, budget):
        with Work() as work:
            calls[measure.MEMCPY]()
        moved.append(work.done)
        return dict.fromkeys(calls, timing.Sample(1e-3, 1e-3, 1e-3, 1))

    monkeypatch.setattr(timing, "time_cpu", time_cpu)
    (found,) = measure.run(JOBS[:1], {"1 thread": {"copy": 10.0, "float32": 100.0}}, 0.01)
    assert moved == [found.figures[0]["least_bytes"]] == [2 * 512 * 512 * 4]


def test_a_training_steps_peak_is_in_mib(monkeypatch) -> None:
    taken = iter((3 * 2**20, 5 * 2**20))  # our kernel, then its peer
    monkeypatch.setattr(tracing, "peak_bytes", lambda call, device: next(taken))
    sample = timing.Sample(1e-3, 1e-3, 1e-3, 1)
    monkeypatch.setattr(timing, "time_cpu", lambda calls, budget: dict.fromkeys(calls, sample))
    job = replace(JOBS[0], direction="training")
    (found,) = measure.run([job], {"1 thread": {"copy": 10.0, "float32": 100.0}}, 0.01)
    (figure,) = found.figures
    assert figure["peak_mib"] == 3
    assert figure["peers_peak_mib"] == {"torch topk+scatter+mul": 5}


def test_the_regression_set_fails_if_a_kernel_loses_against_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    slow = f"import sys; sys.path.insert(0, {str(ledger.ROOT)!r})\nfrom moe_kernels.backends import cpu\n"
    slow += "kernel = cpu.kwta_fwd\ncpu.kwta_fwd = lambda *args: [kernel(*args) for _ in range(8)][0]\n"
    (tmp_path / "slowed.py").write_text(slow)
    words = ["-q", "-p", "no:cacheprovider", "bench/test_regression.py", "-k", "kwta-cpu-forward"]
    words += [f"--benchmark-storage={tmp_path / 'saved'}"]
    first = [*words, "--benchmark-autosave"]
    later = [*words, "-p", "slowed", "--benchmark-compare", "--benchmark-compare-fail=median:100%"]
    # PyTorch takes 53 ms for the entry's 20971 rows.
    fewer = """from dataclasses import replace
from bench.registry import ENTRIES
entry = ENTRIES["kwta"]
ENTRIES["kwta"] = replace(entry, complete=lambda shape, device: {**entry.complete(shape, device), "R": 2000})"""
    code = f"{fewer}\nimport sys, pytest; print('saved', int(pytest.main({first}))); sys.exit(pytest.main({later}))"
    # pytest-benchmark measures nothing if it finds xdist's variables.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment = {**inherited, "PYTHONPATH": str(tmp_path), "MOE_KERNELS_BACKEND": "cpu"}
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ledger.ROOT, env=environment, capture_output=True, text=True)
    saved, *compared = done.stdout.split("\nsaved 0\n")
    assert compared, saved
    assert done.returncode != 0, compared
    lines = (compared[0] + done.stderr).split("Performance has regressed", 1)[1]
    assert "kwta-cpu-forward" in lines
    (path,) = (tmp_path / "saved").glob("*/*.json")
    ratios = {
        each["params"]["direction"]: each["stats"]["median"] for each in json.loads(path.read_text())["benchmarks"]
    }
    assert 0 < ratios["forward"] < 1  # in units of PyTorch's own time


def test_profile_names_the_kernel_that_takes_the_time(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(timing, "ceilings", lambda *args: {"copy": 10.0, "float32": 100.0})
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # filling takes as long as kWTA
    job = replace(JOBS[0], shape={"R": 4096, "N": 512, "p": 0.5})  # long compared with interruptions
    found = profile.profile(job, tmp_path, 0.01)
    assert found.lines[0].name == "moe_kernels::kwta_fwd"
    assert found.lines[0].share > 0.5
    assert sum(line.us for line in found.lines) == pytest.approx(found.us)
    assert all(line.floors == pytest.approx(line.us / found.floor_us) for line in found.lines)
    assert all(line.share == pytest.approx(line.us / found.us) for line in found.lines)
    assert all(line.launches is None for line in found.lines)
    assert found.floor_us == pytest.approx(2 * 4096 * 512 * 4 / 10e9 * 1e6)
    assert json.loads(found.trace.read_text())["traceEvents"]
    assert profile.tools(JOBS[0], [], tmp_path) == {"Nsight Compute": "not run: no GPU", "proton": "not run: no GPU"}


def test_a_profile_on_a_gpu_has_the_times_and_launches_of_its_kernels(monkeypatch, tmp_path: Path) -> None:
    """Ten calls are traced, after one and before one that Nsight Compute may profile."""
    order: list[str] = []
    kinds = torch.autograd.DeviceType
    events = [
        SimpleNamespace(key="small", count=30, device_type=kinds.CUDA, self_device_time_total=100.0),
        SimpleNamespace(key="large", count=10, device_type=kinds.CUDA, self_device_time_total=300.0),
    ]

    @contextmanager
    def block(name: str):
        order.append(f"{name}:")
        yield SimpleNamespace(key_averages=lambda: events, export_chrome_trace=lambda path: Path(path).write_text(name))
        order.append("end")

    figures = [{"us": 50.0, "ceiling_percent": 16.0}, {"us": 1.0, "ceiling_percent": 1.0}]
    job = replace(JOBS[0], device="cuda", backends=("triton", "cuda"), threads=1, dtype=torch.bfloat16)
    monkeypatch.setattr(measure, "ceilings", lambda jobs: {"of": jobs})
    monkeypatch.setattr(
        measure, "run", lambda *given: order.append(given) or iter([measure.Found(figures=figures, left_out=["x"])])
    )
    monkeypatch.setattr(profile, "_call", lambda job: lambda: order.append("call"))
    monkeypatch.setattr(tracing, "traced", lambda device: block(f"traced on {device}"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
    monkeypatch.setattr(torch.cuda.profiler, "profile", lambda: block("profiled"))
    found = profile.profile(job, tmp_path / "new" / "folder", 0.125)
    asked = ([job], {"of": [job]}, 0.125, ())
    traced = ["traced on cuda:", *["call"] * 10, "wait", "end"]
    assert order == [asked, "call", *traced, "profiled:", "call", "wait", "end"]
    assert found.lines == [
        profile.Line("large", 1.0, 30.0, 0.75, 3.75), profile.Line("small", 3.0, 10.0, 0.25, 1.25),
    ]  # fmt: skip
    assert (found.us, found.floor_us) == (50.0, 8.0)
    assert found.trace == tmp_path / "new" / "folder" / "kwta-triton-bfloat16-forward.trace.json"
    assert found.trace.read_text() == "traced on cuda"


def test_on_a_cpu_the_time_of_an_operator_counts_without_its_children() -> None:
    event = partial(SimpleNamespace, device_type=torch.autograd.DeviceType.CPU, self_device_time_total=7.0)
    events = [event(key="a", count=5, self_cpu_time_total=20.0), event(key="b", count=10, self_cpu_time_total=0.0)]
    assert profile._own_times(events, False) == [("a", 0.5, 2.0)]


def test_proton_writes_the_file_that_is_named(monkeypatch, tmp_path: Path) -> None:
    started = []

    def finalize() -> None:
        Path(f"{started[-1]}.hatchet").write_text("{}")

    stub = ModuleType("triton.profiler")
    stub.start, stub.finalize = started.append, finalize
    stub.__spec__ = ModuleSpec("triton.profiler", None)
    monkeypatch.setitem(sys.modules, "triton.profiler", stub)
    monkeypatch.setattr("triton.profiler", stub, raising=False)
    monkeypatch.chdir(tmp_path)
    written = profile._proton(JOBS[0], tmp_path / "folder with results")
    assert written.startswith("failed: ")  # there is no such folder
    assert Path(profile._proton(JOBS[0], tmp_path)).parent == tmp_path
    assert Path(profile._proton(JOBS[0], tmp_path)).is_file()


def test_a_call_that_cannot_be_measured_is_not_profiled(monkeypatch, tmp_path: Path) -> None:
    reasons = ["peer a: not installed", "kwta: no room in the GPU's memory"]
    monkeypatch.setattr(measure, "ceilings", lambda jobs: {})
    monkeypatch.setattr(measure, "run", lambda *given: iter([measure.Found(left_out=reasons)]))
    with pytest.raises(RuntimeError, match=f"^{reasons[-1]}$"):
        profile.profile(JOBS[0], tmp_path)
    assert not [*tmp_path.iterdir()]


def test_missing_tools_are_named(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said = {"Nsight Compute": "not run: ncu is not installed"}
    said["proton"] = "not run: triton.profiler is not installed"
    for missing in ("triton", "triton.profiler"):
        monkeypatch.delitem(sys.modules, "triton.profiler", raising=False)
        monkeypatch.setitem(sys.modules, missing, None)
        assert profile.tools(replace(JOBS[0], device="cuda"), [], tmp_path) == said


def test_profile_counts_a_gpus_kernel_once_and_not_its_launch_too() -> None:
    kinds = torch.autograd.DeviceType
    events = [
        SimpleNamespace(key="aten::mm", count=10, device_type=kinds.CPU, self_device_time_total=90.0),
        SimpleNamespace(key="sm90_gemm", count=20, device_type=kinds.CUDA, self_device_time_total=90.0),
        SimpleNamespace(key="nothing", count=10, device_type=kinds.CUDA, self_device_time_total=0.0),
    ]
    assert profile._own_times(events, True) == [("sm90_gemm", 2.0, 9.0)]


def test_nsight_compute_profiles_the_call_without_its_inputs_at_free_clocks(monkeypatch, tmp_path: Path) -> None:
    program = tmp_path / "ncu"
    wanted = '*"--clock-control none --profile-from-start off"*--no-tools*'
    program.write_text(f'#!/bin/sh\ncase "$*" in {wanted}) exit 0;; esac; exit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(profile, "_proton", lambda *args: args)
    job, file = replace(JOBS[0], device="cuda"), tmp_path / "kwta-cpu-float32-forward.ncu-rep"
    assert profile.tools(job, ["--op=kwta"], tmp_path) == {"Nsight Compute": str(file), "proton": (job, tmp_path)}
    for said, told in (("echo no permission", "no permission"), ("true", "no output"), ("printf '\\377.'", "\ufffd.")):
        program.write_text(f"#!/bin/sh\n{said}; exit 1\n")
        assert profile.tools(job, [], tmp_path)["Nsight Compute"] == f"failed: {told}"


def test_profile_explains_wrong_options() -> None:
    for arguments, reason in (
        (["--op", "nonsense"], "nonsense"),
        (["--op", "make_plan", "--direction", "training"], "forward"),
        (["--op", "kwta", "--shape", "99"], "shapes"),
    ):
        done = run("profile", *arguments)
        assert done.exit_code == 2
        assert reason in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU this would measure for ten minutes")
def test_the_gpu_command_fails_without_a_gpu() -> None:
    done = run("gpu")
    assert done.exit_code == 2
    assert "No GPU" in done.output


@pytest.mark.parametrize(
    ("device", "dtype", "changes", "reason"),
    [
        ("cuda", torch.float32, {}, ""),
        ("cpu", torch.float32, {}, "takes cuda tensors only"),
        ("cpu", torch.float32, {"device": ""}, ""),
        ("cuda", torch.bfloat16, {}, "does not take bfloat16"),
        ("cuda", torch.float16, {"module": "a_missing_package"}, "a_missing_package is not installed"),
        ("cpu", torch.bfloat16, {"reason": "takes no plan"}, "takes no plan"),
    ],
    ids=str,
)
def test_why_a_peer_cannot_run(device: str, dtype: torch.dtype, changes: dict, reason: str) -> None:
    peer = peers.Peer("a peer", "math", device="cuda", dtypes=(torch.float32, torch.float16))
    assert replace(peer, **changes).missing(device, dtype) == reason


def test_outputs_that_do_not_fit_are_infinitely_different() -> None:
    one, two = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert measure._difference((one, None), [one, 7]) == 0
    assert measure._difference((one, two), (one, one)) == pytest.approx(0.1)
    for other in ((one, one), (), one[:1], one[None], torch.tensor([3.0, math.nan])):
        assert measure._difference(one, other) == measure._difference(other, one) == math.inf
