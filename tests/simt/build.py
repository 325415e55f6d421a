"""Builds kernels with the host compiler and the sanitizers; caches every object by the hash of its inputs."""

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
from collections.abc import Callable, Iterator
from pathlib import Path

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

# For all code but simt.cpp.
SANITIZER_FLAGS = ["-Og", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@dataclasses.dataclass(frozen=True)
class Unit:
    """The .cu files of a folder, or its .cpp files without module.cpp, compiled for one instruction set. call.cpp calls
    the launchers that the folder's ops.h lists."""

    folder: Path  # relative to the root
    isa: str = ""  # instruction set of .cpp files; empty for .cu files

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


# Options of each instruction set, as in ISAS of setup.py, but without -mno-mmx for base.
MARCH = {
    "base": [],
    "avx2": ["-mno-mmx", "-march=x86-64-v3"],
    "avx512": ["-mno-mmx", "-march=x86-64-v4", "-mprefer-vector-width=512"],
}

KERNELS = Unit(Path("csrc/cuda"))
PLANTED = Unit(HERE / "planted")
CPU = {isa: Unit(Path("csrc/cpu"), isa) for isa in MARCH}


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++")


def unavailable() -> str | None:
    """The reason why nothing can be built here, or None."""
    if not compiler():
        return "no g++"
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "not x86-64 Linux"
    return toolkit.find().missing


def cache_folder() -> Path:
    chosen = os.environ.get("MOE_KERNELS_CACHE")
    return Path(chosen) / "simt" if chosen else ROOT / "build" / "simt"


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Only one process at a time is inside the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_once(target: Path, make: Callable[[str], object]) -> Path:
    """Returns `target`. If it does not exist, make(part) writes another file, which is then renamed to `target`. Two
    processes never do so at the same time."""
    with lock(target.with_suffix(".lock")):
        if not target.exists():
            part = target.with_suffix(f".{os.getpid()}.part{target.suffix}")
            make(str(part))
            part.rename(target)
    return target


def digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]


def run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


@functools.cache
def headers(unit: Unit) -> str:
    """A digest of every header of this repository that the unit's files may include."""
    folders = [ROOT / "csrc" / "include", ROOT / HERE, ROOT / unit.folder]
    files = sorted({file for folder in folders for file in folder.rglob("*") if file.suffix in (".h", ".cuh")})
    return digest(*(f"{file.relative_to(ROOT)}\n{file.read_text()}" for file in files))


@functools.cache
def _environment() -> str:
    version = subprocess.run([compiler() or "", "--version"], capture_output=True, text=True).stdout
    cuda = [(each / "cuda_runtime_api.h").read_bytes()[:20000] for each in toolkit.find().include]
    return digest(version, *cuda)


def _object(source: Path, flags: list[str], unit: Unit) -> Path:
    includes = [f"-I{each}" for each in (unit.folder, Path("csrc/include"), HERE)]
    system = [flag for each in toolkit.find().include for flag in ("-isystem", str(each))]
    options = [*COMMON, *flags, *unit.flags, *includes]
    key = digest(_environment(), headers(unit), options, source, (ROOT / source).read_text())
    command = [compiler() or "", "-x", "c++", *options, *system, "-c", str(source)]
    return build_once(cache_folder() / "objects" / f"{source.stem}-{key}.o", lambda part: run([*command, "-o", part]))


@functools.cache
def build(unit: Unit) -> Path:
    """Path of a unit's program, built from its sources, call.cpp, replay.cpp and, for .cu files, simt.cpp."""
    jobs = [(source, SANITIZER_FLAGS) for source in (*unit.sources(), HERE / "call.cpp", HERE / "replay.cpp")]
    if not unit.isa:
        jobs.append((HERE / "simt.cpp", ["-O2"]))
    with concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        objects = [str(each) for each in pool.map(lambda job: _object(*job, unit), jobs)]
    link = [compiler() or "", *SANITIZER_FLAGS, *unit.flags, *objects]
    return build_once(cache_folder() / f"{unit.name}-{digest(*objects)}", lambda part: run([*link, "-o", part]))
