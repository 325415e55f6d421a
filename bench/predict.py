"""Predicts from counts (bench/counting.py) the least time of GPU kernels, and the resource that limits it (see HOW)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, perm
from pathlib import Path
from typing import Any

import torch

from bench import counting, ledger, registry
from bench.entry import Shape
from bench.gpus import GPUS, WARPS_A_CYCLE, Gpu, figures
from bench.tables import markdown, microseconds

INTEGER, PRODUCTS = 1.3, 0.9  # SASS per PTX instruction, in kernels without and with matrix instructions
FILL = 1000  # cycles until a block's first products: two reads of DRAM, of a row's number and of the row
LONE = 2  # cycles between two instructions of a warp that has its scheduler for itself
PRODUCT_REGISTERS = 256  # of a thread of a kernel with matrix instructions, whose sums fill them
SHUFFLES = 32  # results of shuffles of a multiprocessor per cycle
BOUNDS = ("DRAM", "L2", "shared", "issue", "tensor", "fp32", "fp64", "integer", "special", "latency")


@dataclass(frozen=True)
class Launch:
    """The prediction for one launch at the full shape. us: microseconds for each resource in BOUNDS."""

    kernel: str
    us: dict[str, float]
    factor: float  # SASS instructions for one PTX instruction
    instructions: float  # PTX instructions of all warps

    @property
    def least(self) -> float:
        return max(self.us.values())

    @property
    def bound(self) -> str:
        return max(self.us, key=lambda name: self.us[name])


@dataclass(frozen=True)
class Prediction:
    """The prediction for one call. measured_over_predicted: None if no result of the predicted GPU has the call.

    flops, least_bytes: of the call, by the operator's formula and Entry.least_bytes.
    floors: microseconds of these FLOPs at the peak for the call's dtype, and of these bytes.
    """

    count: dict[str, Any]  # from counting.count
    launches: tuple[Launch, ...]
    stale: bool  # the sources have changed since the count
    flops: float
    least_bytes: float
    floors: dict[str, float]
    measured_over_predicted: float | None = None

    @property
    def us(self) -> float:
        """The sum of the launches, with torch's own products at their peak, and at least the floors."""
        return max(sum(self._shares.values()), *self.floors.values())

    @property
    def _shares(self) -> dict[str, float]:
        """The microseconds of the launches that each resource limits, and of torch's own products."""
        shares = {name: sum(each.least for each in self.launches if each.bound == name) for name in BOUNDS}
        if self.count["torch_products"] and not any(each.us["tensor"] for each in self.launches):
            for pipe in self.floors.keys() - {"DRAM"}:
                shares[pipe] += self.floors[pipe]
        return shares

    @property
    def bound(self) -> str:
        """The resource that limits the call for the largest share of its time."""
        shares = self._shares if self.us <= sum(self._shares.values()) else self.floors
        return max(shares, key=lambda name: shares[name])

    @property
    def instructions_per_element(self) -> float:
        """PTX instructions of all threads, 32 for each warp instruction, for each element of the largest input.

        That is the largest tensor that Entry.inputs makes at the counted shape.
        """
        return 32 * sum(each["warp_instructions"] for each in self.count["launches"]) / self.count["elements"]


