"""A run of the bench: verifies kernels, measures those that are right, checks them further; keeps what is known.

The result is written whenever something is known: after each verdict, during the measuring, after each check. A run
that is cut off loses a few seconds.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import date, datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from bench import checks, ledger, measure, nvml, routing, summary, verifying
from bench.console import console, print_lines, print_table, progress
from bench.worker import Worker, WorkerLost
from moe_kernels import info
from moe_kernels.verify import KERNELS, OPERATIONS, Row, verify

WRITE_SECONDS = 5  # least time between two writes of a result while it is measured
CEILINGS_SECONDS = 60


class Run:
    """One run, with a file of its own in `out` that later runs do not overwrite.

    request: what is measured, with `seconds` of samples each. until: value of time.monotonic() at which it should end.
    """

    def __init__(self, out: Path, request: measure.Request, seconds: float, until: float = math.inf) -> None:
        self.request, self.seconds, self.until = request, seconds, until
        self.rows: dict[Row, dict[str, str]] = {}
        self.found = measure.Found()
        self.limits: measure.Ceilings = {}
        self.suite: dict[str, str] = {}
        self.sanitized: dict[tuple[str, str], dict[str, str]] = {}
        self.facts, self.loads = info.machine(), routing.loads()
        self.began = datetime.now(timezone.utc)
        self.path = ledger.free_path(out, info.device_name(self.facts), ".json")
        self.log = self.path.with_suffix(".failures.log")
        self._digest = cache(ledger.digest)
        self.write()

    @property
    def device(self) -> str:
        return "cuda" if self.facts["gpus"] else "cpu"

    def left(self, share: float = 1.0) -> float:
        """Seconds: this share of the time that is left."""
        return share * max(self.until - time.monotonic(), 0.0)

    def verify(self, ops: Sequence[str], backends: Sequence[str], small: bool = False, share: float = 1.0) -> None:
        """Verifies GPU kernels on a GPU in processes (`verifying`), others here. `small` concerns the former."""
        wanted, kernels = tuple(ops) or tuple(OPERATIONS), tuple(backends) or KERNELS
        on_gpu = [name for name in kernels if name in ledger.GPU_BACKENDS and self.device == "cuda"]
        on_cpu = [name for name in kernels if name not in on_gpu]
        with progress() as bar:
            task = bar.add_task("verifying", total=len(wanted))
            for row in verify(ops, on_cpu, small=False) if on_cpu else ():
                self.add(row, {})
                bar.update(task, completed=wanted.index(row.operation), description=f"verifying {row.operation}")
        if on_gpu:
            for row, words in verifying.verify_all(wanted, on_gpu, small, self.left(share), self.log):
                self.add(row, words)
                if row.verdict == "FAILED":
                    print_lines([summary.failure(row)])
        if on_gpu and not ops:
            for name, word in verifying.captured_steps(on_gpu, self.left(share / 2), self.log):
                self.suite[name] = word
                self.write()
        order = list(OPERATIONS)
        self.rows = dict(sorted(self.rows.items(), key=lambda item: order.index(item[0].operation)))
        print_lines(summary.verdicts(list(self.rows)))

    def add(self, row: Row, words: dict[str, str]) -> None:
        self.rows[row] = words
        self.write()

    def measure(self, share: float = 1.0) -> None:
        """Measures the kernels that are right; prints a summary."""
        until = time.monotonic() + self.left(share)
        jobs, self.found.left_out = measure.plan(list(self.rows), self.request)
        if until < math.inf:
            jobs = measure.round_robin(jobs)
        self.write()
        with Worker() if self.device == "cuda" else nullcontext() as worker, progress() as bar:
            try:
                ceilings = measure.ceilings
                self.limits = worker(ceilings, jobs, seconds=CEILINGS_SECONDS) if worker else ceilings(jobs)
            except (WorkerLost, RuntimeError) as error:
                self.found.left_out.append(f"nothing was measured: a copy or a product of torch failed: {error}")
                jobs = []
            written, task = time.monotonic(), bar.add_task("measuring", total=len(jobs))
            measured = measure.run(jobs, self.limits, self.seconds, self.request.peers, until, worker)
            for job, each in zip(jobs, measured, strict=True):
                self.found.add(each)
                bar.update(task, advance=1, description=str(job))
                if time.monotonic() > written + WRITE_SECONDS:
                    self.write()
                    written = time.monotonic()
        self.write()
        print_table("Ranges over shapes and dtypes", summary.HEADER, summary.rows(self.result()))
        print_lines(summary.missing(self.result()))

    def check_on_cpu(self) -> None:
        """Adds `checks.kernel_checks` of rows that ran on the CPU; those of GPU kernels come with their verdicts."""
        for row in self.rows:
            if row.device == "cpu":
                self.rows[row] = checks.kernel_checks(row)
        self.write()

    def prove(self, proof: bool) -> None:
        """On a GPU runs the test suite and compute-sanitizer if `proof`, else notes that they were not run."""
        pairs = sorted({(row.operation, row.backend) for row in self.rows if row.verdict == "ok" and on_gpu(row)})
        why = checks.OUT_OF_TIME if proof else "not run: --no-proof"
        self.suite |= {"pytest": why if self.device == "cuda" else "not run: no GPU"}
        self.sanitized = {pair: dict.fromkeys(checks.SANITIZERS, why) for pair in pairs}
        self.write()
        if not proof or self.device != "cuda":
            return
        self.suite |= checks.suite(self._limit(0.5), self.log)
        self.write()
        for pair, words in checks.sanitizers(pairs, self._limit(1.0), self.log):
            self.sanitized[pair] |= words
            self.write()

    def _limit(self, share: float) -> float | None:
        return None if self.until == math.inf else self.left(share)

    def result(self) -> ledger.Result:
        """The machine, and an entry for each row that ran, with its checks and figures."""
        entries = []
        for row, words in self.rows.items():
            if row.verdict == "not run":
                continue
            more = self.sanitized.get((row.operation, row.backend), {}) if on_gpu(row) else {}
            sources = self._digest(row.operation, row.backend)
            entry: dict[str, Any] = {**asdict(row), "sources": sources, "checks": {**words, **more}}
            entry |= {"figures": _of(row, self.found.figures), "curves": _of(row, self.found.curves)}
            failed = self.found.failed.get((row.operation, row.backend, row.dtype))
            entries.append(entry | ({"verdict": "FAILED", "note": failed} if failed else {}))
        return {
            "device": info.device_name(self.facts),
            "gpu": self.device == "cuda",
            "date": date.today().isoformat(),
            "started": self.began.isoformat(timespec="seconds"),
            "machine": self.facts,
            "ceilings": self.limits,
            "loads": self.loads,
            "not_measured": self.found.left_out + _without_sensors(self.device),
            "suite": self.suite,
            "entries": entries,
        }

    def write(self) -> None:
        ledger.write(self.result(), self.path)

    def print_checks(self) -> None:
        checked: list[tuple[Sequence[str], dict[str, str]]] = [
            ((row.operation, row.backend, row.dtype), words) for row, words in self.rows.items()
        ]
        checked += [((*pair, "all"), words) for pair, words in self.sanitized.items()]
        checked.append((("all",) * 3, self.suite))
        lines = [(*key, *item) for key, words in checked for item in words.items()]
        ran = [line for line in lines if not line[-1].startswith("not run")]
        if ran:
            print_table("Checks", ("operation", "backend", "dtype", "check", "verdict"), ran)
        skipped = Counter(line[3:] for line in lines if line not in ran)
        print_lines(f"{name}: {count} {word}" for (name, word), count in skipped.items())

    @property
    def failed(self) -> bool:
        wrong = not all(ledger.passed(entry) for entry in self.result()["entries"])
        return wrong or any(word.startswith("FAILED") for word in self.suite.values())

    def print_paths(self, more: Iterable[Path] = ()) -> None:
        for path in (self.path, *more, *([self.log] if self.log.exists() else [])):
            console.print(f"wrote {path}", soft_wrap=True)


def on_gpu(row: Row) -> bool:
    return row.device == "cuda"


def _of(row: Row, figures: list[measure.Figure]) -> list[measure.Figure]:
    key = (row.operation, row.backend, row.dtype)
    return [each for each in figures if (each["op"], each["backend"], each["dtype"]) == key]


@cache
def _without_sensors(device: str) -> list[str]:
    why = nvml.missing() if device == "cuda" else "no GPU"
    return [f"clocks, power and energy: {why}"] if why else []
