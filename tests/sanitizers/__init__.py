"""CPU kernels under the address and undefined-behaviour sanitizers, each call in its own process.

    with sanitizers.use("avx2"):
        y = mk.kwta(x, k, backend="cpu")

A sanitizer's report becomes the text of an exception. Races are not found here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
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
            try:
                done = subprocess.run(
                    [self._replay, str(call)],
                    capture_output=True,
                    text=True,
                    errors="replace",
                    env=os.environ | _SANITIZERS,
                    timeout=_TIMEOUT_SECONDS,
                )
            except subprocess.TimeoutExpired:
                return f"did not end within {_TIMEOUT_SECONDS} s"
            if done.returncode:
                signalled = f"killed by signal {-done.returncode}\n" if done.returncode < 0 else ""
                return signalled + done.stderr[:_REPORT_CHARACTERS].strip()
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
