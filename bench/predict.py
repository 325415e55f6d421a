"""Predicts from counts (bench/counting.py) the least time of GPU kernels, and the resource that limits it (see HOW)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bench import counting, ledger, registry
from bench.entry import Entry, Shape
from bench.tables import markdown, microseconds

INTEGER, PRODUCTS = 1.3, 0.9  # SASS per PTX instruction, in kernels without and with matrix instructions
WARPS_A_CYCLE = 4  # warp instructions that a multiprocessor issues per cycle
BOUNDS = ("DRAM", "issue", "tensor")


@dataclass(frozen=True)
class Gpu:
    """A GPU's data. tflops: dense peaks of matrix instructions in TFLOP/s, by the dtype of their factors."""

    name: str
    multiprocessors: int
    ghz: float
    gb_per_s: float
    tflops: dict[str, float]

    def peak(self, dtype: str) -> float:
        """Peak of the matrix instructions in FLOP/s; for float32 that of TF32."""
        name = "tf32" if dtype == "float32" else dtype
        if name not in self.tflops:
            raise ValueError(f"bench predict: {self.name} has no TFLOP/s for {name}, only {', '.join(self.tflops)}")
        return 1e12 * self.tflops[name]


# A100 80 GB PCIe, and H100 SXM.
GPUS = {
    "A100": Gpu("A100", 108, 1.41, 1940, {"bfloat16": 312, "float16": 312, "tf32": 156}),
    "H100": Gpu("H100", 132, 1.83, 3350, {"bfloat16": 989, "float16": 989, "tf32": 495}),
}


@dataclass(frozen=True)
class Launch:
    """The prediction for one launch at the full shape. us: microseconds for each resource in BOUNDS."""

    kernel: str
    us: tuple[float, float, float]
    factor: float  # SASS instructions for one PTX instruction
    instructions: float  # PTX instructions of all warps

    @property
    def least(self) -> float:
        return max(self.us)

    @property
    def bound(self) -> str:
        return BOUNDS[self.us.index(self.least)]


@dataclass(frozen=True)
class Prediction:
    """The prediction for one call. measured_over_predicted: None if no result of the predicted GPU has the call."""

    count: dict[str, Any]  # from counting.count
    launches: tuple[Launch, ...]
    stale: bool  # the sources have changed since the count
    measured_over_predicted: float | None = None

    @property
    def us(self) -> float:
        return sum(each.least for each in self.launches)

    @property
    def bound(self) -> str:
        """The resource that limits the call for the largest share of its time."""
        share = {name: sum(each.least for each in self.launches if each.bound == name) for name in BOUNDS}
        return max(share, key=lambda name: share[name])

    @property
    def instructions_per_element(self) -> float:
        """PTX instructions of all threads, 32 for each warp instruction, for each element of the largest input.

        That is the largest tensor that Entry.inputs makes at the counted shape.
        """
        return 32 * sum(each["warp_instructions"] for each in self.count["launches"]) / self.count["elements"]


def launch(counts: dict[str, Any], counted: dict[str, Any], gpu: Gpu) -> Launch:
    """The prediction for one launch. counts: an item of counted["launches"]. counted: a result of counting.count."""
    scale, factor = counted["grows"], PRODUCTS if counts["tensor_flops"] else INTEGER
    instructions = counts["warp_instructions"] * scale
    moved = (counts["bytes_read"] + counts["bytes_written"]) * counts.get("bytes_grow", counted["bytes_grow"])
    issue = factor * instructions / (gpu.multiprocessors * WARPS_A_CYCLE * gpu.ghz * 1e9)
    flops = counts["tensor_flops"] * scale
    tensor = flops / gpu.peak(counted["dtype"]) if flops else 0.0
    us = (1e6 * moved / (gpu.gb_per_s * 1e9), 1e6 * issue, 1e6 * tensor)
    return Launch(counts["kernel"], us, factor, instructions)


def predict(gpu: Gpu, results: Iterable[ledger.Result] = (), root: Path = ledger.ROOT) -> list[Prediction]:
    """A prediction for every stored count."""
    found, kept = [], list(results)
    for each in counting.read(root):
        stale = each["sources"] != ledger.digest(each["operation"], each["backend"], root)
        made = Prediction(each, tuple(launch(one, each, gpu) for one in each["launches"]), stale)
        us = _measured(each, gpu, kept)
        found.append(replace(made, measured_over_predicted=us / made.us if us else None))
    return found


