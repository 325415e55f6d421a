"""Profiles one operation with torch.profiler: a trace, and the time of each kernel compared with the floor.

The floor is the least time of the call at this machine's measured speeds of a copy and of a matrix product.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import measure, tracing
from bench.ledger import ROOT
from bench.registry import ENTRIES
from moe_kernels.info import placement
from moe_kernels.verify import KERNELS, dtype_name, error_text, threads

CALLS = 10


class Line(NamedTuple):
    """One kernel: launches and microseconds a call, share of all kernels' time, and microseconds divided by the floor.

    On a CPU a line is one operator, and the profiler also counts time in which other processes held the core. So `us`
    is `share` times the time that the bench measured; `launches` is None.
    """

    name: str
    launches: float | None
    us: float
    share: float
    floors: float


class Profile(NamedTuple):
    """us: microseconds of the call, as the bench measures them. trace: path of the trace."""

    lines: list[Line]
    us: float
    floor_us: float
    trace: Path


def name_of(job: measure.Job) -> str:
    return f"{job.op}-{job.backends[0]}-{dtype_name(job.dtype)}-{job.direction}"


def profile(job: measure.Job, folder: Path, seconds: float = 0.3) -> Profile:
    """Measures the job, traces CALLS calls, and writes the trace, which chrome://tracing and Perfetto show."""
    limits = measure.ceilings([job])
    (found,) = measure.run([job], limits, seconds, ())
    if not found.figures:
        raise RuntimeError(found.left_out[-1])
    figure = found.figures[0]
    floor = figure["us"] * figure["ceiling_percent"] / 100
    call = _call(job)
    with threads(job.threads):
        call()
        with tracing.traced(job.device) as profiler:
            for _ in range(CALLS):
                call()
            if job.device == "cuda":
                torch.cuda.synchronize()
    if job.device == "cuda":  # Nsight Compute profiles only this block (see `tools`)
        with torch.cuda.profiler.profile():
            call()
            torch.cuda.synchronize()
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / f"{name_of(job)}.trace.json"
    profiler.export_chrome_trace(str(trace))
    on_gpu = job.device == "cuda"
    spent = _own_times(profiler.key_averages(), on_gpu)
    total = sum(us for *_, us in spent)
    scale = 1.0 if on_gpu else figure["us"] / total
    lines = [
        Line(name, count if on_gpu else None, us * scale, us / total, us * scale / floor) for name, count, us in spent
    ]
    return Profile(sorted(lines, key=lambda line: -line.us), figure["us"], floor, trace)


def _own_times(events: Iterable[Any], on_gpu: bool) -> list[tuple[str, float, float]]:
    """Name, number per call and microseconds per call of each event that takes time besides that of its children."""
    found = []
    for event in events:
        if on_gpu and event.device_type == torch.autograd.DeviceType.CPU:
            continue  # the time of an operator is that of its kernels, which are events too
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if us > 0:
            found.append((event.key, event.count / CALLS, us / CALLS))
    return found


def _call(job: measure.Job) -> Callable[[], object]:
    entry = ENTRIES[job.op]
    return partial(entry.kernel(job.backends[0])[job.direction], entry.inputs(job.shape, job.dtype, job.device))


def tools(job: measure.Job, arguments: list[str], folder: Path) -> dict[str, str]:
    """The files that Nsight Compute and Triton's proton wrote, or why they did not run.

    arguments: options with which Nsight Compute runs `python -m bench profile`.
    """
    found = {}
    program = shutil.which("ncu")
    if job.device != "cuda":
        return dict.fromkeys(("Nsight Compute", "proton"), "not run: no GPU")
    if program is None:
        found["Nsight Compute"] = "not run: ncu is not installed"
    else:
        out = folder / f"{name_of(job)}.ncu-rep"
        profile_again = [sys.executable, "-m", "bench", "profile", *arguments, "--no-tools"]
        # Profiling starts off: else --launch-count would also count launches that prepare inputs and measure ceilings.
        # It must leave the clocks alone: others may use the GPU, and other figures were measured at its own clocks.
        options = ["--set", "full", "--clock-control", "none", "--profile-from-start", "off"]
        options += ["--launch-count", "20", "--force-overwrite"]
        command = [program, *options, "--export", str(out), *profile_again]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
        found["Nsight Compute"] = (
            str(out) if done.returncode == 0 else f"failed: {done.stdout.strip()[-200:] or 'no output'}"
        )
    found["proton"] = _proton(job, folder)
    return found


def _proton(job: measure.Job, folder: Path) -> str:
    if not all(map(importlib.util.find_spec, ("triton", "triton.profiler"))):
        return "not run: triton.profiler is not installed"
    from triton import profiler as proton

    name, call = str(folder / name_of(job)), _call(job)
    try:
        proton.start(name)
        for _ in range(CALLS):
            call()
        proton.finalize()
    except Exception as raised:
        return f"failed: {error_text(raised)}"
    return f"{name}.hatchet"


def job_of(
    op: str, backend: str | None, dtype: str, direction: str, shapes: str, index: int, count: int
) -> tuple[measure.Job | None, str]:
    """The job to profile, on `backend` or the first one that runs, or the reason why there is none.

    index: of the shape in the set `shapes`. count: number of CPU threads.
    """
    places = {name: placement(op, name, getattr(torch, dtype)) for name in ([backend] if backend else KERNELS)}
    for name, (device, _) in places.items():
        if device == "cuda" or (device == "cpu" and name == "cpu"):
            entry = ENTRIES[op]
            sizes = entry.shapes.get(shapes, [])
            if direction not in entry.directions or index >= len(sizes):
                return None, f"{op} has directions {', '.join(entry.directions)} and {len(sizes)} {shapes} shapes"
            shape = entry.complete(sizes[index], device)
            return measure.Job(op, shape, getattr(torch, dtype), direction, device, count, (name,)), ""
    return None, "; ".join(f"{name}: {place.reason or 'interpreted on the CPU'}" for name, place in places.items())
