"""Finds headers and nvcc in a CUDA toolkit on PATH or in the nvidia-* wheels, other tools on PATH or in Triton."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Toolkit:
    """Paths of the headers and tools. missing: why the headers were not found, or None; no_nvcc and no_cuobjdump: the
    same for nvcc and cuobjdump."""

    include: tuple[Path, ...] = ()
    nvcc: Path | None = None
    cuobjdump: Path | None = None
    nvdisasm: Path | None = None
    missing: str | None = None
    no_nvcc: str | None = None
    no_cuobjdump: str | None = None


def _package_folder(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _wheel_roots() -> list[Path]:
    """The folders in which the nvidia-* wheels may have a toolkit, such as site-packages/nvidia/cu13."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(each) for each in (spec.submodule_search_locations or ())] if spec else []
    return [root for folder in folders for root in sorted(folder.glob("cu*"), reverse=True) if root.is_dir()]


def _nvcc_root(nvcc: str) -> Path | None:
    """The toolkit's folder as nvcc --dryrun reports it: nvcc may be a link or a script in another folder."""
    dry = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null"], capture_output=True, text=True)
    found = re.search(r"^#\$ TOP=(.*)$", dry.stderr, re.MULTILINE)
    return Path(found[1].strip()).resolve() if found else None


def _tool(name: str) -> Path | None:
    on_path = shutil.which(name)
    if on_path:
        return Path(on_path)
    triton = _package_folder("triton")
    bundled = triton / "backends" / "nvidia" / "bin" / name if triton else None
    return bundled if bundled and bundled.exists() else None


@functools.cache
def find() -> Toolkit:
    candidates = []  # (toolkit root, nvcc)
    on_path = shutil.which("nvcc")
    if on_path and (root := _nvcc_root(on_path)):
        candidates.append((root, Path(on_path)))
    candidates += [(root, root / "bin" / "nvcc") for root in _wheel_roots()]
    cuobjdump, nvdisasm = _tool("cuobjdump"), _tool("nvdisasm")
    no_cuobjdump = None if cuobjdump else "no cuobjdump on PATH and no triton package that contains one"

    needed = ("cuda_bf16.h", "vector_functions.h", "crt/host_defines.h", "nv/target")
    for root, nvcc in candidates:
        include = root / "include"
        if all((include / each).exists() for each in needed):
            complete = nvcc.exists() and (root / "nvvm" / "bin" / "cicc").exists()
            return Toolkit(
                include=(include,),
                nvcc=nvcc if complete else None,
                cuobjdump=cuobjdump,
                nvdisasm=nvdisasm,
                no_nvcc=None if complete else f"{root} lacks nvcc or cicc, which nvcc calls",
                no_cuobjdump=no_cuobjdump,
            )
    wheels = "nvidia-cuda-{runtime,crt,cccl}"
    reason = f"no CUDA headers: neither an nvcc on PATH nor the wheels {wheels} have all of {', '.join(needed)}"
    return Toolkit(missing=reason, no_nvcc=reason, no_cuobjdump=no_cuobjdump, cuobjdump=cuobjdump, nvdisasm=nvdisasm)
