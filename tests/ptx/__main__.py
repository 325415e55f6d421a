"""Counters of an operation's kernels on one shape, from their executed PTX.

    python -m tests.ptx kwta --backend triton --dtype bf16 --shape "R=64 N=4096 p=0.1"
    python -m tests.ptx grouped_gemm --backend cuda --dtype fp16 --lines
    python -m tests.ptx --update      # writes tests/machine/ptx_counters.json

Operations and names of sizes are those of bench.registry. Sizes that --shape does not give are small.
"""

from __future__ import annotations

import argparse
import json

from . import counters, golden
from .calls import DTYPES, call


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.ptx", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("op", nargs="?")
    parser.add_argument("--update", action="store_true", help="write tests/machine/ptx_counters.json again")
    parser.add_argument("--backend", choices=("triton", "cuda"), default="triton")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--shape", default="", help='such as "R=64 N=4096 p=0.1"')
    parser.add_argument("--direction", choices=("forward", "backward", "training"), default="forward")
    parser.add_argument("--lines", action="store_true", help="also the source lines with most instructions")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.update:
        golden.update()
        return
    if given.op is None:
        parser.error("give an operation of bench.registry, or --update")
    results, sizes, elements = call(given.op, given.backend, given.dtype, given.shape, given.direction)
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