def resized(made: Prediction, size: Mapping[str, Any], gpu: Gpu) -> list[Prediction]:
    """The prediction at other sizes, in a list; empty if the call has none of them.

    Launches with matrix instructions grow with the call's FLOPs, others with its least bytes.
    """
    count = made.count
    known = registry.ENTRIES[count["operation"]]
    old = {name: _value(text) for name, _, text in (each.partition("=") for each in count["shape"].split())}
    if not size.keys() & old.keys():
        return []
    new = {name: size.get(name, value) for name, value in old.items()}
    dtype, direction = getattr(torch, count["dtype"]), count["direction"]
    flops = [_flops(known, each, dtype, direction) for each in (old, new)]
    least = [known.least_bytes(each, dtype, direction) for each in (old, new)]
    by_flops, by_bytes = flops[1] / flops[0] if flops[0] else 1.0, least[1] / least[0]
    launches = []
    for each in made.launches:
        grows = by_flops if each.us[2] else by_bytes
        us = (each.us[0] * by_bytes, each.us[1] * grows, each.us[2] * grows)
        launches.append(replace(each, us=us, instructions=each.instructions * grows))
    shape = count | {"shape": registry.label(new)}
    return [replace(made, count=shape, launches=tuple(launches), measured_over_predicted=None)]


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _flops(known: Entry, shape: Shape, dtype: torch.dtype, direction: str) -> float:
    """FLOPs of a call, which grow with its first size, from a call with at most 64 of these."""
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    first = next(iter(shape))
    small = {**shape, first: min(shape[first], 64)}
    if {"E", "K", "H"} <= shape.keys():  # rows, not experts, have FLOPs: weights of few experts are enough
        small["E"] = shape["K"]
    with FlopCounterMode(display=False) as counter:
        known.kernel("cpu")[direction](known.inputs(small, dtype, "cpu"))
    return counter.get_total_flops() * shape[first] / small[first]


@cache
def _counts(root: Path) -> list[dict[str, Any]]:
    return counting.read(root)


def at(
    gpu: Gpu, op: str, dtype: str, direction: str, least_bytes: float, flops: float, root: Path = ledger.ROOT
) -> tuple[float, str]:
    """Least microseconds of a call that moves `least_bytes` and does `flops`, and the resource that limits it.

    Its instructions are those of a counted call of the operation, if there is one: scaled by FLOPs if it has matrix
    instructions, else by bytes.
    """
    products = flops / gpu.peak(dtype) if flops > least_bytes else 0.0  # else FLOPs need no matrix instructions
    us = {"DRAM": 1e6 * least_bytes / (gpu.gb_per_s * 1e9), "issue": 0.0, "tensor": 1e6 * products}
    alike = [each for each in _counts(root) if (each["operation"], each["direction"]) == (op, direction)]
    alike.sort(key=lambda each: each["dtype"] != dtype)
    if alike:
        made = [launch(each, alike[0], gpu) for each in alike[0]["launches"]]
        done = sum(each["tensor_flops"] for each in alike[0]["launches"]) * alike[0]["grows"]
        moved = sum(each.us[0] for each in made) * 1e-6 * gpu.gb_per_s * 1e9
        us["issue"] = sum(each.us[1] for each in made) * (flops / done if done else least_bytes / moved)
    bound = max(us, key=lambda name: us[name])
    return us[bound], bound


def _measured(count: dict[str, Any], gpu: Gpu, results: Iterable[ledger.Result]) -> float | None:
    same = ("backend", "dtype", "direction", "shape")
    for result in results:
        if not result["gpu"] or not re.search(rf"\b{re.escape(gpu.name)}\b", result["device"]):
            continue
        for entry in result["entries"]:
            for figure in entry["figures"]:
                if figure["op"] == count["operation"] and all(figure[key] == count[key] for key in same):
                    return float(figure["us"])
    return None


HEADER = (
    "operation", "backend", "dtype", "direction", "shape", "kernel", "instructions an element", "x SASS / PTX",
    "DRAM, predicted us", "issue, predicted us", "tensor, predicted us", "predicted us", "bound by",
    "measured / predicted",
)  # fmt: skip


