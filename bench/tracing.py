"""Peak memory of a call, and a profiler trace of its kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@contextmanager
def traced(device: str, *, memory: bool = False) -> Iterator[profile]:
    """Traces the block. All output to stderr is discarded meanwhile, since the profiler logs there."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        with profile(activities=activities, profile_memory=memory, acc_events=True) as profiler:
            yield profiler
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def peak_bytes(call: Callable[[], object], device: str) -> int:
    """Peak memory of one call, with its outputs, beyond the memory that was allocated before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with traced(device, memory=True) as profiler:
        call()
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    held = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(held, default=0)
