"""Measures verified kernels: plans jobs, takes samples of their time, and computes figures from the samples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from bench import nvml, peers, timing, tracing
from bench.registry import ENTRIES, Entry, Inputs, Shape, label
from bench.shapes import ROUTINGS
from bench.worker import Worker, WorkerLost
from moe_kernels.backends import limits as limits_of
from moe_kernels.verify import Row, dtype_name, error_text, threads

MEMCPY = "memcpy"
TOLERANCE = 0.05  # largest allowed `_difference` of two outputs; far above rounding, as ties may be broken differently
JOB_SECONDS = 60  # limit of one job, with compilation

Figure = dict[str, Any]
Calls = dict[str, Callable[[Inputs], object]]
Ceilings = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Request:
    """Selects what is measured.

    shapes: name of a set of shapes. routings: shapes with another routing are left out, except in "scaling".
    peers: only those whose names contain one of these parts; None: all.
    curves: also measure the set "scaling" of every operation: forward, in the first dtype that is measured, on the
        largest number of threads.
    size: values that replace those of each operation's first shape, such as {"T": 4096}; operations that have none of
        these sizes are left out. Empty: the whole set.
    first: name of a set that is measured before `shapes`, in the narrowest dtype alone; empty: none.
    """

    shapes: str = "quick"
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    threads: tuple[int, ...] = (1,)
    routings: tuple[str, ...] = ROUTINGS
    peers: tuple[str, ...] | None = None
    curves: bool = True
    first: str = ""
    size: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """Calls that are timed in turns: an operation on a shape, by each of `backends` and by the peers."""

    op: str
    shape: Shape
    dtype: torch.dtype
    direction: str
    device: str
    threads: int
    backends: tuple[str, ...]
    curve: bool = False  # the figures are points of a scaling curve

    @property
    def entry(self) -> Entry:
        return ENTRIES[self.op]

    def __str__(self) -> str:
        where = setting(self.device, self.threads)
        return f"{self.op} {label(self.shape)} {dtype_name(self.dtype)} {self.direction}, {where}"


@dataclass
class Found:
    """Results of jobs: figures and points of the scaling curves.

    left_out: reasons why figures are missing, and remarks on measured kernels, such as a difference from PyTorch.
    failed: errors of kernels that passed the verification, by operation, backend and dtype.
    """

    figures: list[Figure] = field(default_factory=list)
    curves: list[Figure] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: dict[tuple[str, str, str], str] = field(default_factory=dict)

    def add(self, other: Found) -> None:
        self.figures += other.figures
        self.curves += other.curves
        self.failed |= other.failed
        self.left_out += [line for line in other.left_out if line not in self.left_out]


def setting(device: str, count: int) -> str:
    """ "cuda", "1 thread" or "2 threads": the setting of a figure, and the key of its ceilings."""
    return "cuda" if device == "cuda" else f"{count} thread{'s' * (count > 1)}"


def plan(rows: list[Row], request: Request) -> tuple[list[Job], list[str]]:
    """The jobs of verified kernels in the requested dtypes, and lines with the reasons why others are left out."""
    allowed: dict[tuple[str, str, str], list[str]] = {}
    left_out = []
    for row in rows:
        reason = reason_against(row)
        if reason:
            left_out.append(f"{row.operation} {row.backend} {row.dtype}: {reason}")
        elif row.dtype in request.dtypes:
            allowed.setdefault((row.operation, row.dtype, row.device), []).append(row.backend)
    jobs, with_curve = [], set()
    for (op, name, device), backends in allowed.items():
        entry, dtype = ENTRIES[op], getattr(torch, name)
        if dtype not in entry.dtypes:
            left_out.append(f"{op} {name}: verified, but not among the dtypes that are measured")
            continue
        threads = request.threads if device == "cpu" else (1,)
        job = partial(Job, op=op, dtype=dtype, device=device, backends=tuple(backends))
        shapes = _shapes(op, request.shapes, device, request.routings)
        if request.size:
            shapes = sized(shapes[:1], request.size)
            if not shapes:
                continue
        narrowest = min(
            (each for each in entry.dtypes if dtype_name(each) in request.dtypes), key=lambda each: each.itemsize
        )
        if request.first and dtype == narrowest:
            before = _shapes(op, request.first, device, request.routings)
            shapes = before + [each for each in shapes if each not in before]
        if not shapes:
            left_out.append(f"{op}: has no shapes called {request.shapes}, or none with the requested routing")
        jobs += [
            job(shape=shape, direction=direction, threads=count)
            for count in threads
            for shape in shapes
            for direction in entry.directions
        ]
        if request.curves and (op, device) not in with_curve:
            with_curve.add((op, device))
            curve = _shapes(op, "scaling", device, ROUTINGS)
            if not curve:
                left_out.append(f"{op}: has no shapes called scaling")
            jobs += [job(shape=shape, direction="forward", threads=max(threads), curve=True) for shape in curve]
    fitting = [replace(job, backends=_fitting(job)) for job in jobs]
    return [job for job in fitting if job.backends], list(dict.fromkeys(left_out))


def sized(shapes: Iterable[Shape], size: Mapping[str, Any]) -> list[Shape]:
    """The shapes with the values of `size` for the sizes that they have; without those that have none."""
    return [
        {name: size.get(name, value) for name, value in shape.items()} for shape in shapes if size.keys() & shape.keys()
    ]


def _fitting(job: Job) -> tuple[str, ...]:
    """The job's backends whose kernels take sizes as large as those of its shape."""

    def fits(backend: str) -> bool:
        return all(job.shape.get(size, 0) <= most for size, most in limits_of(backend, job.op, job.device))

    return tuple(backend for backend in job.backends if fits(backend))


