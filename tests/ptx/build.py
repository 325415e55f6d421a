"""Builds the executor with the host compiler; caches every object by the hash of its inputs."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import shlex
from pathlib import Path

from tests.simt.build import build_once, compiler, digest, run

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

# -ffp-contract=off: a product and a sum are two roundings unless the PTX has fma.
FLAGS = ["-std=c++20", "-O3", "-march=native", "-fPIC", "-Wall", "-Wextra"]
FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]


def cache_folder() -> Path:
    chosen = os.environ.get("MOE_KERNELS_CACHE")
    return Path(chosen) / "ptx" if chosen else ROOT / "build" / "ptx"


def unavailable() -> str | None:
    """The reason why the executor cannot be built here, or None."""
    return None if compiler() else "no g++"


@functools.cache
def _machine(gxx: str) -> str:
    """The options that -march=native selects here, and the compiler's version."""
    return run([*shlex.split(gxx), "-march=native", "-Q", "--help=target", "--version"])


@functools.cache
def executor() -> Path:
    """Path of the shared library, built if needed."""
    gxx = compiler()
    if not gxx:
        raise RuntimeError("no g++")
    folder = HERE / "executor"
    headers = digest(*(each.read_text() for each in sorted(folder.glob("*.h"))), _machine(gxx), *FLAGS)
    sources = sorted(folder.glob("*.cpp"))
    objects = {each: f"{each.stem}-{digest(headers, each.read_text())}.o" for each in sources}
    cache, command = cache_folder(), [*shlex.split(gxx), *FLAGS, "-c"]

    def compile_one(source: Path) -> str:
        return str(build_once(cache / objects[source], lambda part: run([*command, str(source), "-o", part])))

    with concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        made = list(pool.map(compile_one, sources))
    library = cache / f"executor-{digest(*objects.values())}.so"
    return build_once(library, lambda part: run([*shlex.split(gxx), "-shared", *made, "-o", part]))
