"""What `python -m bench verify` asks of a kernel beyond its values: the same bits every time, no wait for the host, no
report of a sanitizer, and the test suite on a real GPU. A check says "ok", "FAILED: ..." or "not run: ..."."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.ledger import ROOT
from bench.measure import short, tensors_of
from bench.registry import ENTRIES, Calls, Inputs
from bench.timing import wait_for_gpu
from moe_kernels.info import placement
from moe_kernels.verify import DTYPES, Row, said

REPEATS = 20
SANITIZERS = ("memcheck", "racecheck", "synccheck")
OUT_OF_TIME = "not run: out of time"

# A failing call of CUDA's is no memory error: libraries probe with some, and one of a launcher's raises by itself.
SANITIZER_OPTIONS = {"memcheck": ("--report-api-errors", "no")}

# Out of the blocks that torch's allocator keeps a kernel may run unseen: each tensor gets memory of its own.
SANITIZED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def kernel_checks(row: Row) -> dict[str, str]:
    """Every check of one operation, backend and dtype that a single kernel can fail."""
    if row.verdict != "ok" or row.operation not in ENTRIES:
        return {}
    wanted = {"repeatable": repeatable} | ({"no host sync": no_host_sync} if row.device == "cuda" else {})
    found = {}
    for name, check in wanted.items():
        try:
            found[name] = check(row)
        except Exception as raised:  # the shape is larger than those that were verified
            found[name] = f"FAILED: {said(raised)}"
    return found


def repeatable(row: Row) -> str:
    """Every direction gives the same bits 20 times over."""
    inputs, calls = _calls(row)
    for direction, call in calls.items():
        first = _bytes(call(inputs))
        for _ in range(REPEATS - 1):
            if any(not torch.equal(a, b) for a, b in zip(first, _bytes(call(inputs)), strict=True)):
                return f"FAILED: {direction} differed within {REPEATS} runs"
    return "ok"


def no_host_sync(row: Row) -> str:
    """No direction makes the host wait for the GPU, once its kernels are compiled."""
    inputs, calls = _calls(row)
    for direction, call in calls.items():
        waited = wait_for_gpu(partial(call, inputs))
        if waited:
            return f"FAILED: {direction}: {waited}"
    return "ok"


def sanitizers(pairs: Iterable[tuple[str, str]], seconds: float | None = None) -> dict[tuple[str, str], dict[str, str]]:
    """compute-sanitizer's tools over the small cases of operations and backends, several at a time."""
    program, until = shutil.which("compute-sanitizer"), time.monotonic() + (seconds or float("inf"))
    if program is None:
        missing = dict.fromkeys(SANITIZERS, "not run: compute-sanitizer is not installed")
        return {pair: dict(missing) for pair in pairs}

    def check(job: tuple[tuple[str, str], str]) -> str:
        (op, backend), tool = job
        left = until - time.monotonic()
        if left < 1:
            return OUT_OF_TIME
        verify = [sys.executable, "-m", "moe_kernels", "verify", "--small", "--op", op, "--backend", backend]
        options = ["--tool", tool, "--error-exitcode", "9", *SANITIZER_OPTIONS.get(tool, ())]
        return run([program, *options, *verify], None if seconds is None else left, **SANITIZED)

    jobs = [(pair, tool) for pair in pairs for tool in SANITIZERS]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        words = list(pool.map(check, jobs))
    found: dict[tuple[str, str], dict[str, str]] = {}
    for (pair, tool), word in zip(jobs, words, strict=True):
        found.setdefault(pair, {})[tool] = word
    return found


# What a process of `compiled` does: the operation, dtype, device and size of its arguments.
COMPILES = """
import sys, torch
from moe_kernels import verify
op, dtype, device, size = sys.argv[1:]
row = verify.check(op, "triton", getattr(torch, dtype), device, small=size == "small")
sys.exit(f"{row.verdict}: {row.note}" if row.verdict == "FAILED" else 0)
"""


def compiled(ops: Iterable[str], small: bool, seconds: float = math.inf) -> dict[tuple[str, str], str]:
    """Fills Triton's cache with what verifying `ops` needs, every operation and dtype in a process of its own.

    1170 kernels at 0.3 to 1 s each: one after the other they outlast a lent GPU.
    """
    until = time.monotonic() + seconds
    places = {(op, dtype): placement(op, "triton", dtype).device for op in ops for dtype in DTYPES}

    def compiles(job: tuple[str, torch.dtype]) -> str:
        op, dtype = job
        left = until - time.monotonic()
        if left < 1:
            return OUT_OF_TIME
        words = [op, short(dtype), str(places[job]), "small" if small else "all"]
        return run([sys.executable, "-c", COMPILES, *words], None if left == math.inf else left)

    jobs = [job for job, device in places.items() if device is not None]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        found = list(pool.map(compiles, jobs))
    return {(op, short(dtype)): word for (op, dtype), word in zip(jobs, found, strict=True)}


def suite(seconds: float | None = None) -> dict[str, str]:
    """The whole test suite: with a GPU it runs the Triton and CUDA kernels there, not in an interpreter."""
    several = ["-n", str(max(1, (os.cpu_count() or 1) // 2))] if importlib.util.find_spec("xdist") else []
    return {"pytest": run([sys.executable, "-m", "pytest", "-q", "--no-header", *several], seconds)}


def run(command: Iterable[str], seconds: float | None = None, **variables: str) -> str:
    """A command's verdict, with its last line where it failed; variables: of its environment, beside this one's."""
    # In a session of its own: what it started itself, workers or a sanitizer's target, ends with it and leaves the GPU
    # to the figures.
    options: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, **variables}, "text": True, "errors": "replace"}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    with subprocess.Popen(list(command), **options) as done:
        try:
            text, _ = done.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return OUT_OF_TIME
        finally:
            if done.poll() is None:
                os.killpg(done.pid, signal.SIGKILL)
    if done.returncode == 0:
        return "ok"
    lines = text.strip().splitlines()
    return f"FAILED: status {done.returncode}: {lines[-1] if lines else ''}"


def _calls(row: Row) -> tuple[Inputs, Calls]:
    entry = ENTRIES[row.operation]
    shape = entry.complete(entry.shapes["quick"][0], row.device)
    inputs: Inputs = entry.inputs(shape, getattr(torch, row.dtype), row.device)
    return inputs, entry.kernel(row.backend)


def _bytes(output: object) -> list[Tensor]:
    """Outputs as bytes: a NaN is not equal to itself, its bits are."""
    return [each.contiguous().view(torch.uint8).clone() for each in tensors_of(output)]