def _shapes(op: str, name: str, device: str, routings: tuple[str, ...]) -> list[Shape]:
    entry = ENTRIES[op]
    chosen = [each for each in entry.shapes.get(name, []) if each.get("routing", routings[0]) in routings]
    full = [entry.complete(each, device) if name != "scaling" else dict(each) for each in chosen]
    return [each for index, each in enumerate(full) if each not in full[:index]]


def reason_against(row: Row) -> str:
    """The reason not to measure the row's kernel; empty if it may be measured."""
    if row.verdict == "FAILED":
        return f"wrong, so not measured ({row.note})"
    if row.verdict != "ok":
        return row.note
    if row.operation not in ENTRIES:
        return "no entry in bench/registry.py"
    return "interpreted on the CPU, so not measured" if row.device == "cpu" and row.backend != "cpu" else ""


def ceilings(jobs: list[Job]) -> Ceilings:
    """For each setting the measured speed of a copy in GB/s and of matrix products by dtype in GFLOP/s."""
    found: Ceilings = {}
    for device, count in sorted({(job.device, job.threads) for job in jobs}):
        dtypes = sorted({job.dtype for job in jobs if job.device == device}, key=str)
        with threads(count):
            found[setting(device, count)] = timing.ceilings(device, dtypes)
    return found


def round_robin(jobs: list[Job]) -> list[Job]:
    """The jobs in an order for short runs: operations and dtypes in turns, narrow dtypes first; curves last."""
    groups: dict[tuple[bool, str, torch.dtype], list[Job]] = {}
    for job in sorted(jobs, key=lambda job: job.dtype.itemsize):
        groups.setdefault((job.curve, job.op, job.dtype), []).append(job)
    ordered = []
    for curve in (False, True):
        turns = zip_longest(*(group for key, group in groups.items() if key[0] == curve))
        ordered += [job for turn in turns for job in turn if job]
    return ordered


