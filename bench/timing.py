"""Takes times: medians of interleaved samples, by a clock on a CPU, by events on a GPU.

The compared calls take turns, in a new random order each round, so that changes of the machine's speed affect their
ratios little. On a GPU they run in CUDA graphs, except those that no graph can capture. On a CPU with one thread, the
time that the thread waited for a core is subtracted.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from moe_kernels.verify import dtype_name

SAMPLE_SECONDS = 200e-6  # a sample repeats a short call to last about this long
# A call has at least MIN_ROUNDS samples, or at least FEW_ROUNDS if over 10 times the budget is spent.
FEW_ROUNDS, MIN_ROUNDS, MAX_ROUNDS = 3, 5, 400


@dataclass(frozen=True)
class Sample:
    """Seconds of a call: the median, the 10th and the 90th percentile, and the number of samples."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(seconds: list[float]) -> Sample:
        ordered = sorted(seconds)
        last = len(ordered) - 1
        return Sample(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered))


def interleave(
    measures: Mapping[str, Callable[[], float]], budget: float, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Sample]:
    """Samples of the measures, called in turns for about `budget` seconds. A measure returns the seconds of a call."""
    order, seconds = list(measures), {name: list[float]() for name in measures}
    shuffle, start = random.Random(0), clock()
    for round_ in range(MAX_ROUNDS):
        spent = clock() - start
        if (round_ >= MIN_ROUNDS and spent > budget) or (round_ >= FEW_ROUNDS and spent > 10 * budget):
            break
        shuffle.shuffle(order)
        for name in order:
            seconds[name].append(measures[name]())
    return {name: Sample.of(values) for name, values in seconds.items()}


def time_cpu(
    calls: Mapping[str, Callable[[], object]], budget: float = 0.5, clock: Callable[[], float] | None = None
) -> dict[str, Sample]:
    """Interleaved samples of calls on the CPU, each warmed up first. budget: seconds for all calls together."""
    if clock is None:
        alone = torch.get_num_threads() == 1
        with undisturbed_clock() if alone else nullcontext(time.perf_counter) as chosen:
            return time_cpu(calls, budget, chosen)

    with no_garbage_collection():
        return interleave({name: _sampler(call, clock) for name, call in calls.items()}, budget, clock)


def _sampler(call: Callable[[], object], clock: Callable[[], float]) -> Callable[[], float]:
    """A function that takes one sample: mean seconds of a call, repeated for SAMPLE_SECONDS; a long call runs once."""

    def once() -> float:
        start = clock()
        call()
        return clock() - start

    first = once()  # warms up; if it took 0.1 s or more, its time is the estimate
    repeats = max(1, round(SAMPLE_SECONDS / max(once() if first < 0.1 else first, 1e-9)))

    def sample() -> float:
        began = clock()
        for _ in range(repeats):
            call()
        return (clock() - began) / repeats

    return sample


@contextmanager
def samplers(
    calls: Mapping[str, Callable[[Any], object]], input_sets: list[Any], device: str
) -> Iterator[dict[str, Callable[[], float]]]:
    """Yields for every call a function that takes one sample, on the GPU or on one thread of the CPU."""
    if device == "cuda":
        waiting = {name for name, call in calls.items() if host_sync_error(partial(call, input_sets[0]))}
        launches = launchers(calls, input_sets, waiting)
        yield {name: partial(_seconds, launch, len(input_sets)) for name, launch in launches.items()}
        return
    with undisturbed_clock() as clock:
        yield {name: _sampler(partial(call, input_sets[0]), clock) for name, call in calls.items()}


