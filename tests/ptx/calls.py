"""One call of an operation on the inputs of its bench entry, executed from PTX."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch

from . import cuda_launch, session, triton_launch
from .machine import Result

ROOT = Path(__file__).resolve().parents[2]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALL = {"R": 64, "T": 256, "D": 128, "H": 128, "E": 8, "B": 4}


def _shape(entry: Any, given: str) -> dict[str, Any]:
    """The entry's first shape, a "quick" one if there is any. Its sizes are reduced to those of SMALL, and R (rows, or
    sinkhorn's iterations) becomes 64. Then `given`, such as "N=4096 p=0.1", replaces sizes."""
    shapes = entry.shapes.get("quick") or next(iter(entry.shapes.values()))
    shape = dict(shapes[0])
    shape = entry.complete(shape, "cpu") | {name: min(n, SMALL[name]) for name, n in shape.items() if name in SMALL}
    if "R" in shape:
        shape["R"] = SMALL["R"]
    for each in given.split():
        name, _, value = each.partition("=")
        shape[name] = value if isinstance(shape.get(name), str) else type(shape.get(name, 1))(value)
    return shape


def entry_and_inputs(op: str, dtype: str, shape: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """An operation's entry in bench.registry, inputs for a call, and their shape."""
    sys.path.insert(0, str(ROOT))
    try:
        from bench.registry import ENTRIES
    finally:
        sys.path.remove(str(ROOT))
    entry = ENTRIES[op]
    sizes = _shape(entry, shape)
    torch.manual_seed(0)
    inputs = entry.inputs(sizes, DTYPES[dtype], "cpu")
    return entry, inputs, sizes


def call(op: str, backend: str, dtype: str, shape: str, direction: str) -> tuple[list[Result], dict[str, Any], int]:
    """Executes a call; returns its launches' results, the shape, and the number of elements of the largest input."""
    entry, inputs, sizes = entry_and_inputs(op, dtype, shape)
    elements = max(each.numel() for each in inputs.values() if isinstance(each, torch.Tensor))
    with contextlib.ExitStack() as stack:
        if backend == "cuda":
            stack.enter_context(cuda_launch.use())
        else:
            triton_launch.install()
        results = stack.enter_context(session.recorded())
        entry.kernel(backend)[direction](inputs)
    return results, sizes, elements
