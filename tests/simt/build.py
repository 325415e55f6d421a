"""Builds .cu files with the host compiler against the executor; every object is kept by the hash of what went in."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from . import toolkit

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent.relative_to(ROOT)

COMMON = [
    "-std=c++17",
    "-fPIC",
    "-DSIMT_HOST",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
]

# How the kernels are compiled, and what tells the executor (always compiled without sanitizers) about it.
KERNEL_FLAGS = {
    "fast": ["-O2"],
    "asan": ["-Og", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
EXECUTOR_FLAGS = {"fast": ["-O2"], "asan": ["-O2", "-DSIMT_ASAN"]}


@dataclasses.dataclass(frozen=True)
class Unit:
    """A folder of .cu files, or of the .cpp files of one instruction set, with the ops.h that lists their launchers."""

    folder: Path  # relative to the root
    isa: str = ""

    @property
    def name(self) -> str:
        return f"{self.folder.name}-{self.isa}" if self.isa else self.folder.name

    @property
    def flags(self) -> list[str]:
        if not self.isa:
            return []
        return [f"-DMOE_ISA={self.isa}", *MARCH[self.isa], "-fopenmp", "-fno-trapping-math", "-fno-math-errno"]

    def sources(self) -> list[Path]:
        found = (ROOT / self.folder).glob("*.cpp" if self.isa else "*.cu")
        return sorted(each.relative_to(ROOT) for each in found if each.name != "module.cpp")


# As setup.py has them.
MARCH = {
    "base": [],
    "avx2": ["-mno-mmx", "-march=x86-64-v3"],
    "avx512": ["-mno-mmx", "-march=x86-64-v4", "-mprefer-vector-width=512"],
}

KERNELS = Unit(Path("csrc/cuda"))
PLANTED = Unit(HERE / "planted")
CPU = {isa: Unit(Path("csrc/cpu"), isa) for isa in MARCH}


@dataclasses.dataclass(frozen=True)
class Product:
    library: Path | None  # for ctypes: not of sanitized builds, which must not enter a process that is not
    replay: Path | None  # not of the build for the GPU


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++")


def unavailable() -> str | None:
    """Why nothing can be built here, or None."""
    if not compiler():
        return "no g++"
    if platform.system() != "Linux":
        return "the executor runs on Linux"
    return toolkit.find().missing


def cache_folder() -> Path:
    chosen = os.environ.get("MOE_KERNELS_CACHE")
    return Path(chosen) / "simt" if chosen else ROOT / "build" / "simt"


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]


def run(command: list[str]) -> str:
    """What it prints."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


@functools.cache
def _headers_digest(*units: Unit) -> str:
    folders = [ROOT / "csrc" / "include", ROOT / HERE, *(ROOT / unit.folder for unit in units)]
    files = sorted({file for folder in folders for file in folder.rglob("*") if file.suffix in (".h", ".cuh")})
    return digest(*(f"{file.relative_to(ROOT)}\n{file.read_text()}" for file in files))


@functools.cache
def _environment() -> str:
    version = subprocess.run([compiler() or "", "--version"], capture_output=True, text=True).stdout
    cuda = [(each / "cuda_runtime_api.h").read_bytes()[:20000] for each in toolkit.find().include]
    return digest(version, *cuda)


def _object(source: Path, flags: list[str], *units: Unit) -> Path:
    """A file of the executor goes into the builds of all units, and is compiled once for them."""
    includes = [f"-I{each}" for each in (*(unit.folder for unit in units), Path("csrc/include"), HERE)]
    system = [flag for each in toolkit.find().include for flag in ("-isystem", str(each))]
    options = [*COMMON, *flags, *(flag for unit in units for flag in unit.flags), *includes]
    key = digest(_environment(), _headers_digest(*units), options, source, (ROOT / source).read_text())
    folder = cache_folder() / "objects"
    target = folder / f"{source.stem}-{key}.o"
    with lock(folder / f"{target.name}.lock"):
        if not target.exists():
            part = target.with_suffix(f".{os.getpid()}.part.o")
            run([compiler() or "", "-x", "c++", *options, *system, "-c", str(source), "-o", str(part)])
            part.rename(target)
    return target


def _build_for_gpu(unit: Unit) -> Product:
    """The same launchers as nvcc compiles them for the GPU at hand, to be called the same way."""
    kit = toolkit.find()
    if kit.nvcc is None:
        raise RuntimeError(kit.no_nvcc)
    major, minor = torch.cuda.get_device_capability()
    sources = [*unit.sources(), HERE / "call.cpp"]
    options = ["-std=c++17", "-O3", f"-arch=sm_{major}{minor}", "-shared", "-Xcompiler", "-fPIC"]
    options += [f"-I{each}" for each in (unit.folder, Path("csrc/include"), HERE)]
    texts = [(ROOT / each).read_text() for each in sources]
    key = digest(_environment(), _headers_digest(unit), *options, *texts)
    library = cache_folder() / f"{unit.folder.name}-cuda-{key}.so"
    with lock(library.with_suffix(".lock")):
        if not library.exists():
            part = library.with_suffix(".part")
            run([str(kit.nvcc), *options, *map(str, sources), "-o", str(part)])
            part.rename(library)
    return Product(library, None)


def build(unit: Unit, name: str) -> Product:
    """The library and the replay program of one build of one unit: "fast" or "asan"; or "cuda", for the GPU."""
    outcome = _outcome(unit, name)
    if isinstance(outcome, RuntimeError):
        raise outcome
    return outcome


@functools.cache
def _outcome(unit: Unit, name: str) -> Product | RuntimeError:
    """A build that fails is not tried again by every test."""
    try:
        return _build_for_gpu(unit) if name == "cuda" else _build_for_host(unit, name)
    except RuntimeError as error:
        return error


def _build_for_host(unit: Unit, name: str) -> Product:
    kernel, executor = KERNEL_FLAGS[name], EXECUTOR_FLAGS[name]
    jobs: list[tuple] = [(source, kernel, unit) for source in (*unit.sources(), HERE / "call.cpp")]
    jobs += [(HERE / "simt.cpp", executor), (HERE / "replay.cpp", kernel)]
    with concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        objects = list(pool.map(lambda job: _object(*job), jobs))

    folder = cache_folder() / f"{unit.name}-{name}-{digest(*(each.name for each in objects))}"
    product = Product(folder / "kernels.so" if name == "fast" else None, folder / "replay")
    with lock(folder.with_suffix(".lock")):
        if not folder.exists():
            part = Path(tempfile.mkdtemp(dir=folder.parent, prefix="part-"))
            link = [compiler() or "", *kernel, *unit.flags]
            run([*link, *map(str, objects), "-o", str(part / "replay")])
            if name == "fast":
                run([*link, "-shared", *map(str, objects[:-1]), "-o", str(part / "kernels.so")])
            part.rename(folder)
    return product
