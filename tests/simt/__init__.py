"""CUDA and CPU kernels under the address and undefined-behaviour sanitizers, each call in its own process.

    with simt.use():
        y = mk.kwta(x, k, backend="cuda")      # x is a CPU tensor

The host compiler compiles the .cu files; simt.h and simt.cpp run the CUDA threads on the CPU. A sanitizer's report
becomes the text of an exception. Races are not found here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from . import build as builder
from .build import CPU, KERNELS, PLANTED, Unit, unavailable
from .extents import merged

__all__ = ["CPU", "KERNELS", "PLANTED", "Launchers", "Module", "unavailable", "use", "use_cpu"]

_SANITIZERS = {
    "ASAN_OPTIONS": "detect_leaks=0:exitcode=66",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=66",
}
_REPORT_CHARACTERS = 6000
_TIMEOUT_SECONDS = 300


def _word(value: float, kind: str) -> int:
    if kind in "fd":
        return int.from_bytes(struct.pack(f"<{kind}", value), "little")
    return int(value) & 0xFFFFFFFFFFFFFFFF


class Launchers:
    """The launchers of a build (C++ functions that run kernels) as attributes. Arguments are ints (addresses, sizes, a
    stream) and floats.

    A call may access only tensors that were announced since the previous call, each from its first to its last element.
    """

    def __init__(self, signatures: str) -> None:
        self._types = dict(line.split(" ", 1) for line in signatures.splitlines())
        # Keeps the tensors alive until the call ends. The memory of a freed tensor could belong to another one.
        self._announced: list[torch.Tensor] = []

    def _run(self, name: str, words: list[int]) -> str | None:
        """Runs a call; returns the text of its error, or None."""
        raise NotImplementedError

    def announce(self, *tensors: torch.Tensor) -> None:
        self._announced += tensors

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in self._types:
            raise AttributeError(f"ops.h of this build lists no launcher {name}")
        return functools.partial(self._call, name, self._types[name])

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._types]

    def _call(self, name: str, types: str, *arguments: float) -> None:
        if len(arguments) != len(types):
            raise RuntimeError(f"{name}: {len(arguments)} arguments, {len(types)} expected")
        try:
            error = self._run(name, [_word(value, kind) for value, kind in zip(arguments, types, strict=True)])
        finally:
            self._announced.clear()
        if error:
            raise RuntimeError(f"{name}: {error}")


class Module(Launchers):
    """The launchers of one Unit (see build.py), under the sanitizers."""

    def __init__(self, unit: Unit = KERNELS) -> None:
        self._replay = builder.build(unit)
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


@contextlib.contextmanager
def replace_module(backend: Any, module: Launchers, **attributes: Any) -> Iterator[Any]:
    """Inside the block, `module` replaces backend.module, and `attributes` replace other attributes of the backend."""
    from moe_kernels.backends import _addresses, reconsider

    attributes["module"] = module
    saved = {name: getattr(backend, name) for name in attributes}
    saved_hook, _addresses.on_pointer = _addresses.on_pointer, module.announce
    for name, value in attributes.items():
        setattr(backend, name, value)
    reconsider()
    try:
        yield module
    finally:
        for name, value in saved.items():
            setattr(backend, name, value)
        _addresses.on_pointer = saved_hook
        reconsider()


@contextlib.contextmanager
def use() -> Iterator[Module]:
    """Inside the block, backend "cuda" takes CPU tensors and runs csrc/cuda under the sanitizers."""
    from moe_kernels.backends import cuda

    with replace_module(cuda, Module(), device_type="cpu") as module:
        yield module


class _SingleIsa(Module):
    """The CPU kernels of one instruction set. Drops the first two arguments of a call (the instruction set, and whether
    to release the GIL): they are for csrc/cpu/module.cpp, which this build does not contain."""

    def _call(self, name: str, types: str, *arguments: float) -> None:
        super()._call(name, types, *arguments[2:])


@contextlib.contextmanager
def use_cpu(isa: str) -> Iterator[Module]:
    """Inside the block, backend "cpu" runs the kernels of instruction set `isa` under the sanitizers."""
    from moe_kernels.backends import cpu

    with replace_module(cpu, _SingleIsa(CPU[isa])) as module:
        yield module
