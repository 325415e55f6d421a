"""Checks of kernels (values, repeated results, host waits, compute-sanitizer), and a run of the test suite.

The verdict of a check is "ok", or begins with "FAILED" or "not run".
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.ledger import ROOT
from bench.measure import tensors_of
from bench.registry import ENTRIES, Calls, Inputs
from bench.timing import host_sync_error
from moe_kernels.verify import Row, error_text

REPEATS = 20
SANITIZERS = ("memcheck", "racecheck", "synccheck")
OUT_OF_TIME = "not run: out of time"

# memcheck is told not to report failed calls of the CUDA API: libraries make some to probe the device.
SANITIZER_OPTIONS = {"memcheck": ("--report-api-errors", "no")}

# Every tensor gets an allocation of its own: memcheck sees no overrun within a block of torch's caching allocator.
SANITIZER_ENV = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

# Leaves out PyTorch's kernels in the namespace at::native, which the definitions launch.
WITHOUT_TORCH_KERNELS = ("--kernel-name-exclude", "kernel_substring=at6native")
PROBE_PROGRAM = "import torch; torch.zeros(1, device='cuda').sum().item()"

GPU_TESTS = "(triton or cuda) and not machine_code and not ahead_of_time and not test_build"
LOG_CHARACTERS = 200_000


def kernel_checks(row: Row) -> dict[str, str]:
    """Verdicts of `repeatable` and, on a GPU, of `no_host_sync`, by name of the check."""
    if row.verdict != "ok" or row.operation not in ENTRIES:
        return {}
    wanted = {"repeatable": repeatable} | ({"no host sync": no_host_sync} if row.device == "cuda" else {})
    found = {}
    for name, check in wanted.items():
        try:
            found[name] = check(row)
        except Exception as raised:
            found[name] = f"FAILED: {error_text(raised)}"
    return found


def repeatable(row: Row) -> str:
    """Checks that every direction gives the same bits in REPEATS runs."""
    inputs, calls = _calls(row)
    for direction, call in calls.items():
        first = _bytes(call(inputs))
        for _ in range(REPEATS - 1):
            if any(not torch.equal(a, b) for a, b in zip(first, _bytes(call(inputs)), strict=True)):
                return f"FAILED: {direction} differed within {REPEATS} runs"
    return "ok"


def no_host_sync(row: Row) -> str:
    """Checks that no direction makes the host wait for the GPU, except in the first call, which may compile."""
    inputs, calls = _calls(row)
    for direction, call in calls.items():
        error = host_sync_error(partial(call, inputs))
        if error:
            return f"FAILED: {direction}: {error}"
    return "ok"


def sanitizers(
    pairs: Iterable[tuple[str, str]], seconds: float | None = None, log: Path | None = None
) -> Iterator[tuple[tuple[str, str], dict[str, str]]]:
    """Verdicts of compute-sanitizer's tools on the small cases of (operation, backend) pairs, as they come.

    seconds: limit for all of them. log: file for the output of tools that fail or run out of time.
    """
    wanted, program = list(pairs), shutil.which("compute-sanitizer")
    until = float("inf") if seconds is None else time.monotonic() + seconds
    reason = sanitizer_problem(program, seconds)
    if reason:
        yield from ((pair, dict.fromkeys(SANITIZERS, f"not run: {reason}")) for pair in wanted)
        return

    def check(tool: str, op: str, backend: str) -> str:
        left = until - time.monotonic()
        if left < 1:
            return OUT_OF_TIME
        verify = [sys.executable, "-m", "moe_kernels", "verify", "--small", "--op", op, "--backend", backend]
        options = ["--tool", tool, "--error-exitcode", "9", *SANITIZER_OPTIONS.get(tool, ())]
        command = [program or "", *options, *WITHOUT_TORCH_KERNELS, *verify]
        return run(command, None if seconds is None else left, log, **SANITIZER_ENV)

    with ThreadPoolExecutor(max(1, cores() // 2)) as pool:
        # Tool by tool, so that a time limit leaves out the last tools, not the last kernels.
        jobs = {pool.submit(check, tool, *pair): (tool, pair) for tool in SANITIZERS for pair in wanted}
        for done in as_completed(jobs):
            tool, pair = jobs[done]
            yield pair, {tool: done.result()}


def sanitizer_problem(program: str | None, seconds: float | None = None) -> str:
    """The reason why compute-sanitizer cannot run here; empty if it can."""
    if program is None:
        return "compute-sanitizer is not installed"
    command = [program, "--error-exitcode", "9", sys.executable, "-c", PROBE_PROGRAM]
    tried = run(command, seconds, None, **SANITIZER_ENV)
    return "" if tried == "ok" else f"compute-sanitizer does not run here: {tried.removeprefix('FAILED: ')}"


def suite(seconds: float | None = None, log: Path | None = None) -> dict[str, str]:
    """Runs the test suite; with a limit in seconds, only the tests that GPU_TESTS selects. Returns {"pytest": verdict}.

    If the suite fails or runs out of time, its output goes into the log.
    """
    workers = ["-n", str(max(1, cores() // 2))] if importlib.util.find_spec("xdist") else []
    selection = ["-v", "-k", GPU_TESTS] if seconds is not None else ["-q"]
    command = [sys.executable, "-m", "pytest", "--no-header", "--color=no", *selection, *workers]
    status, text = run_captured(command, seconds)
    if status != 0:
        append_log(log, "pytest", text)
    result = verdict(status, text)
    if status is None:
        failed, passed = (len(re.findall(rf"^.*\b{word}\b", text, re.MULTILINE)) for word in ("FAILED", "PASSED"))
        result = f"FAILED: {failed} tests" if failed else OUT_OF_TIME
        result += f", {passed} passed before the time was out"
    return {"pytest": result}


def run(command: Iterable[str], seconds: float | None = None, log: Path | None = None, **variables: str) -> str:
    """Runs a command; returns a verdict, with the last line of output if it failed.

    variables: added to the environment. log: file for the output of a command that fails or runs out of time.
    """
    arguments = list(command)
    status, text = run_captured(arguments, seconds, **variables)
    if status != 0:
        append_log(log, " ".join(arguments), text)
    return verdict(status, text)


def verdict(status: int | None, text: str) -> str:
    if status is None:
        return OUT_OF_TIME
    if status == 0:
        return "ok"
    lines = text.strip().splitlines() or ["no output"]
    return f"FAILED: status {status}: {lines[-1]}"


def run_captured(command: Iterable[str], seconds: float | None = None, **variables: str) -> tuple[int | None, str]:
    """Runs a command; returns its status (None if it ran out of time) and its output."""
    # A session of its own lets killpg also end the command's child processes.
    options: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, **variables}, "start_new_session": True}
    with tempfile.TemporaryFile() as printed:
        with subprocess.Popen(list(command), stdout=printed, stderr=subprocess.STDOUT, **options) as done:
            try:
                status: int | None = done.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if done.poll() is None:
                    os.killpg(done.pid, signal.SIGKILL)
        printed.seek(0)
        return status, printed.read().decode(errors="replace")


def append_log(log: Path | None, title: str, text: str) -> None:
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write(f"==== {title}\n{text[-LOG_CHARACTERS:]}\n")


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _calls(row: Row) -> tuple[Inputs, Calls]:
    entry = ENTRIES[row.operation]
    shape = entry.complete(entry.shapes["quick"][0], row.device)
    inputs: Inputs = entry.inputs(shape, getattr(torch, row.dtype), row.device)
    return inputs, entry.kernel(row.backend)


def _bytes(output: object) -> list[Tensor]:
    """Copies of the outputs as bytes, so that NaNs with equal bits compare equal."""
    return [each.contiguous().view(torch.uint8).clone() for each in tensors_of(output)]
