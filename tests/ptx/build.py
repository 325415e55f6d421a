"""Builds the executor with the host compiler; kept by the hash of what went in, as tests/simt does it."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import shlex
import subprocess
from pathlib import Path

from simt.build import compiler, digest, lock

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

# A product and a sum are two roundings unless the PTX says fma.
FLAGS = ["-std=c++20", "-O3", "-march=native", "-fPIC", "-Wall", "-Wextra"]
FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]


def cache_folder() -> Path:
    chosen = os.environ.get("MOE_KERNELS_CACHE")
    return Path(chosen) / "ptx" if chosen else ROOT / "build" / "ptx"


def unavailable() -> str | None:
    """Why the executor cannot be built here, or None."""
    return None if compiler() else "no g++"


def run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


@functools.cache
def _machine(gxx: str) -> str:
    """What -march=native means here, and the compiler's version."""
    return run([*shlex.split(gxx), "-march=native", "-Q", "--help=target", "--version"])


@functools.cache
def executor() -> Path:
    """The shared library."""
    gxx = compiler()
    if not gxx:
        raise RuntimeError("no g++")
    folder = HERE / "executor"
    headers = digest(*(each.read_text() for each in sorted(folder.glob("*.h"))), _machine(gxx), *FLAGS)
    sources = sorted(folder.glob("*.cpp"))
    objects = {each: f"{each.stem}-{digest(headers, each.read_text())}.o" for each in sources}
    cache = cache_folder()
    library = cache / f"executor-{digest(*objects.values())}.so"
    with lock(library.with_suffix(".lock")):
        if library.exists():
            return library

        def compile_one(source: Path) -> str:
            target = cache / objects[source]
            if not target.exists():
                part = target.with_suffix(f".{os.getpid()}.o")
                run([*shlex.split(gxx), *FLAGS, "-c", str(source), "-o", str(part)])
                part.rename(target)
            return str(target)

        with concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
            made = list(pool.map(compile_one, sources))
        part = library.with_suffix(f".{os.getpid()}.part")
        run([*shlex.split(gxx), "-shared", *made, "-o", str(part)])
        part.rename(library)
    return library