def run(
    jobs: list[Job],
    limits: Ceilings,
    budget: float,
    peers: tuple[str, ...] | None = None,
    until: float = math.inf,
    worker: Worker | None = None,
) -> Iterator[Found]:
    """Yields for each job what was found: a figure for each backend, or why there is none.

    budget: most seconds for the samples of a job. until: value of time.monotonic() after which no job starts; samples
    get half of a job's share of the time until then, and inputs, warm-up, CUDA graphs and sensors the rest. worker:
    another process that measures, so that a kernel that breaks the GPU or exceeds JOB_SECONDS loses only its job.

    If a job fails on a GPU, each of its kernels is measured alone and without peers, to find those that fail.
    """

    def measure_job(job: Job, share: float, peers: tuple[str, ...] | None) -> Found:
        arguments = job, limits, min(budget, 0.5 * share), peers
        if worker is None:
            return measure_one(*arguments)
        left = until - time.monotonic() + 5  # 5 s more, for a job that begins just before `until`
        try:
            return worker(measure_one, *arguments, seconds=min(left, JOB_SECONDS))
        except WorkerLost as lost:
            cut_short = left < JOB_SECONDS and time.monotonic() > until
            return Found(left_out=[f"{job}: out of time"]) if cut_short else _failed(job, str(lost))

    for index, job in enumerate(jobs):
        if time.monotonic() > until:
            yield Found(left_out=[f"{job}: out of time"])
            continue
        share = (until - time.monotonic()) / (len(jobs) - index)
        found = measure_job(job, share, peers)
        if found.failed and job.device == "cuda":
            alone = Found(left_out=found.left_out)
            for backend in job.backends:
                alone.add(measure_job(replace(job, backends=(backend,)), share, ()))
            found = alone
        yield found


def measure_one(job: Job, limits: Ceilings, budget: float, peers: tuple[str, ...] | None) -> Found:
    """The figures of one job, or the reason why there are none."""
    found = Found()
    try:
        with threads(job.threads):
            samples, more = _samples(job, budget, peers, found)
    except torch.cuda.OutOfMemoryError:  # no kernel counts as failed: inputs or peers may be the cause
        return Found(left_out=[*found.left_out, f"{job}: no room in the GPU's memory"])
    except Exception as raised:
        return _failed(job, error_text(raised), found)
    finally:
        if job.device == "cuda":
            torch.cuda.empty_cache()
    memcpy = samples.pop(MEMCPY)
    kernels = {name: samples.pop(name) for name in job.backends}
    limit = limits[setting(job.device, job.threads)]
    figures = [
        figure(job, name, each, samples, memcpy, limit, more[name].pop("flops")) | more[name]
        for name, each in kernels.items()
    ]
    (found.curves if job.curve else found.figures).extend(figures)
    return found


def _failed(job: Job, why: str, found: Found | None = None) -> Found:
    found, line = found or Found(), f"{job}: {why}"
    found.left_out.append(line)
    found.failed |= {(job.op, backend, dtype_name(job.dtype)): line for backend in job.backends}
    return found


