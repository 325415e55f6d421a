"""CUDA kernels on the host: the .cu files compiled with g++ and run on CPU tensors by a small executor.

    with simt.use("asan", seed=3):
        y = mk.kwta(x, k, backend="cuda")      # x is a CPU tensor

Builds: "fast" is loaded into this process; "asan" (address and undefined-behaviour sanitizers) replays each call in a
process of its own, whose report becomes the exception's text. Races are found in PTX (tests/ptx).
"cuda" is the same table of launchers compiled by nvcc, for tensors of the GPU at hand.
Seeds: 0 runs threads in order, 1 in reverse, even ones pick at random, odd ones give each warp a random priority.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from . import build as builder
from .build import CPU, KERNELS, PLANTED, Product, Unit, unavailable

__all__ = ["CPU", "KERNELS", "PLANTED", "Module", "unavailable", "use", "use_cpu"]

_SANITIZERS = {
    "ASAN_OPTIONS": "detect_leaks=0:exitcode=66",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=66",
}
_REPORT_CHARACTERS = 6000
_TIMEOUT_SECONDS = 300
_one_call = threading.Lock()  # the executor keeps its state in globals


@functools.cache
def _signatures(product: Product) -> dict[str, str]:
    if product.replay is None:
        text = _library(product.library).moe_signatures().decode()
    else:
        text = subprocess.run([product.replay], capture_output=True, text=True, check=True).stdout
    return dict(line.split(" ", 1) for line in text.splitlines())


@functools.cache
def _library(path: Path | None) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.moe_signatures.restype = ctypes.c_char_p
    library.moe_call.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
    return library


def _word(value: float, kind: str) -> int:
    if kind in "fd":
        return int.from_bytes(struct.pack(f"<{kind}", value), "little")
    return int(value) & 0xFFFFFFFFFFFFFFFF


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and size of what a tensor's elements span: of a view, not of its whole storage."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def _merged(extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Extents that share bytes become one: x and a view of x are one buffer."""
    merged: list[tuple[int, int]] = []
    for start, size in sorted(set(extents)):
        if merged and start < sum(merged[-1]):
            first = merged[-1][0]
            merged[-1] = (first, max(sum(merged[-1]), start + size) - first)
        elif size:
            merged.append((start, size))
    return merged


def _replay(product: Product, name: str, seed: int, words: list[int], extents: list[tuple[int, int]]) -> str | None:
    """Carries a call out in a process of its own, on copies of the buffers; its error text, if any."""
    assert product.replay is not None, "the build for the GPU has no replay program"
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call"
        encoded = name.encode()
        with open(call, "wb") as file:
            file.write(struct.pack("<4Q", seed, len(encoded), len(words), len(extents)) + encoded)
            file.write(struct.pack(f"<{len(words)}Q", *words))
            for start, size in extents:
                file.write(struct.pack("<2Q", start, size) + ctypes.string_at(start, size))
        try:
            done = subprocess.run(
                [product.replay, str(call)],
                capture_output=True,
                text=True,
                errors="replace",
                env=os.environ | _SANITIZERS,
                timeout=_TIMEOUT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"no end after {_TIMEOUT_SECONDS} s"
        if done.returncode:
            died = f"killed by signal {-done.returncode}\n" if done.returncode < 0 else ""
            return died + done.stderr[:_REPORT_CHARACTERS].strip()
        after = call.read_bytes()
        at = 32 + len(encoded) + 8 * len(words)
        for start, size in extents:
            ctypes.memmove(start, after[at + 16 : at + 16 + size], size)
            at += 16 + size
    return None


class Module:
    """The launchers of one build as attributes, called with ints (addresses, sizes, a stream) and floats.

    With `isolated` (always so under the sanitizers) a call runs in a process of its own and sees only the tensors that
    were announced by `buffers` or `announce`, to the byte.
    """

    def __init__(self, build: str = "fast", seed: int = 0, *, isolated: bool = False, unit: Unit = KERNELS) -> None:
        self._product = builder.build(unit, build)
        self._isolated = isolated or build == "asan"
        self._seed = seed
        # Held until the call: memory that is given back and used again meanwhile would be written over after it.
        self._announced: list[torch.Tensor] = []

    def announce(self, tensor: torch.Tensor) -> None:
        """Makes a tensor's memory known to the next call."""
        self._announced.append(tensor)

    @contextlib.contextmanager
    def buffers(self, *tensors: torch.Tensor) -> Iterator[Module]:
        """The calls inside may touch these tensors and nothing else."""
        kept = self._announced
        self._announced = list(tensors)
        try:
            yield self
        finally:
            self._announced = kept

    def __getattr__(self, name: str) -> Callable[..., None]:
        types = _signatures(self._product).get(name)
        if types is None:
            raise AttributeError(f"csrc/cuda lists no launcher {name}")
        return functools.partial(self._call, name, types)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_signatures(self._product)]

    def _call(self, name: str, types: str, *arguments: float) -> None:
        if len(arguments) != len(types):
            raise RuntimeError(f"{name}: {len(arguments)} arguments, {len(types)} expected")
        words = [_word(value, kind) for value, kind in zip(arguments, types, strict=True)]
        if self._isolated:
            error = _replay(
                self._product, name, self._seed, words, _merged([_extent(each) for each in self._announced])
            )
        else:
            error = self._call_here(name, words)
        if error:
            raise RuntimeError(f"{name}: {error}")

    def _call_here(self, name: str, words: list[int]) -> str | None:
        library = _library(self._product.library)
        message = ctypes.create_string_buffer(4096)
        with _one_call:
            library.simt_seed(self._seed)
            failed = library.moe_call(
                name.encode(), (ctypes.c_uint64 * len(words))(*words), len(words), message, len(message)
            )
        return message.value.decode(errors="replace") if failed else None


class _Announced:
    """A module whose calls forget the announced buffers afterwards: what the backend's adaptor works with."""

    def __init__(self, module: Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        launcher = getattr(self._module, name)

        def call(*arguments: float) -> None:
            try:
                launcher(*arguments)
            finally:
                self._module._announced.clear()

        return call


@contextlib.contextmanager
def _replaced(backend: Any, module: Module, **attributes: Any) -> Iterator[Module]:
    """The backend's compiled module is `module`, and its attributes are these, inside the block."""
    from moe_kernels.backends import _native, reconsider

    attributes["module"] = _Announced(module)
    saved = {name: getattr(backend, name) for name in attributes}
    saved_hook, _native.on_pointer = _native.on_pointer, module.announce
    for name, value in attributes.items():
        setattr(backend, name, value)
    reconsider()
    try:
        yield module
    finally:
        for name, value in saved.items():
            setattr(backend, name, value)
        _native.on_pointer = saved_hook
        reconsider()


@contextlib.contextmanager
def use(build: str, seed: int = 0) -> Iterator[Module]:
    """Lets backend "cuda" run on CPU tensors, through the executor, inside the block."""
    from moe_kernels.backends import cuda

    with _replaced(cuda, Module(build, seed), device_type="cpu") as module:
        yield module


class _OfOneIsa(Module):
    """The CPU kernels of one instruction set: no index picks one among several, and there is no GIL to release."""

    def _call(self, name: str, types: str, *arguments: float) -> None:
        super()._call(name, types, *arguments[2:])


@contextlib.contextmanager
def use_cpu(isa: str, build: str = "asan") -> Iterator[Module]:
    """Backend "cpu" runs that instruction set's kernels under the sanitizers, inside the block."""
    from moe_kernels.backends import cpu

    with _replaced(cpu, _OfOneIsa(build, unit=CPU[isa])) as module:
        yield module
