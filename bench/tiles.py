"""Times candidate tiles of Triton's grouped products on this GPU, and writes the fastest as a file of tiles."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from bench.entry import Shape, label
from bench.registry import ENTRIES
from bench.worker import Worker, WorkerLost

Sizes = tuple[int, ...]  # m, n, k, warps, stages
SECONDS = 240  # limit of one call of `timings`, with compilation

# Candidates beside the tiles in use, by kernel and inner loop, for the class "other".
CANDIDATES: dict[tuple[str, int], tuple[Sizes, ...]] = {
    ("fwd", 80): ((128, 128, 32, 4, 4), (128, 128, 32, 8, 4), (128, 128, 32, 4, 3), (128, 256, 32, 8, 3)),
    ("fwd", 90): ((128, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 4)),
    ("gated", 80): ((128, 64, 32, 4, 4), (128, 64, 32, 8, 4), (128, 128, 32, 8, 3)),
    ("gated", 90): ((128, 64, 64, 8, 3), (128, 64, 64, 4, 3), (128, 128, 64, 8, 3)),
    ("hidden", 80): ((128, 64, 32, 4, 4), (128, 128, 32, 4, 3), (128, 128, 32, 8, 4), (128, 256, 32, 8, 3)),
    ("hidden", 90): ((128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 4)),
    ("weight", 80): ((128, 128, 32, 4, 4), (128, 128, 32, 8, 4), (128, 256, 32, 8, 3)),
    ("weight", 90): ((128, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 4)),
}
FEW_ROWS: tuple[Sizes, ...] = ((64, 128, 64, 4, 4), (64, 64, 64, 4, 4), (32, 128, 64, 4, 4), (64, 128, 32, 4, 4))

# The class of shapes, an expert MLP of this class, and whether it trains. "few rows" are of inference.
SHAPES: dict[str, tuple[Shape, bool]] = {
    "other": ({"T": 32768, "D": 2048, "H": 768, "E": 128, "K": 8, "routing": "uniform"}, True),
    "few columns": ({"T": 32768, "D": 128, "H": 128, "E": 64, "K": 1, "routing": "uniform"}, True),
    "few rows": ({"T": 64, "D": 2048, "H": 768, "E": 128, "K": 8, "routing": "uniform"}, False),
}


class Trial(NamedTuple):
    kernel: str
    size_class: str
    tiles: Sizes
    ms: float  # of the whole call; infinite if the GPU has no room for such tiles


def trials(kernel: str, size_class: str) -> list[Trial]:
    """Times an expert MLP with each candidate for `kernel`, and the tiles in use for the others."""
    import triton

    import moe_kernels as mk
    from moe_kernels.backends.triton import _grouped_configs as configs

    shape, training = SHAPES[size_class]
    inputs = ENTRIES["expert_mlp"].inputs(shape, torch.bfloat16, "cuda")
    x, w_in, w_out, weights = (inputs[name] for name in ("x", "w_in", "w_out", "weights"))
    activation = "swiglu" if kernel == "gated" else "gelu"
    if kernel == "gated":
        w_in = torch.cat([w_in.detach()] * 2, dim=2).requires_grad_()

    def call() -> None:
        with torch.set_grad_enabled(training):
            y = mk.expert_mlp(x, inputs["plan"], w_in, w_out, weights=weights, activation=activation, backend="triton")
        if training:
            torch.autograd.grad(y, [x, w_in, w_out, weights], inputs["grad"])

    known = configs.table(x.device)[kernel][size_class]
    others = FEW_ROWS if size_class == "few rows" else CANDIDATES[kernel, configs.loop(x.device)]
    found = []
    for tiles in dict.fromkeys((tuple(known), *others)):
        with mock.patch.object(configs, "choose_tiles", _instead(kernel, configs.Tiles(*tiles), configs.choose_tiles)):
            try:
                ms = triton.testing.do_bench(call, return_mode="median")
            except triton.runtime.OutOfResources:
                ms = math.inf
        found.append(Trial(kernel, size_class, tiles, ms))
    return found


def _instead(kernel: str, tiles: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    """choose_tiles, with these tiles for this kernel where its arguments have tiles other than GENERAL."""

    def choose(name: str, known: Any, *rest: Any, **named: Any) -> Any:
        return tiles if name == kernel and known is not None else rule(name, known, *rest, **named)

    return choose


def sweep() -> Iterator[list[Trial] | str]:
    """`trials` of each kernel and class of shapes; text if they failed."""
    with Worker() as worker:
        for size_class, (shape, training) in SHAPES.items():
            for kernel in ("fwd", "gated", *(("hidden", "weight") if training else ())):
                try:
                    yield worker(trials, kernel, size_class, seconds=SECONDS)
                except (WorkerLost, RuntimeError) as error:
                    yield f"{kernel}, {size_class}, {label(shape)}: {error}"


def write(path: Path, device: str, found: list[Trial]) -> None:
    """Writes the tiles of this GPU: the fastest of each kernel and class, the tiles in use where none was timed."""
    from moe_kernels.backends.triton import _grouped_configs as configs

    table = {
        kernel: {name: list(tiles) for name, tiles in classes.items()}
        for kernel, classes in configs.table(torch.device("cuda", torch.cuda.current_device())).items()
    }
    for kernel, size_class in {(each.kernel, each.size_class) for each in found}:
        alike = [each for each in found if (each.kernel, each.size_class) == (kernel, size_class)]
        best = min(alike, key=lambda each: each.ms)
        if best.ms < math.inf:
            table[kernel][size_class] = list(best.tiles)
    path.write_text(json.dumps({device: table}, indent=1) + "\n")