def launch(counts: dict[str, Any], counted: dict[str, Any], gpu: Gpu) -> Launch:
    """The prediction for one launch. counts: an item of counted["launches"]. counted: a result of counting.count.

    Each pipe works for all blocks; a multiprocessor has the blocks of the fullest one to do, so pipes within it wait
    for a last incomplete wave. See `_side_by_side` for kernels with matrix instructions.
    """
    full, factor = counts["full"], PRODUCTS if counts["tensor_flops"] else INTEGER
    flops = full["tensor_flops"]
    of_all = {
        "shared": full["passes"] + full["shuffle"] / SHUFFLES,
        "issue": factor * full["warp_instructions"] / WARPS_A_CYCLE,
        "tensor": flops / gpu.peak(counted["dtype"]) * 1e6 * gpu.cycles if flops else 0.0,
        **{name: full[name] / getattr(gpu, name) for name in ("fp32", "fp64", "integer", "special")},
    }
    blocks = max(full["blocks"], 1.0)
    fullest = max(ceil(blocks / gpu.multiprocessors) * gpu.multiprocessors / blocks, 1.0)
    us = {name: cycles / gpu.cycles * fullest for name, cycles in of_all.items()}
    us["DRAM"] = (full["bytes_read"] + full["bytes_written"]) / gpu.gb_per_s * 1e-3
    us["L2"] = 32 * full["sectors"] / gpu.l2 * 1e-3
    us["latency"] = 0.0
    if counts["loop_instructions"]:
        # The loop takes what its slowest pipe takes, of which one block uses all.
        loop = max(of_all["tensor"], of_all["shared"], factor * full["loop_instructions"] / WARPS_A_CYCLE) / blocks
        warps = counts["threads"] / 32
        outside = (full["warp_instructions"] - full["loop_instructions"]) / blocks / warps * LONE * factor
        outside = FILL + outside * max(warps / WARPS_A_CYCLE / LONE, 1)
        rounds = ceil(blocks / gpu.multiprocessors)
        us["latency"] = rounds * _side_by_side(loop, outside, side_by_side(counts, gpu)) / (gpu.ghz * 1e3)
    return Launch(counts["kernel"], {name: us[name] for name in BOUNDS}, factor, full["warp_instructions"])


def _side_by_side(loop: float, outside: float, blocks: int) -> float:
    """Cycles for each block of a multiprocessor that holds several, each of which in turn takes the pipes for `loop`
    cycles and `outside` cycles for its first reads and last stores.

    As machines that wait for one repairman: the pipes rest while all blocks are outside of their loops, with
    probability 1 / sum_k (loop / outside)^k blocks! / (blocks - k)!, k = 0 ... blocks.
    """
    rest = 1 / sum((loop / outside) ** k * perm(blocks, k) for k in range(blocks + 1))
    return loop / (1 - rest)


