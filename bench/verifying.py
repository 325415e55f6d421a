"""Verifies GPU kernels in processes of their own, since a process cannot use a GPU after a fault there.

Every verdict is yielded as soon as it is known. A kernel that crashes or hangs is named, with the case, and the others
go on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import captured, checks
from bench.processes import Calls, Ended
from moe_kernels import verify
from moe_kernels.info import placement
from moe_kernels.verify import DTYPES, Row, dtype_name

PROCESS_SECONDS = 90.0  # limit of a process
HUNG_SECONDS = 30.0  # a case that takes longer hangs; those that compile most take about 10 s

# An operation's cases are shared among so many processes, each of which compiles up to 30 kernels of Triton, or 44 of
# kwta (`python -m moe_kernels compile` counts them); .7 to 2 s each.
PARTS = {"kwta": 6, "expert_mlp": 3, "expert_norms": 3, "grouped_gemm": 2, "topk_gate": 2, "sinkhorn": 2}

CASE, RESULT = "case ", "result: "  # begin the lines that a process prints for its cases and for its result


class Job(NamedTuple):
    """One process: part[0] of part[1] parts of a kernel's cases, or with part (0, 0) its `kernel_checks`."""

    op: str
    backend: str
    dtype: torch.dtype
    device: str
    part: tuple[int, int]

    @property
    def is_check(self) -> bool:
        return self.part == (0, 0)

    def __str__(self) -> str:
        part = "checks" if self.is_check else f"part {self.part[0] + 1} of {self.part[1]}"
        return f"{self.op} {self.backend} {dtype_name(self.dtype)}, {part}"

    def row(self, verdict: str, note: str, cases: int = 0) -> Row:
        error = math.inf if verdict == "FAILED" else 0.0
        return Row(self.op, self.backend, dtype_name(self.dtype), self.device, cases, error, 0.0, verdict, note)


Verdicts = tuple[Row, dict[str, str]]


def verify_all(
    ops: Iterable[str], backends: Iterable[str], small: bool, seconds: float = math.inf, log: Path | None = None
) -> Iterator[Verdicts]:
    """Verifies operations on backends in every dtype; yields each Row with its `kernel_checks` ({} if `small`).

    seconds: limit for all of them. log: file for the output of processes with a failure.
    """
    until = time.monotonic() + seconds
    jobs: list[Job] = []
    for backend in backends:
        for op in ops:
            for dtype in DTYPES:
                device, reason = placement(op, backend, dtype)
                if device is None:
                    yield Job(op, backend, dtype, "-", (0, 1)).row("not run", reason), {}
                else:
                    count = PARTS.get(op, 1)
                    parts = [(index, count) for index in range(count)] + [(0, 0)] * (not small)
                    jobs += [Job(op, backend, dtype, device, part) for part in parts]
    jobs.sort(key=lambda job: -PARTS.get(job.op, 1))  # the longest first
    missing = {key: [job for job in jobs if job[:3] == key] for key in dict.fromkeys(job[:3] for job in jobs)}
    done: dict[Job, Any] = {}
    for job, ended in _finished(jobs, partial(_call, small=small), until):
        done[job] = checks_of(ended) if job.is_check else row_of(job, ended)
        if _bad(done[job]):
            checks.append_log(log, str(job), ended.printed)
        of_kernel = missing[job[:3]]
        if all(each in done for each in of_kernel):
            row = verify.together([done[each] for each in of_kernel if not each.is_check])
            found = [done[each] for each in of_kernel if each.is_check]
            yield row, found[0] if found and row.verdict == "ok" else {}


def captured_steps(
    backends: Iterable[str], seconds: float = math.inf, log: Path | None = None
) -> Iterator[tuple[str, str]]:
    """The verdicts of bench/captured.py by name, as they come; arguments as of verify_all."""
    jobs = [(layer, backend, dtype) for backend in backends for layer, dtype in captured.checks()]

    def call(calls: Calls, job: tuple[str, str, str], seconds: float) -> Ended:
        return calls(check_captured, *job, seconds=seconds)

    for job, ended in _finished(jobs, call, time.monotonic() + seconds):
        name, found, why = f"captured step of {', '.join(job)}", result_of(ended), failure(ended)
        word = found or (f"FAILED: {why}" if why else checks.OUT_OF_TIME)
        if word.startswith("FAILED"):
            checks.append_log(log, name, ended.printed)
        yield name, word


