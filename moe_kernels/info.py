"""Describes this machine, the extension modules, and which backend can run which operation."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import pkgutil
import platform
import re
import textwrap
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_kernels import backends, ops
from moe_kernels._version import __version__
from moe_kernels.backends import _gpu

WIDTH = 100  # columns of the text of `describe`


class Placement(NamedTuple):
    """The device type on which a backend can run an operation, or None and the reason why it cannot."""

    device: str | None
    reason: str


def machine() -> dict[str, Any]:
    """CPU, GPUs, driver and versions of this machine, as plain data for reports."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "isa": instruction_set(),
        "gpus": gpus(),
        "driver": driver(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "moe_kernels": __version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def device_name(facts: dict[str, Any]) -> str:
    """The name of a machine in results: that of its first GPU, else of its CPU."""
    return facts["gpus"][0]["name"] if facts["gpus"] else facts["cpu"]


def cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def instruction_set() -> str:
    """The instruction set that the CPU kernels use, or "none: " and the reason why there are no kernels."""
    try:
        from moe_kernels.backends import cpu
    except ImportError as error:
        return f"none: {error}"
    return cpu.module.isas[cpu.isa]


def gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "l2_mib": round(getattr(properties, "L2_cache_size", 0) / 2**20),
            }
        )
    return found


def driver() -> str:
    """Version of the NVIDIA kernel driver; "none" without its file in /proc, "unknown" if the file has no version."""
    try:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return "none"
    return found.group() if found else "unknown"


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def extensions() -> list[tuple[str, str]]:
    """(name, text) of the extension modules: the instruction set of _cpu, CUDA versions of _cuda, or import errors."""
    rows = [("_cpu", instruction_set())]
    try:
        _cuda: Any = import_module("moe_kernels._cuda")  # unlike `from ... import`, its error names no path
    except ImportError as error:
        return [*rows, ("_cuda", f"not built: {error}")]
    offered = _cuda.driver_version()
    driver_text = f"driver offers CUDA {_gpu.version(offered)}" if offered else "no driver"
    built = f"built with CUDA {_gpu.version(_cuda.runtime_version)} for {_cuda.architectures}"
    return [*rows, ("_cuda", f"{built}; {driver_text}")]


def operations() -> list[str]:
    files = {module.name for module in pkgutil.iter_modules(ops.__path__) if not module.name.startswith("_")}
    return sorted((files - backends.ALIASES.keys()) | backends.FILES.keys())


def placement(op: str, backend: str, dtype: torch.dtype = torch.float32) -> Placement:
    """The device type on which `backend` runs `op` in `dtype` here, cuda before cpu, or the reason why it cannot."""
    reason = ""
    for device in ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]:
        problem = backends.unsupported(backend, op, device, dtype)
        if problem is None:
            return Placement(device, "")
        reason = reason or problem
    return Placement(None, reason)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns with two spaces between them. Where they need more than WIDTH characters, the header's cells wrap, and
    columns that still do not fit follow in further tables, each with the first column."""
    names, *lines = ([str(cell) for cell in row] for row in [header, *rows])
    inside = [max((len(row[i]) for row in lines), default=1) for i in range(len(names))]
    widths = [max(len(name), width) for name, width in zip(names, inside, strict=True)]
    if _total(widths) > WIDTH:
        widths = [max([width, *map(len, name.split())]) for name, width in zip(names, inside, strict=True)]
    parts = [[0]]
    for column in range(1, len(names)):
        if len(parts[-1]) > 1 and _total([widths[i] for i in (*parts[-1], column)]) > WIDTH:
            parts.append([0])
        parts[-1].append(column)
    shown = []
    for part in parts:
        of_part = [[row[i] for i in part] for row in (names, *lines)]
        shown.append(_columns([widths[i] for i in part], *of_part))
    return "\n\n".join(shown)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _columns(widths: Sequence[int], names: Sequence[str], *lines: Sequence[str]) -> str:
    wrapped = [textwrap.wrap(name, width) for name, width in zip(names, widths, strict=True)]
    shown: list[Sequence[str]] = [*itertools.zip_longest(*wrapped, fillvalue="")] or [names]
    shown += [["-" * width for width in widths], *lines]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in shown)


def describe() -> str:
    """The text of `python -m moe_kernels info`."""
    facts = machine()
    gpu_lines = [
        (
            "GPU",
            f"{gpu['name']}, {gpu['memory_gib']} GiB, capability {gpu['capability']}, L2 {gpu['l2_mib']} MiB",
        )
        for gpu in facts["gpus"]
    ]
    lines = [
        ("CPU", f"{facts['cpu']}, {facts['cores']} cores, kernels use {facts['isa']}"),
        *(gpu_lines or [("GPU", "none that torch can use")]),
        ("driver", facts["driver"]),
        *((name, facts[name]) for name in ("python", "torch", "triton", "moe_kernels", "system")),
        *extensions(),
    ]
    described = "\n".join(_wrapped(f"{name:<12} {text}", 13) for name, text in lines)
    # The C++ backend has every operation that has kernels.
    alone = [op for op in operations() if backends.missing("cpu", op) == f"cpu does not implement {op}"]
    rows, reasons = [], {"a definition alone, without kernels": alone} if alone else dict[str, list[str]]()
    for op in operations():
        found = {name: placement(op, name) for name in backends.NAMES}
        rows.append((op, *(each.device or "no" for each in found.values())))
        for name, (_, reason) in found.items():
            if reason and op not in alone:
                start = "" if reason.startswith(name) else f"{name}: "
                reasons.setdefault(start + reason.removesuffix(f" {op}"), []).append(op)
    placed = f"The tensors on which a backend runs here:\n\n{table(('operation', *backends.NAMES), rows)}"
    notes = [_wrapped(f"{reason}: {', '.join(ops)}", 2) for reason, ops in reasons.items()]
    return "\n\n".join([described, placed, *["\n".join(["Why not:", *notes])] * bool(notes)])


def _wrapped(text: str, indent: int) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
