"""Runs checks on ranks, which are processes of one machine, with gloo.

`Ranks` starts `python -m tests.helpers.ranks`. That process imports torch and forks the ranks. It has a single
thread, so that forks are safe. For each line "module check ranks arguments" it prints a JSON object: the errors of the
ranks that failed, by rank. Checks for the same number of ranks share their ranks, until a check fails; then new ranks
are forked. Each check of command.py gets new ranks.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


class Ranks:
    """run("exact", "random_shapes", 4) calls tests.helpers.ranks.exact.random_shapes() on 4 ranks."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-m", "tests.helpers.ranks"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, module: str, check: str, ranks: int, *arguments: object) -> None:
        """Raises AssertionError with the errors of failed ranks. Arguments are passed as str, without spaces."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(map(str, (module, check, ranks, *arguments))) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the process that starts ranks ended with status {self.process.wait()}"
        errors = json.loads(line)
        assert not errors, "\n".join(f"rank {rank}: {error}" for rank, error in errors.items())

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@functools.cache
def shared() -> Ranks:
    """The Ranks of all test files in this process."""
    ranks = Ranks()
    atexit.register(ranks.end)
    return ranks
