"""CUDA without a GPU: nvcc compiles csrc/cuda. The host code runs unchanged with cudart.cpp in place of libcudart, and
every launch executes the kernel's PTX on the CPU."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import machine, toolkit
from .build import HERE, ROOT, build_once, cache_folder, compiler, digest, lock, run
from .decode import Kernel, demangled
from .launchers import Launchers, replace_module
from .machine import PtxError, extents
from .session import launch, seed, session
from .text import entry_names

ARCHITECTURE = "compute_80"
# NVCCFLAGS of setup.py; tests/repo/test_build.py compares them.
PRODUCT = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
KERNELS = Path("csrc/cuda")


def unavailable() -> str | None:
    """The reason why nvcc is not usable here, or None."""
    return toolkit.find().no_nvcc


@dataclass(frozen=True)
class Compiled:
    library: Path
    objects: dict[str, Path]  # file name of a .cu source -> its host object
    modules: dict[str, Path]  # file name of a .cu source -> its PTX


@functools.cache
def _headers() -> str:
    """A digest of every header of this repository that the sources may include."""
    folders = (ROOT / "csrc" / "include", ROOT / KERNELS)
    files = sorted(each for folder in folders for each in folder.rglob("*") if each.suffix in (".h", ".cuh"))
    return digest(*(f"{each.relative_to(ROOT)}\n{each.read_text()}" for each in (*files, HERE / "call.h")))


def build(source: Path) -> Path:
    """Path of a source's host object. For a .cu file its PTX (.ptx) and nvcc's output (.warnings) are beside it."""
    nvcc = str(toolkit.find().nvcc)
    device = source.suffix == ".cu"
    options = [*(PRODUCT if device else ["-O3", "-std=c++17", "-Xcompiler", "-fPIC"]), "-lineinfo"]
    options += [f"-I{each}" for each in (KERNELS, Path("csrc/include"))]
    options += ["-gencode", f"arch={ARCHITECTURE},code={ARCHITECTURE}"]
    text = (ROOT / source).read_text()
    key = digest(nvcc, Path(nvcc).stat().st_mtime, _headers(), os.environ.get("CXX", ""), options, source, text)
    folder = cache_folder() / "cuda"
    target = folder / f"{source.stem}-{key}.o"
    with lock(target.with_suffix(".lock")):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                part = Path(temporary) / f"{source.stem}.o"
                keep = ["--keep", "--keep-dir", temporary] if device else []
                output = run([nvcc, *options, *keep, "-c", str(source), "-o", str(part)])
                if device:
                    (Path(temporary) / f"{source.stem}.ptx").rename(target.with_suffix(".ptx"))
                    target.with_suffix(".warnings").write_text(output)
                part.rename(target)
    return target


@functools.cache
def compiled() -> Compiled:
    sources = sorted(each.relative_to(ROOT) for each in (ROOT / KERNELS).glob("*.cu"))
    sources += [HERE.relative_to(ROOT) / name for name in ("call.cpp", "cudart.cpp")]
    with concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        made = list(pool.map(build, sources))
    objects = [str(each) for each in made]
    library = cache_folder() / "cuda" / f"cuda-{digest(*objects)}.so"
    # -Bsymbolic binds calls of cudart's functions to cudart.cpp: they must not go to a loaded libcudart.
    link = [*(compiler() or "").split(), "-shared", "-Wl,-Bsymbolic", *objects]
    build_once(library, lambda part: run([*link, "-o", part]))
    of_source = {source.name: made for source, made in zip(sources, made, strict=True) if source.suffix == ".cu"}
    return Compiled(library, of_source, {name: each.with_suffix(".ptx") for name, each in of_source.items()})


@functools.cache
def texts() -> dict[str, str]:
    """Name of a kernel -> the PTX of its module."""
    found: dict[str, str] = {}
    for path in compiled().modules.values():
        text = path.read_text()
        found |= dict.fromkeys(entry_names(text), text)
    return found


@functools.lru_cache(maxsize=4096)
def kernel_of(name: str) -> Kernel:
    return machine.kernel(texts()[name], name)


@functools.lru_cache(maxsize=256)
def edited(text: str, name: str) -> Kernel:
    return machine.kernel(text, name, keep=False)


_CALL = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_size_t,
)
LAUNCH_FAILURE = 719  # cudaErrorLaunchFailure


class Module(Launchers):
    """The launchers of csrc/cuda (C++ functions that run a kernel); each launch executes the kernel's PTX."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(compiled().library))
        self._library.moe_signatures.restype = ctypes.c_char_p
        self._library.moe_call.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
        self._error: PtxError | None = None
        self.properties = (machine.SHARED_LIMIT, 108, 8, 0)
        self._callback = _CALL(self._launched)
        super().__init__(self._library.moe_signatures().decode())

    def _run(self, name: str, words: list[int]) -> str | None:
        self._library.ptx_callback(self._callback)
        self._error = None
        status = self._library.moe_call(name.encode(), (ctypes.c_uint64 * len(words))(*words))
        if self._error is not None:
            raise self._error
        return f"CUDA error {status}" if status else None

    def _launched(self, name: bytes, grid: Any, block: Any, arguments: Any, shared: int) -> int:
        try:
            self._execute(name.decode(), tuple(grid[:3]), tuple(block[:3]), arguments, shared)
        except BaseException as error:  # an exception cannot pass through the C++ caller, so `_run` raises it
            self._error = error if isinstance(error, PtxError) else PtxError(f"{type(error).__name__}: {error}")
            return LAUNCH_FAILURE
        return 0

    def _execute(self, name: str, grid: tuple, block: tuple, arguments: Any, dynamic: int) -> None:
        kernel = kernel_of(name)
        if session.edit is not None:
            kernel = edited(session.edit(texts()[name]), name)
        packed = bytearray(kernel.parameter_bytes)
        for index, (offset, size) in enumerate(kernel.parameters):
            packed[offset : offset + size] = ctypes.string_at(arguments[index], size)
        shared, most = kernel.static_shared + dynamic, self.properties[0]
        if shared > most:
            raise PtxError(f"{kernel.name}: {shared} bytes of shared memory, static and dynamic; a block has {most}")
        launch("cuda", kernel, grid, block, shared, bytes(packed), extents(self._announced))

    def set_device(self, *properties: int) -> None:
        """Sets the properties of the GPU that launches see, in the order of the parameters of `device`."""
        self.properties = properties
        self._library.ptx_device(*properties)


@functools.cache
def module() -> Module:
    return Module()


@contextlib.contextmanager
def use(order: int | None = None) -> Iterator[Module]:
    """Inside the block, backend "cuda" takes CPU tensors. `order` seeds the order of execution (session.seed)."""
    from moe_kernels.backends import cuda

    ordered = contextlib.nullcontext() if order is None else seed(order, errors=0)
    with replace_module(cuda, module(), device_type="cpu") as found, ordered:
        yield found


@contextlib.contextmanager
def device(shared: int, multiprocessors: int = 108, major: int = 8, minor: int = 0) -> Iterator[None]:
    """Inside the block, launches see a GPU with these properties. shared: most bytes of shared memory in a block."""
    before = module().properties
    module().set_device(shared, multiprocessors, major, minor)
    try:
        yield
    finally:
        module().set_device(*before)


__all__ = ["Module", "demangled", "device", "module", "unavailable", "use"]