def rows(predictions: Iterable[Prediction]) -> list[tuple[str, ...]]:
    """A row for every launch, and one for the call if it has several."""
    found = []
    for each in predictions:
        count = each.count
        key = tuple(str(count[name]) for name in ("operation", "backend", "dtype", "direction", "shape"))
        key = (key[0] + " (stale)" * each.stale, *key[1:])
        ratio = "" if each.measured_over_predicted is None else f"{each.measured_over_predicted:.2f}"
        for one in each.launches:
            per_element = 32 * one.instructions / count["grows"] / count["elements"]
            times = (*(microseconds(us) for us in one.us), microseconds(one.least), one.bound)
            alone = ratio if len(each.launches) == 1 else ""
            found.append((*key, one.kernel, f"{per_element:.1f}", f"{one.factor}", *times, alone))
        if len(each.launches) > 1:
            sums = [microseconds(sum(one.us[i] for one in each.launches)) for i in range(3)]
            per_element = each.instructions_per_element
            found.append((*key, "all", f"{per_element:.1f}", "", *sums, microseconds(each.us), each.bound, ratio))
    return found


CALLS = ("operation", "backend", "dtype", "direction", "shape", "us", "bound by", "measured")


def calls(predictions: Iterable[Prediction]) -> list[tuple[str, ...]]:
    """A row for every call; "measured": the measured time divided by the predicted one."""
    return [
        (
            count["operation"] + " (stale)" * each.stale,
            *(count[name] for name in ("backend", "dtype", "direction", "shape")),
            microseconds(each.us),
            each.bound,
            "-" if each.measured_over_predicted is None else f"x{each.measured_over_predicted:.2f}",
        )
        for each in predictions
        for count in (each.count,)
    ]


SHORT = ("operation", "dtype", "shape of a forward call", "triton: predicted us on an A100", "cuda: predicted us")


def short(predictions: Iterable[Prediction]) -> str:
    """A table with a forward call of each operation and backend: the first not stale, in bfloat16 if possible."""
    found: dict[tuple[str, str], Prediction] = {}
    for each in predictions:
        key = each.count["operation"], each.count["backend"]
        better = key in found and found[key].count["dtype"] != each.count["dtype"] == "bfloat16"
        if each.count["direction"] == "forward" and not each.stale and (key not in found or better):
            found[key] = each
    # The backends of an operation share a row if dtype and shape agree.
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for (op, backend), each in found.items():
        row = cells.setdefault((f"`{op}`", each.count["dtype"], each.count["shape"]), {})
        row[backend] = f"{microseconds(each.us)} {each.bound}"
    lines = [(*key, row.get("triton", "-"), row.get("cuda", "-")) for key, row in cells.items()]
    return markdown(SHORT, lines) if lines else ""


def section(results: Iterable[ledger.Result] = (), root: Path = ledger.ROOT, ops: Collection[str] = ()) -> list[str]:
    """The report's section of predictions; the last column of its tables compares them with `results`.

    ops: only these operations; empty: all.
    """
    kept, parts = list(results), list[str]()
    for gpu in GPUS.values():
        found = rows(each for each in predict(gpu, kept, root) if not ops or each.count["operation"] in ops)
        if found:
            parts += [f"### Predicted for {figures(gpu)}", markdown(HEADER, found)]
    return ["## Predicted, not measured", HOW, *parts] if parts else []


HOW = """\
Least times from counts, not from a clock. The PTX of each kernel was executed on a CPU at a small shape. The counts of
instructions and FLOPs then grow with the number of rows, tokens, choices, experts or matrices, those of bytes with the
operation's least bytes (inputs read once, outputs written once). In plans by priority or expert choice, in Sinkhorn
with given sums and in launches of the tree gate without matrix instructions, bytes grow as instructions do. *DRAM*:
bytes over the bandwidth, each sector once. *issue*: SASS instructions of all warps, at four a cycle and multiprocessor;
their number is estimated from that of PTX instructions (x SASS / PTX). *tensor*: FLOPs of matrix instructions over the
peak. A launch takes at least the longest of the three. Not predicted: stalls, the cost of a launch, products that
torch's own library computes."""


def figures(gpu: Gpu) -> str:
    peaks = ", ".join(f"{name} {value:g} TFLOP/s" for name, value in gpu.tflops.items())
    return f"{gpu.name}: {gpu.multiprocessors} multiprocessors at {gpu.ghz:g} GHz, {gpu.gb_per_s:g} GB/s, {peaks}"
