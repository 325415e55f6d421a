"""Builds the executor with the host compiler; caches every object by the hash of its inputs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

# -ffp-contract=off: a product and a sum are two roundings unless the PTX has fma.
FLAGS = ["-std=c++20", "-O3", "-march=native", "-fPIC", "-Wall", "-Wextra"]
FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]


def cache_folder() -> Path:
    chosen = os.environ.get("MOE_KERNELS_CACHE")
    return Path(chosen) / "ptx" if chosen else ROOT / "build" / "ptx"


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


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++")


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