def _samples(
    job: Job, budget: float, wanted: tuple[str, ...] | None, found: Found
) -> tuple[dict[str, timing.Sample], dict[str, Figure]]:
    """Samples of kernels, peers and memcpy by name, and for each kernel more values of its figure, such as memory."""
    entry, size = job.entry, job.entry.least_bytes(job.shape, job.dtype, job.direction)

    def inputs() -> Inputs:
        # The copy reads half of the least bytes and writes the other half.
        source = torch.zeros(size // 2, dtype=torch.uint8, device=job.device)
        return {**entry.inputs(job.shape, job.dtype, job.device), MEMCPY: (source, torch.empty_like(source))}

    before = torch.cuda.memory_allocated()  # 0 without a GPU
    first_inputs = inputs()
    held = torch.cuda.memory_allocated() - before
    calls: dict[str, Callable[[Inputs], object]] = {MEMCPY: lambda each: each[MEMCPY][1].copy_(each[MEMCPY][0])}
    calls |= {name: entry.kernel(name)[job.direction] for name in job.backends}
    others = _peers(job, first_inputs, wanted, calls[job.backends[0]], found)
    if job.device == "cuda" and not job.curve:
        _compare(job, calls, others, first_inputs, found)
    calls |= others
    bound = {name: partial(call, first_inputs) for name, call in calls.items()}
    more: dict[str, Figure] = {name: {"flops": _flops(bound[name])} for name in job.backends}
    if job.device != "cuda":
        samples = timing.time_cpu(bound, budget)
    else:
        sets = [first_inputs, *(inputs() for _ in range(timing.sets_for(size, held) - 1))]
        waiting = {name for name, call in bound.items() if timing.host_sync_error(call)}
        found.left_out += [
            f"{job.op} by {name}: the call waits for the GPU, so it was timed without a CUDA graph" for name in waiting
        ]
        launches = timing.launchers(calls, sets, waiting)
        samples = timing.time_gpu(launches, len(sets), budget)
        for name in job.backends:
            launch = timing.launch_seconds(bound[name], budget)
            more[name] |= {"launch_us": launch * 1e6} | nvml.watch(launches[name], len(sets), min(budget, 0.2))
        del launches, sets
    if job.direction == "training" and not job.curve:
        peaks = {name: tracing.peak_bytes(bound[name], job.device) / 2**20 for name in bound if name != MEMCPY}
        for name in job.backends:
            more[name] |= {"peak_mib": peaks[name], "peers_peak_mib": {other: peaks[other] for other in others}}
    return samples, more


def _flops(call: Callable[[], object]) -> int:
    """FLOPs of a call, by the formulas of the operators that it calls."""
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def _compare(job: Job, calls: Calls, others: Calls, inputs: Inputs, found: Found) -> None:
    """Adds a remark on each kernel whose output differs by more than TOLERANCE from a composition in PyTorch."""
    name = next((name for name in others if name in job.entry.peers), None)
    if name is not None:
        expected = others[name](inputs)
        for backend in job.backends:
            off = _difference(calls[backend](inputs), expected)
            if off > TOLERANCE:
                found.left_out.append(f"{job}: the relative difference of {backend} from {name} is {off:.2g}")


def _peers(
    job: Job, inputs: Inputs, wanted: tuple[str, ...] | None, kernel: Callable[[Inputs], object], found: Found
) -> Calls:
    """The peers that have the job's direction and run here. Peers of other packages must also agree with `kernel`."""
    entry = job.entry
    calls, missing = peers.available(job.op, entry, job.device, job.dtype, wanted)
    chosen: Calls = {}
    for name, by_direction in calls.items():
        if job.direction in by_direction:
            wrong = _wrong(by_direction[job.direction], None if name in entry.peers else kernel, inputs)
            if wrong:
                missing[name] = wrong
            else:
                chosen[name] = by_direction[job.direction]
    for name, reason in missing.items():
        found.left_out.append(f"peer {name} of {job.op}: {reason}")
    return chosen


def _wrong(peer: Callable[[Inputs], object], kernel: Callable[[Inputs], object] | None, inputs: Inputs) -> str:
    """The reason not to time a peer: it raises, or differs from `kernel` (if given) by more than TOLERANCE; else ""."""
    try:
        got = peer(inputs)
    except Exception as raised:
        return f"fails: {error_text(raised)}"
    off = _difference(kernel(inputs), got) if kernel else 0.0
    return "" if off <= TOLERANCE else f"gives another result, relative error {off:.2g}"


def _difference(found: object, expected: object) -> float:
    """The largest |found - expected| / |expected|, in norms, of an output's tensors.

    Infinite if the numbers or shapes of tensors differ, or a quotient is NaN.
    """
    pairs = list(zip_longest(*([each.float() for each in tensors_of(output)] for output in (found, expected))))
    if any(a is None or b is None or a.shape != b.shape for a, b in pairs):
        return math.inf
    ratios = [float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs]
    return max((math.inf if math.isnan(off) else off for off in ratios), default=0.0)


def tensors_of(output: object) -> list[torch.Tensor]:
    found = output if isinstance(output, tuple | list) else (output,)
    return [each.detach() for each in found if isinstance(each, torch.Tensor)]


def figure(
    job: Job,
    backend: str,
    sample: timing.Sample,
    peers: dict[str, timing.Sample],
    memcpy: timing.Sample,
    limit: dict[str, float],
    flops: int,
) -> Figure:
    """The figure of one kernel: microseconds (median, 10th and 90th percentile), GB/s, GFLOP/s and ratios.

    ceiling_percent: the least time at the speeds of `limit`, in percent of the time taken. over_memcpy: the time
    divided by that of a copy that moves the least bytes. peers: how many times as fast as each peer the kernel is.
    """
    size = job.entry.least_bytes(job.shape, job.dtype, job.direction)
    product = limit.get(dtype_name(job.dtype))
    floor = max(size / limit["copy"], flops / product if product else 0.0) * 1e-9
    return {
        "backend": backend,
        "dtype": dtype_name(job.dtype),
        "op": job.op,
        "direction": job.direction,
        "shape": label(job.shape),
        "setting": setting(job.device, job.threads),
        "sizes": job.shape,
        "least_bytes": size,
        "flops": flops,
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
