"""Builds the CPU kernels with the sanitizers; caches every object by the hash of its inputs."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import platform
import subprocess
from pathlib import Path

from tests.ptx.build import ROOT, build_once, compiler, digest, run

HERE = Path(__file__).resolve().parent.relative_to(ROOT)
KERNELS = Path("csrc/cpu")
CALLS = Path("tests/ptx/call.cpp")

COMMON = ["-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing", "-ffp-contract=off"]
COMMON += ["-fopenmp", "-fno-trapping-math", "-fno-math-errno"]
SANITIZER_FLAGS = ["-O0", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


# Options of each instruction set, as in ISAS of setup.py, but without -mno-mmx for base.
MARCH = {
    "base": [],
    "avx2": ["-mno-mmx", "-march=x86-64-v3"],
    "avx512": ["-mno-mmx", "-march=x86-64-v4", "-mprefer-vector-width=512"],
}


def unavailable() -> str | None:
    """The reason why nothing can be built here, or None."""
    if not compiler():
        return "no g++"
    return None if (platform.system(), platform.machine()) == ("Linux", "x86_64") else "not x86-64 Linux"


def cache_folder() -> Path:
    chosen = os.environ.get("MOE_KERNELS_CACHE")
    return Path(chosen) / "sanitizers" if chosen else ROOT / "build" / "sanitizers"


@functools.cache
def _environment() -> str:
    """A digest of the compiler's version and of every header that the kernels may include."""
    version = subprocess.run([compiler() or "", "--version"], capture_output=True, text=True).stdout
    folders = (ROOT / "csrc" / "include", ROOT / KERNELS, ROOT / CALLS.parent)
    files = sorted({file for folder in folders for file in folder.rglob("*.h")})
    return digest(version, *(f"{file.relative_to(ROOT)}\n{file.read_text()}" for file in files))


def _object(source: Path, options: list[str]) -> str:
    key = digest(_environment(), options, source, (ROOT / source).read_text())
    command = [compiler() or "", *options, "-c", str(source), "-o"]
    return str(build_once(cache_folder() / "objects" / f"{source.stem}-{key}.o", lambda part: run([*command, part])))


@functools.cache
def build(isa: str) -> Path:
    """Path of the program with the kernels of one instruction set, call.cpp and replay.cpp."""
    kernels = (each.relative_to(ROOT) for each in (ROOT / KERNELS).glob("*.cpp"))
    sources = [*sorted(each for each in kernels if each.name != "module.cpp"), CALLS, HERE / "replay.cpp"]
    flags = [*COMMON, *SANITIZER_FLAGS, f"-DMOE_ISA={isa}", *MARCH[isa]]
    includes = [f"-I{each}" for each in (KERNELS, Path("csrc/include"), CALLS.parent)]
    with concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        objects = list(pool.map(lambda source: _object(source, [*flags, *includes]), sources))
    link = [compiler() or "", *flags, *objects]
    return build_once(cache_folder() / f"cpu-{isa}-{digest(*objects)}", lambda part: run([*link, "-o", part]))
