"""Counters of a launch: PTX instructions by class, sectors and bytes of memory, bank conflicts, barriers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from .decode import Kernel
from .machine import Result

# An instruction is in the first class whose pattern matches the start of its opcode.
CLASSES = {
    "tensor": r"mma|wgmma|ldmatrix|stmatrix",
    "copy": r"cp\.async",
    "global": r"(ld|st|atom|red)\S*\.global",
    "shared": r"(ld|st|atom|red)\S*\.shared",
    "parameter": r"ld\.param",
    "barrier": r"bar\.(sync|red)|barrier|mbarrier",
    "warp": r"shfl|vote|redux|match|bar\.warp|activemask|elect",
    "special": r"(ex2|lg2|rcp|rsqrt|sqrt|tanh|sin|cos|div\.(full|approx))\S*",
    "double": r"\w+\S*\.f64",
    "float": r"(add|sub|mul|fma|min|max|abs|neg|copysign|div)\S*\.(f32|f16|bf16|f16x2|bf16x2)",
    "convert": r"cvt(?!a)",
    "compare": r"setp|set\.|selp|(and|or|xor|not)\.pred",
    "control": r"bra|ret|exit|trap",
    "move": r"mov|cvta|prmt",
    "integer": r"",
}
# ptxas turns these into few instructions or none.
FREE = ("move", "parameter")


def class_of(text: str) -> str:
    opcode = re.sub(r"^@\S+\s+", "", text)
    return next(name for name, pattern in CLASSES.items() if re.match(pattern, opcode))


def classes(kernel: Kernel) -> list[str]:
    cached = getattr(kernel, "_classes", None)
    if cached is None:
        cached = kernel._classes = [class_of(text) for text in kernel.texts]  # type: ignore[attr-defined]
    return cached


def count(result: Result) -> dict[str, Any]:
    """The counters of one launch. "instructions" counts lanes: an instruction of a full warp counts 32 times."""
    c = result.counters[:-1]
    found = classes(result.kernel)
    lanes = dict.fromkeys(CLASSES, 0)
    for index, name in enumerate(found):
        lanes[name] += int(c["lanes"][index])
    in_memory = [index for index, name in enumerate(found) if name in ("global", "copy")]
    memory = {name: int(c[name][in_memory].sum()) for name in ("requests", "sectors", "ideal")}
    return {
        "kernel": result.kernel.title,
        "grid": list(result.grid),
        "threads": result.threads,
        "shared_bytes": result.shared,
        "warp_instructions": int(c["runs"].sum()),
        "instructions": {name: n for name, n in lanes.items() if n},
        "sectors": memory["sectors"],
        "ideal_sectors": memory["ideal"],
        "requests": memory["requests"],
        "bank_passes": int(c["passes"].sum()),
        "ideal_passes": int(c["least"].sum()),
        "bytes_read": result.bytes_read,
        "bytes_written": result.bytes_written,
        "barriers": result.barriers,
    }


def issued(counted: dict[str, Any]) -> int:
    """Instructions, counted by lanes, without those in FREE."""
    return sum(n for name, n in counted["instructions"].items() if name not in FREE)


def table(counted: Iterable[dict[str, Any]], elements: int) -> str:
    """Text: instructions per element by class, accesses of memory and barriers."""
    lines = []
    for each in counted:
        total = sum(each["instructions"].values())
        grid = "x".join(map(str, each["grid"]))
        lines.append(f"{each['kernel']}  grid {grid}, {each['threads']} threads, {each['shared_bytes']} bytes shared")
        lines.append(
            f"  instructions per element: {total / elements:.2f}, {issued(each) / elements:.2f} without moves and "
            f"parameters; {each['warp_instructions']} warp instructions"
        )
        parts = sorted(each["instructions"].items(), key=lambda part: -part[1])
        lines.append("  " + ", ".join(f"{name} {n / elements:.2f}" for name, n in parts))
        requests = max(each["requests"], 1)
        lines.append(
            f"  global: {each['requests']} requests, {each['sectors'] / requests:.2f} sectors each, "
            f"{each['sectors'] / max(each['ideal_sectors'], 1):.2f} times the ideal; "
            f"{each['bytes_read']} bytes read and {each['bytes_written']} written, each sector counted once"
        )
        lines.append(
            f"  shared: {each['bank_passes']} passes, {each['bank_passes'] / max(each['ideal_passes'], 1):.2f} times "
            f"the ideal; barriers: {each['barriers']} arrivals of warps"
        )
    return "\n".join(lines)


def lines(result: Result, limit: int = 20) -> str:
    """Text: the `limit` source lines with the most executed instructions."""
    found: dict[str, int] = {}
    for pc, lanes in enumerate(result.counters["lanes"][:-1]):
        found[result.kernel.source(pc)] = found.get(result.kernel.source(pc), 0) + int(lanes)
    total = sum(found.values()) or 1
    top = sorted(found.items(), key=lambda each: -each[1])[:limit]
    return "\n".join(f"  {100 * n / total:5.1f} %  {n:10d}  {line}" for line, n in top)
