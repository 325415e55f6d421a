"""CPU kernels under the address and undefined-behaviour sanitizers, each call in a process that replay.cpp forks.

    with sanitizers.use("avx2"):
        y = mk.kwta(x, k, backend="cpu")

A sanitizer's report becomes the text of an exception. Races are not found here.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import signal
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.ptx.extents import merged
from tests.ptx.launchers import Launchers, replace_module

from .build import build, unavailable

__all__ = ["Module", "unavailable", "use"]

_SANITIZERS = {
    "ASAN_OPTIONS": "detect_leaks=0:exitcode=66",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=66",
}
_REPORT_CHARACTERS = 6000
_TIMEOUT_SECONDS = 300


@functools.cache
def _server(program: Path) -> subprocess.Popen[str]:
    """The program, which runs calls until its stdin is closed or this process ends."""
    command = [str(program), str(_TIMEOUT_SECONDS)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | _SANITIZERS
    )
    atexit.register(process.kill)
    return process


class Module(Launchers):
    """The launchers of csrc/cpu for one instruction set, under the sanitizers."""

    def __init__(self, isa: str) -> None:
        self._replay = build(isa)
        super().__init__(subprocess.run([self._replay], capture_output=True, text=True, check=True).stdout)

    def _run(self, name: str, words: list[int]) -> str | None:
        """Runs the call in another process on copies of the announced tensors. On success copies the results back."""
        extents = merged(self._announced)
        with tempfile.TemporaryDirectory() as folder:
            call = Path(folder) / "call"
            encoded = name.encode()
            with open(call, "wb") as file:
                file.write(struct.pack("<3Q", len(encoded), len(words), len(extents)) + encoded)
                file.write(struct.pack(f"<{len(words)}Q", *words))
                for start, size in extents:
                    file.write(struct.pack("<2Q", start, size) + ctypes.string_at(start, size))
            server = _server(self._replay)
            print(call, file=server.stdin, flush=True)
            line = server.stdout.readline()
            assert line, f"the process that runs calls ended with status {server.wait()}"
            status = int(line)
            if status == -signal.SIGALRM:
                return f"did not end within {_TIMEOUT_SECONDS} s"
            if status:
                ended = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
                report = call.with_suffix(".err").read_text(errors="replace")[:_REPORT_CHARACTERS].strip()
                return f"{ended}\n{report}" if status < 0 else report or ended
            after = call.read_bytes()
            at = 24 + len(encoded) + 8 * len(words)
            for start, size in extents:
                ctypes.memmove(start, after[at + 16 : at + 16 + size], size)
                at += 16 + size
        return None


class _WithoutIsa(Module):
    """Drops the first two arguments of a call (the instruction set, and whether to release the GIL): they are for
    csrc/cpu/module.cpp, which this build does not contain."""

    def _call(self, name: str, types: str, *arguments: float) -> None:
        super()._call(name, types, *arguments[2:])


@contextlib.contextmanager
def use(isa: str) -> Iterator[Module]:
    """Inside the block, backend "cpu" runs the kernels of instruction set `isa` under the sanitizers."""
    from moe_kernels.backends import cpu

    with replace_module(cpu, _WithoutIsa(isa)) as module:
        yield module