@contextmanager
def undisturbed_clock() -> Iterator[Callable[[], float]]:
    """A clock of wall time, less the time that this thread waited for a core if Linux reports it."""
    try:
        statistics_of_thread = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        yield time.perf_counter
        return

    def now() -> float:
        queued_ns = int(os.pread(statistics_of_thread, 96, 0).split()[1])
        return time.perf_counter() - queued_ns * 1e-9

    try:
        yield now
    finally:
        os.close(statistics_of_thread)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def time_gpu(launches: Mapping[str, Callable[[], object]], calls: int, budget: float = 0.5) -> dict[str, Sample]:
    """Interleaved samples of calls on the GPU. Each of `launches`, from `launchers`, makes `calls` calls."""
    return interleave({name: partial(_seconds, launch, calls) for name, launch in launches.items()}, budget)


def _seconds(launch: Callable[[], object], calls: int) -> float:
    return _between_events(launch) / calls


def launchers(
    calls: Mapping[str, Callable[[Any], object]], input_sets: list[Any], eager: Container[str] = ()
) -> dict[str, Callable[[], object]]:
    """For every call a function that makes it on each of `input_sets`: a CUDA graph, or plain calls if in `eager`.

    The sets together should be larger than the L2 cache (see `sets_for`), so that no call finds its inputs there.
    For the same reason the outputs of a graph share no memory.
    """
    return {
        name: partial(_launch, call, input_sets) if name in eager else _graph(call, input_sets)
        for name, call in calls.items()
    }


def sets_for(bytes_per_call: int, held: int = 1) -> int:
    """Number of input sets: calls on all of them move at least three times the size of L2, if the limits allow it.

    bytes_per_call: lower bound of the bytes that a call moves. held: allocated bytes of a set. Limits: 64 sets, 4 GiB
    moved by calls on all sets, 16 GiB allocated for all sets. There are 2 sets in any case.
    """
    l2 = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or 64 * 2**20
    return max(2, min(-(-3 * l2 // bytes_per_call), 2**32 // bytes_per_call, 2**34 // max(held, 1), 64))


def host_sync_error(call: Callable[[], object]) -> str:
    """torch's error if `call`, once warm, makes the host wait for the GPU, which no graph can capture; else empty."""
    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def _launch(call: Callable[[Any], object], input_sets: list[Any]) -> list[object]:
    return [call(inputs) for inputs in input_sets]


def _graph(call: Callable[[Any], object], input_sets: list[Any]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm-up before the capture: kernels are compiled, libraries allocate
        for _ in range(2):
            call(input_sets[0])
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = _launch(call, input_sets)
    del kept
    return graph.replay


def _between_events(launch: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(200_000)  # about 0.1 ms, in which the host launches ahead of the GPU
    start.record()
    launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def launch_seconds(call: Callable[[], object], budget: float = 0.5, repeats: int = 50) -> float:
    """Median seconds that the host takes for one call, which the GPU may finish later."""
    taken, began = list[float](), time.perf_counter()
    while len(taken) < repeats and (len(taken) < FEW_ROUNDS or time.perf_counter() - began < budget):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def ceilings(device: str, dtypes: list[torch.dtype], budget: float = 0.3) -> dict[str, float]:
    """Measured ceilings of this machine: a copy in GB/s (read plus written) and products in GFLOP/s by dtype.

    On a CPU only float32 and bfloat16 have a product: torch's product in float16 is slow.
    """
    on_gpu = device == "cuda"
    size, side = (2**29, 8192) if on_gpu else (2**23, 1024)
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[Any], object]] = {"copy": lambda _: target.copy_(source)}
    for dtype in dtypes:
        if on_gpu or dtype in (torch.float32, torch.bfloat16):
            calls[dtype_name(dtype)] = _product(side, dtype, device)
    if on_gpu:
        samples = time_gpu(launchers(calls, [None, None]), 2, budget)
    else:
        samples = time_cpu({name: partial(call, None) for name, call in calls.items()}, budget)
    work = {name: 2 * size if name == "copy" else 2 * side**3 for name in calls}
    return {name: work[name] / sample.median / 1e9 for name, sample in samples.items()}


def _product(side: int, dtype: torch.dtype, device: str) -> Callable[[Any], object]:
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda _: torch.mm(a, b, out=out)
