"""python -m tests.fuzz: see tests/fuzz/__init__.py."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz import command

CASE_SECONDS = 120.0  # time limit of a case, with its minimisation if it fails


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Compares random calls with the definitions."
    )
    parser.add_argument("--minutes", type=float, default=10, help="run time (10)")
    parser.add_argument("--cases", type=int, default=0, help="stop each process after that many cases; 0: no limit")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="number of processes (one per core)")
    parser.add_argument("--seed", type=int, help="seed of the cases; by default random")
    parser.add_argument("--op", action="append", default=[], help="only this operation; may be repeated")
    parser.add_argument("--operators", action="store_true", help="operators with wrong arguments; --op names one")
    parser.add_argument("--failures", type=int, default=20, help="stop a process after that many failures (20)")
    parser.add_argument("--interpreted", type=float, default=0, help="fraction of cases on Triton's interpreter (0)")
    parser.add_argument("--case", help="repeat this case, a JSON object")
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)  # only for a process of _Worker
    options = parser.parse_args()
    if options.case:
        return _repeat(json.loads(options.case))
    if options.state:
        return _work(options)
    if options.op and not options.operators:
        from tests.fuzz.operations import OPERATIONS

        if unknown := sorted(set(options.op) - set(OPERATIONS)):
            parser.error(f"--op must be one of {', '.join(OPERATIONS)}; got {', '.join(unknown)}")
    seed = random.SystemRandom().getrandbits(31) if options.seed is None else options.seed
    print(f"seed {seed}, {options.processes} processes, {options.minutes:g} minutes", flush=True)
    if options.operators:
        from tests.fuzz import operators

        return operators.run(options.minutes, options.processes, seed, options.failures, options.op)
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            _Worker(options, Path(folder) / f"{rank}", seed + 1000003 * rank) for rank in range(options.processes)
        ]
        while any(not worker.done() for worker in workers):
            time.sleep(0.5)
    cases: Counter[str] = sum((worker.cases for worker in workers), Counter())
    failures = sum(worker.failures for worker in workers)
    print(f"{cases.total()} cases, {failures} failures: {', '.join(f'{n} {op}' for op, n in sorted(cases.items()))}")
    return 1 if failures else 0


class _Worker:
    """A process that runs cases, and its successors: a process that crashes or exceeds a time limit is replaced."""

    def __init__(self, options: argparse.Namespace, state: Path, seed: int) -> None:
        self.options, self.state, self.seed = options, state, seed
        self.end = time.monotonic() + 60 * options.minutes
        self.cases, self.failures = Counter[str](), 0
        self._start()

    def _start(self) -> None:
        self.state.write_text("")
        given = {"state": self.state, "seed": self.seed, "minutes": max(self.end - time.monotonic(), 0) / 60}
        given |= {name: getattr(self.options, name) for name in ("cases", "interpreted")}
        words = [sys.executable, "-m", "tests.fuzz", "--failures", f"{self.options.failures - self.failures}"]
        words += [word for name, value in given.items() for word in (f"--{name}", f"{value}")]
        words += [word for op in self.options.op for word in ("--op", op)]
        environment = os.environ | ({"TRITON_INTERPRET": "1"} if self.options.interpreted else {})
        self.process = subprocess.Popen(words, env=environment)

    def done(self) -> bool:
        """Whether the worker is finished. Reports a case that crashed or is stuck, and starts another process."""
        state = self.state.stat()
        # The state file is empty until the first case starts. Until then the process imports torch, which can be slow.
        limit = CASE_SECONDS if state.st_size else 10 * CASE_SECONDS
        stuck = time.time() - state.st_mtime > limit
        if self.process.poll() is None and not stuck:
            return False
        self.process.kill()
        self.process.wait()
        left = json.loads(self.state.read_text() or "{}")
        self.cases += Counter(left.get("cases", {}))
        self.failures += left.get("failures", 0)
        if self.process.returncode == 0 and "case" not in left:
            return True
        self.failures += 1
        print(f"{'did not return' if stuck else f'ended the process with {self.process.returncode}'}:")
        print(f"  {command(left.get('case', {}))}", flush=True)
        self.seed += 7919
        if time.monotonic() > self.end or self.failures >= self.options.failures:
            return True
        self._start()
        return False


def _work(options: argparse.Namespace) -> int:
    """Runs cases. The state file holds the counts and, until the end, the current case."""
    from tests.fuzz.check import failure, names, report, set_up_process
    from tests.fuzz.operations import OPERATIONS, drawn

    set_up_process()
    draw, ops = random.Random(options.seed), options.op or list(OPERATIONS)
    kernels, cases, failures = names(), Counter[str](), 0
    end = time.monotonic() + 60 * options.minutes
    while time.monotonic() < end and failures < options.failures:
        interpreted = options.interpreted and draw.random() < options.interpreted
        spec = drawn(draw, ops, ["triton"] if interpreted else kernels)
        options.state.write_text(json.dumps({"case": spec, "cases": cases, "failures": failures}))
        cases[spec["op"]] += 1
        if failure(spec) is not None:
            failures += 1
            print(report(spec), flush=True)
        if options.cases and cases.total() >= options.cases:
            break
    options.state.write_text(json.dumps({"cases": cases, "failures": failures}))
    return 0


def _repeat(spec: dict[str, object]) -> int:
    from tests.fuzz import operators
    from tests.fuzz.check import failure, set_up_process

    set_up_process()
    found = operators.repeat(spec) if "operator" in spec else failure(spec)
    print(found or "correct")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