def side_by_side(counts: dict[str, Any], gpu: Gpu) -> int:
    """Blocks of a kernel with matrix instructions that a multiprocessor holds at once."""
    memory = gpu.shared_kb * 1024 // (counts["shared_bytes"] + 1024)  # CUDA takes 1 KB of each block
    return max(min(memory, 65536 // (PRODUCT_REGISTERS * counts["threads"]), gpu.threads // counts["threads"]), 1)


@ledger.settled()
def predict(
    gpu: Gpu, results: Iterable[ledger.Result] = (), root: Path = ledger.ROOT, ops: Collection[str] = ()
) -> list[Prediction]:
    """A prediction for every stored count of the code that the GPU runs. ops: only these operations; empty: all."""
    found, kept = [], list(results)
    for each in _of_gpu(counting.read(root), gpu):
        if ops and each["operation"] not in ops:
            continue
        stale = each["sources"] != ledger.digest(each["operation"], each["backend"], root)
        made = prediction(each, gpu, stale)
        us = _measured(each, gpu, kept)
        found.append(replace(made, measured_over_predicted=us / made.us if us else None))
    return found


def _of_gpu(counts: list[dict[str, Any]], gpu: Gpu) -> list[dict[str, Any]]:
    """Of calls that were counted for several capabilities those for this GPU: Triton has code of its own for 9.x."""
    key = ("operation", "backend", "dtype", "direction", "shape")
    best: dict[tuple[str, ...], dict[str, Any]] = {}
    for each in counts:
        if each["capability"] == 80 or each["capability"] // 10 == gpu.capability // 10:
            call = tuple(each[name] for name in key)
            if call not in best or best[call]["capability"] < each["capability"]:
                best[call] = each
    return list(best.values())


def prediction(count: dict[str, Any], gpu: Gpu, stale: bool = False) -> Prediction:
    least, flops = _least_bytes(count, sizes_in(count["shape"])), float(count["flops"])
    launches = tuple(launch(one, count, gpu) for one in count["launches"])
    return Prediction(count, launches, stale, flops, least, _floors(gpu, count, flops, least))


def _least_bytes(count: dict[str, Any], size: Shape) -> float:
    known, dtype = counting.entry_of(count["operation"]), getattr(torch, count["dtype"])
    return known.least_bytes(size, dtype, count["direction"])


def _floors(gpu: Gpu, count: dict[str, Any], flops: float, least_bytes: float) -> dict[str, float]:
    products = any(each["tensor_flops"] for each in count["launches"])
    return floors(gpu, "tf32" if products and count["dtype"] == "float32" else count["dtype"], flops, least_bytes)


def floors(gpu: Gpu, dtype: str, flops: float, least_bytes: float) -> dict[str, float]:
    """The microseconds that no kernel undercuts: FLOPs over their pipe's peak, bytes over the bandwidth."""
    pipe = "tensor" if dtype in gpu.tflops else "fp32"
    products = 1e6 * flops / gpu.full_precision(dtype) if flops > least_bytes or pipe == "fp32" else 0.0
    return {"DRAM": least_bytes / gpu.gb_per_s * 1e-3, "tensor": 0.0, pipe: products}


def sizes_of(made: Prediction) -> dict[str, Any]:
    """The sizes of the call by name."""
    return sizes_in(made.count["shape"])


def resized(made: Prediction, size: Mapping[str, Any], gpu: Gpu) -> list[Prediction]:
    """The prediction at other sizes, in a list; empty if the call has none of them."""
    count = made.count
    old = sizes_of(made)
    if not size.keys() & old.keys():
        return []
    new = {name: size.get(name, value) for name, value in old.items()}
    flops = _flops(count["operation"], count["dtype"], count["direction"], tuple(new.items()))
    made = scaled(made, flops, _least_bytes(count, new), gpu)
    return [replace(made, count=count | {"shape": registry.label(new)})]


@cache  # since both backends and several GPUs are asked for the same call
def _flops(op: str, dtype: str, direction: str, size: tuple[tuple[str, Any], ...]) -> float:
    return counting.flops(op, dict(size), getattr(torch, dtype), direction)


def scaled(made: Prediction, flops: float, least_bytes: float, gpu: Gpu) -> Prediction:
    """The prediction for a call with other FLOPs and least bytes.

    Launches with matrix instructions grow with the FLOPs, others with the bytes.
    """
    by_bytes = least_bytes / made.least_bytes
    by_flops = flops / made.flops if made.flops else by_bytes
    launches = []
    for each in made.launches:
        grows = by_flops if each.us["tensor"] else by_bytes
        us = {name: value * (by_bytes if name == "DRAM" else grows) for name, value in each.us.items()}
        launches.append(replace(each, us=us, instructions=each.instructions * grows))
    least = _floors(gpu, made.count, flops, least_bytes)
    made = replace(made, flops=flops, least_bytes=least_bytes, floors=least, measured_over_predicted=None)
    return replace(made, launches=tuple(launches))


def sizes_in(shape: str) -> dict[str, Any]:
    return {name: _value(text) for name, _, text in (each.partition("=") for each in shape.split())}


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def at(
    gpu: Gpu, op: str, dtype: str, direction: str, least_bytes: float, flops: float, root: Path = ledger.ROOT
) -> tuple[float, str]:
    """Least microseconds of a call that moves `least_bytes` and does `flops`, and the resource that limits it.

    They grow from those of a counted call of the operation, on the faster backend, if there is one.
    """
    alike = [
        each for each in _counted(gpu, root) if (each.count["operation"], each.count["direction"]) == (op, direction)
    ]
    alike = [each for each in alike if each.count["dtype"] == dtype] or alike
    if alike:
        made = min((scaled(each, flops, least_bytes, gpu) for each in alike), key=lambda each: each.us)
        return made.us, made.bound
    least = floors(gpu, dtype, flops, least_bytes)
    bound = max(least, key=lambda name: least[name])
    return least[bound], bound


_predictions: dict[tuple[str, Path], list[Prediction]] = {}


def _counted(gpu: Gpu, root: Path) -> list[Prediction]:
    if (key := (str(gpu), root)) not in _predictions:
        _predictions[key] = predict(gpu, root=root)
    return _predictions[key]


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
    *(f"{name}, predicted us" for name in BOUNDS), "predicted us", "bound by", "measured / predicted",
)  # fmt: skip


def rows(predictions: Iterable[Prediction]) -> list[tuple[str, ...]]:
    """A row for every launch, and one for the call."""
    found = []
    for each in predictions:
        count = each.count
        key = tuple(str(count[name]) for name in ("operation", "backend", "dtype", "direction", "shape"))
        key = (key[0] + " (stale)" * each.stale, *key[1:])
        ratio = "" if each.measured_over_predicted is None else f"{each.measured_over_predicted:.2f}"
        for one, counted in zip(each.launches, count["launches"], strict=True):
            per_element = 32 * counted["warp_instructions"] / count["elements"]
            times = (*(microseconds(us) for us in one.us.values()), microseconds(one.least), one.bound)
            found.append((*key, one.kernel, f"{per_element:.1f}", f"{one.factor}", *times, ""))
        sums = [microseconds(sum(one.us[name] for one in each.launches)) for name in BOUNDS]
        per_element = each.instructions_per_element
        found.append((*key, "call", f"{per_element:.1f}", "", *sums, microseconds(each.us), each.bound, ratio))
    return found


def record(each: Prediction, gpu: Gpu) -> dict[str, Any]:
    """A row of `--json`. us: the prediction; pipes: the sums of the launches' times by resource."""
    names = ("operation", "backend", "dtype", "direction")
    pipes = {name: sum(one.us[name] for one in each.launches) for name in BOUNDS}
    return {
        **{name: each.count[name] for name in names},
        "sizes": sizes_of(each),
        "gpu": gpu.name,
        "flops": each.flops,
        "least_bytes": each.least_bytes,
        "us": each.us,
        "bound": each.bound,
        "pipes": pipes,
        "stale": each.stale,
    }


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
    for gpu in (GPUS[name] for name in REPORTED):
        found = rows(predict(gpu, kept, root, ops))
        if found:
            parts += [f"### Predicted for {figures(gpu)}", markdown(HEADER, found)]
    return ["## Predicted, not measured", HOW, *parts] if parts else []


REPORTED = ("A100", "H100")

HOW = """\
Least times from counts, not from a clock. The PTX of each kernel was executed on a CPU at a small shape, and for
experts at two, so that the part of a count that grows with the rows is told from the part that grows with the experts.
A launch takes at least the longest of these times. *DRAM*: bytes over the bandwidth, each 32-byte sector once. *L2*:
bytes of all requests over its bandwidth. *shared*: passes of shared memory and shuffles. *issue*: SASS instructions of
all warps, at four a cycle and multiprocessor; their number is estimated from that of PTX instructions (x SASS / PTX).
*tensor*: FLOPs of matrix instructions over the peak. *fp32, fp64, integer, special*: results over the lanes of that
pipe; integers and comparisons have half of the issue rate. *latency*, for kernels with matrix instructions: the loop of
products, and the share of the time in which all blocks of a multiprocessor are before their first or behind their last
product. Within a multiprocessor a last wave of
blocks that is not full takes as long as a full one. A call takes the sum of its launches, and at least its FLOPs over
their pipe's peak and its least bytes (inputs read once, outputs written once) over the bandwidth. Not predicted:
stalls, the cost of a launch; products that torch's own library computes are taken at their peak."""
