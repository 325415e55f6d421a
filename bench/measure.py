"""Measures what was verified: jobs, their samples, and the figures that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from typing import Any

import torch

from bench import ledger, timing
from bench.registry import ENTRIES, Inputs, Shape, label
from moe_kernels import info
from moe_kernels.verify import Row, threads

MEMCPY = "memcpy"

Figure = dict[str, Any]
Ceilings = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Job:
    """Calls that are timed together: one operation, shape, dtype, direction and number of CPU threads."""

    op: str
    shape: Shape
    dtype: torch.dtype
    direction: str
    device: str
    threads: int
    backends: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.op} {label(self.shape)} {short(self.dtype)} {self.direction}, {setting(self.device, self.threads)}"
        )


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def setting(device: str, count: int) -> str:
    """Where a figure was taken, and the key of its ceilings: "cuda" or "2 threads"."""
    return "cuda" if device == "cuda" else f"{count} thread{'s' * (count > 1)}"


def plan(rows: list[Row], shapes: str, dtypes: list[str], thread_counts: list[int]) -> tuple[list[Job], list[str]]:
    """The jobs that verified kernels allow, and for every other kernel why it is not measured."""
    allowed: dict[tuple[str, str, str], list[str]] = {}
    refused = []
    for row in rows:
        reason = refusal(row)
        if reason:
            refused.append(f"{row.operation} {row.backend} {row.dtype}: {reason}")
        elif row.dtype in dtypes:
            allowed.setdefault((row.operation, row.dtype, row.device), []).append(row.backend)
    jobs = []
    for (op, name, device), backends in allowed.items():
        entry, dtype = ENTRIES[op], getattr(torch, name)
        if dtype not in entry.dtypes:
            continue
        for count in thread_counts if device == "cpu" else [1]:
            for shape in entry.shapes[shapes]:
                full = entry.complete(shape, device)
                jobs += [Job(op, full, dtype, each, device, count, tuple(backends)) for each in entry.directions]
    return jobs, refused


def refusal(row: Row) -> str:
    """Why a kernel with that verdict must not be measured; empty if it may be."""
    if row.verdict == "FAILED":
        return f"wrong, so not measured ({row.note})"
    if row.verdict != "ok":
        return row.note
    if row.operation not in ENTRIES:
        return "no entry in bench/registry.py"
    return "interpreted on the CPU, so not measured" if row.device == "cpu" and row.backend != "cpu" else ""


def ceilings(jobs: list[Job]) -> Ceilings:
    """Copy in GB/s and products in GFLOP/s, by setting and dtype."""
    found: Ceilings = {}
    for device, count in sorted({(job.device, job.threads) for job in jobs}):
        dtypes = sorted({job.dtype for job in jobs if job.device == device}, key=str)
        with threads(count):
            found[setting(device, count)] = timing.ceilings(device, dtypes)
    return found


def run(jobs: list[Job], limits: Ceilings, budget: float) -> Iterator[list[Figure]]:
    """Takes the samples of each job, `budget` seconds a job; one figure a backend."""
    for job in jobs:
        with threads(job.threads):
            samples, more = _samples(job, budget)
        memcpy = samples.pop(MEMCPY)
        kernels = {name: samples.pop(name) for name in job.backends}
        limit = limits[setting(job.device, job.threads)]
        yield [figure(job, name, sample, samples, memcpy, limit) | more[name] for name, sample in kernels.items()]


def _samples(job: Job, budget: float) -> tuple[dict[str, timing.Sample], dict[str, Figure]]:
    """Samples of kernels, peers and memcpy by name, and what else is known of each kernel."""
    entry, size = ENTRIES[job.op], ENTRIES[job.op].least_bytes(job.shape, job.dtype, job.direction)

    def inputs() -> Inputs:
        source = torch.zeros(size // 2, dtype=torch.uint8, device=job.device)
        return {**entry.inputs(job.shape, job.dtype, job.device), MEMCPY: (source, torch.empty_like(source))}

    calls: dict[str, Callable[[Inputs], object]] = {MEMCPY: lambda each: each[MEMCPY][1].copy_(each[MEMCPY][0])}
    calls |= {name: entry.kernel(name)[job.direction] for name in job.backends}
    calls |= {name: peer[job.direction] for name, peer in entry.peers.items()}
    one = inputs()
    if job.device != "cuda":
        bound = {name: partial(call, one) for name, call in calls.items()}
        return timing.time_cpu(bound, budget), {name: {} for name in job.backends}
    samples = timing.time_gpu(calls, [one, *(inputs() for _ in range(timing.sets_for(size) - 1))], budget)
    telemetry = timing.nvml()  # right after the load, before the clocks fall
    launches = {name: timing.launch_seconds(partial(calls[name], one)) * 1e6 for name in job.backends}
    return samples, {name: {"launch_us": launch, **telemetry} for name, launch in launches.items()}


def figure(
    job: Job,
    backend: str,
    sample: timing.Sample,
    peers: dict[str, timing.Sample],
    memcpy: timing.Sample,
    limit: dict[str, float],
) -> Figure:
    """What one kernel reached: microseconds (with the 10th and 90th percentile), GB/s, GFLOP/s and ratios.

    ceiling_percent: the least time that this machine's copy and product ceilings allow, over the time taken.
    over_memcpy: times as long as a copy of the least bytes. peers: times as fast as each.
    """
    entry = ENTRIES[job.op]
    size, flops = entry.least_bytes(job.shape, job.dtype, job.direction), entry.flops(job.shape, job.direction)
    product = limit.get(short(job.dtype))
    floor = max(size / limit["copy"], flops / product if product else 0.0) * 1e-9
    return {
        "backend": backend,
        "dtype": short(job.dtype),
        "op": job.op,
        "direction": job.direction,
        "shape": label(job.shape),
        "setting": setting(job.device, job.threads),
        "us": sample.median * 1e6,
        "low_us": sample.low * 1e6,
        "high_us": sample.high * 1e6,
        "samples": sample.count,
        "gb_per_s": size / sample.median / 1e9,
        "gflop_per_s": flops / sample.median / 1e9,
        "ceiling_percent": 100 * floor / sample.median,
        "over_memcpy": sample.median / memcpy.median,
        "peers": {name: peer.median / sample.median for name, peer in peers.items()},
    }


def result(rows: list[Row], figures: list[Figure], limits: Ceilings, refused: list[str]) -> dict[str, Any]:
    """One run as data: the machine, and per operation, backend and dtype the sources, the verdict and the figures."""
    facts = info.machine()
    entries = []
    for row in rows:
        if row.verdict != "not run":
            mine = [each for each in figures if all(each[key] == value for key, value in _key(row).items())]
            sources = ledger.digest(row.operation, row.backend)
            entries.append({**asdict(row), "sources": sources, "checks": {}, "figures": mine})
    return {
        "device": info.device_name(facts),
        "gpu": bool(facts["gpus"]),
        "date": date.today().isoformat(),
        "machine": facts,
        "ceilings": limits,
        "not_measured": refused,
        "entries": entries,
    }


def _key(row: Row) -> dict[str, str]:
    return {"op": row.operation, "backend": row.backend, "dtype": row.dtype}