def _call(calls: Calls, job: Job, seconds: float, small: bool) -> Ended:
    arguments = job.op, job.backend, dtype_name(job.dtype)
    if job.is_check:
        return calls(check_kernel, *arguments, seconds=seconds)
    return calls(verify_part, *arguments, job.device, small, job.part, seconds=seconds)


def _finished(
    jobs: Sequence[Any], call: Callable[[Calls, Any, float], Ended], until: float
) -> Iterator[tuple[Any, Ended]]:
    """Runs the jobs, one for each core at a time; yields each with how it ended. No job starts after `until`."""

    def run(job: Any) -> Ended:
        left = until - time.monotonic()
        return call(calls, job, min(left, PROCESS_SECONDS)) if left > 1 else Ended(None, "")

    with Calls() as calls, ThreadPoolExecutor(checks.cores()) as pool:
        running = {pool.submit(run, job): job for job in jobs}
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        finally:
            calls.__exit__()
            pool.shutdown(wait=False, cancel_futures=True)


def verify_part(op: str, backend: str, dtype: str, device: str, small: bool, part: tuple[int, int]) -> None:
    """In a process: verifies a part of the cases, prints a line as each begins, then the Row as JSON."""

    def begun(name: str) -> None:
        print(f"{CASE}{time.time():.1f} {name}")

    row = verify.check(op, backend, getattr(torch, dtype), device, small=small, part=part, begun=begun)
    print(RESULT + json.dumps(asdict(row)))


def check_kernel(op: str, backend: str, dtype: str) -> None:
    """In a process: prints the `kernel_checks` as JSON."""
    print(f"{CASE}{time.time():.1f} its checks")
    found = checks.kernel_checks(Row(op, backend, dtype, "cuda", 0, 0.0, 0.0, "ok", ""))
    print(RESULT + json.dumps(found))


def check_captured(layer: str, backend: str, dtype: str) -> None:
    """In a process: prints the verdict on a captured step as JSON."""
    print(f"{CASE}{time.time():.1f} the step")
    print(RESULT + json.dumps(captured.captured(layer, backend, dtype, capture=captured.cuda_graph)))


def result_of(ended: Ended) -> Any:
    """The result that a process printed before it ended as it should; else None."""
    lines = [line for line in ended.printed.splitlines() if line.startswith(RESULT)]
    return json.loads(lines[-1].removeprefix(RESULT)) if ended.status == 0 and lines else None


def row_of(job: Job, ended: Ended) -> Row:
    found = result_of(ended)
    if found is not None:
        return Row(**found)
    why = failure(ended)
    cases = max(len(_begun(ended)) - 1, 0)
    return job.row("FAILED", why) if why else job.row("not run", f"{checks.OUT_OF_TIME} after {cases} cases")


def checks_of(ended: Ended) -> dict[str, str]:
    found = result_of(ended)
    if found is not None:
        return found
    why = failure(ended)
    return dict.fromkeys(("repeatable", "no host sync"), f"FAILED: {why}" if why else checks.OUT_OF_TIME)


def failure(ended: Ended) -> str:
    """How a process without a result failed, and in which case; "" if only its time was over."""
    begun = _begun(ended)
    since, case = begun[-1].split(" ", 1) if begun else ("inf", "its start")
    if ended.status is None:
        hung = time.time() - float(since) > HUNG_SECONDS
        return f"{case} did not end within {HUNG_SECONDS:g} s" if hung else ""
    lines = ended.printed.strip().splitlines() or ["no output"]
    said = next((line for line in reversed(lines) if "rror" in line), lines[-1])
    return f"its process ended with status {ended.status} in {case}: {said}"


def _begun(ended: Ended) -> list[str]:
    return [line.removeprefix(CASE) for line in ended.printed.splitlines() if line.startswith(CASE)]


def _bad(found: Row | dict[str, str]) -> bool:
    if isinstance(found, Row):
        return found.verdict == "FAILED"
    return any(word.startswith("FAILED") for word in found.values())
