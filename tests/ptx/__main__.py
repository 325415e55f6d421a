"""Counters of an operation's kernels on one shape, from the PTX that a GPU would get.

    PYTHONPATH=tests python -m ptx kwta --backend triton --dtype bf16 --shape "R=64 N=4096 p=0.1"
    PYTHONPATH=tests python -m ptx grouped_gemm --backend cuda --dtype fp16 --lines

Operations, shapes and directions are those of bench.registry; the sizes that --shape leaves out are small.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ptx import counters, cuda_launch, session, triton_launch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALL = {"R": 64, "T": 256, "D": 128, "H": 128, "E": 8, "B": 4}


def shape_of(entry, given: str) -> dict:
    """The first quick shape, made small, with the sizes that were given."""
    shapes = entry.shapes.get("quick") or next(iter(entry.shapes.values()))
    shape = dict(shapes[0])
    shape = entry.complete(shape, "cpu") | {name: min(n, SMALL[name]) for name, n in shape.items() if name in SMALL}
    if "R" in shape:
        shape["R"] = SMALL["R"]
    for each in given.split():
        name, _, value = each.partition("=")
        shape[name] = type(shape.get(name, 1))(value) if not isinstance(shape.get(name), str) else value
    return shape


def run(op: str, backend: str, dtype: torch.dtype, shape: str, direction: str):
    """The results of the launches of one call, and its number of elements."""
    from bench.registry import ENTRIES

    entry = ENTRIES[op]
    sizes = shape_of(entry, shape)
    torch.manual_seed(0)
    inputs = entry.inputs(sizes, dtype, "cpu")
    elements = max(each.numel() for each in inputs.values() if isinstance(each, torch.Tensor))
    with contextlib.ExitStack() as stack:
        if backend == "cuda":
            stack.enter_context(cuda_launch.use())
        else:
            triton_launch.install()
        results = stack.enter_context(session.recorded())
        entry.kernel(backend)[direction](inputs)
    return results, sizes, elements


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ptx", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("op")
    parser.add_argument("--backend", choices=("triton", "cuda"), default="triton")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--shape", default="", help='such as "R=64 N=4096 p=0.1"')
    parser.add_argument("--direction", choices=("forward", "backward", "training"), default="forward")
    parser.add_argument("--lines", action="store_true", help="also the source lines that execute the most")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    results, sizes, elements = run(given.op, given.backend, DTYPES[given.dtype], given.shape, given.direction)
    counted = [counters.count(each) for each in results]
    if given.json:
        print(json.dumps({"shape": sizes, "elements": elements, "launches": counted}, indent=1))
        return
    print(f"{given.op} {given.backend} {given.dtype} {given.direction}, {sizes}: {elements} elements")
    for result, each in zip(results, counted, strict=True):
        print(counters.table([each], elements))
        if given.lines:
            print(counters.lines(result))


if __name__ == "__main__":
    main()
