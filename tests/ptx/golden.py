"""The table tests/machine/ptx_counters.json: counters of the calls in CASES. tests/machine/test_ptx_counters.py fails
if a counter exceeds its number in the table by more than 1 % plus 4.

After an intended increase:  python -m tests.ptx --update
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from . import counters, toolkit
from .calls import call

TABLE = Path(__file__).resolve().parents[1] / "machine" / "ptx_counters.json"

# (operation, shape, direction, dtypes)
CASES = [
    ("kwta", "R=16 N=4096 p=0.1", "training", ("fp32", "bf16")),
    ("kwta", "R=16 N=1000 p=0.1", "forward", ("fp32", "bf16")),
    ("kwta_linear", "T=2 D=1024 N=512 p=0.1", "forward", ("fp32", "bf16")),
    ("topk_gate", "T=256 E=64 K=4", "training", ("fp32", "bf16")),
    ("make_plan", "T=256 E=64 K=4", "forward", ("fp32",)),
    ("dispatch", "T=128 D=256 E=8 K=2", "training", ("fp32", "bf16")),
    ("combine", "T=128 D=256 E=8 K=2", "training", ("fp32", "bf16")),
    ("grouped_gemm", "T=256 D=128 H=256 E=4", "training", ("fp32", "bf16")),
    ("expert_mlp", "T=256 D=128 H=256 E=4", "training", ("fp32", "bf16")),
    ("expert_norms", "T=128 D=128 H=128 E=4", "forward", ("fp32", "bf16")),
    ("sinkhorn", "B=4 n=8", "training", ("fp32",)),
    ("sinkhorn", "B=1 n=72 R=8", "training", ("fp32",)),
    ("tree_gate", "T=128 E=16 K=2", "training", ("fp32", "bf16")),
    ("tree_route", "T=128 E=16 K=2", "forward", ("fp32",)),
]
BACKENDS = ("triton", "cuda")
COLUMNS = ("warp instructions", "lane instructions", "sectors", "bank passes", "barriers")


def keys() -> list[tuple[str, str, str, str, str]]:
    return [
        (op, shape, direction, backend, dtype)
        for op, shape, direction, dtypes in CASES
        for backend in BACKENDS
        for dtype in dtypes
    ]


def name(key: tuple[str, ...]) -> str:
    op, shape, direction, backend, dtype = key
    return f"{op} {backend} {dtype} {direction} {shape}"


def measure(key: tuple[str, str, str, str, str]) -> dict[str, list[int]] | None:
    """Name of a kernel -> its COLUMNS, summed over its launches in a call; None if the backend cannot run the call."""
    from moe_kernels.backends import BackendError

    op, shape, direction, backend, dtype = key
    try:
        results, _, _ = call(op, backend, dtype, shape, direction)
    except BackendError:
        return None
    found: dict[str, list[int]] = {}
    for result in results:
        counted = counters.count(result)
        row = [
            counted["warp_instructions"],
            sum(counted["instructions"].values()),
            counted["sectors"],
            counted["bank_passes"],
            counted["barriers"],
        ]
        sums = found.setdefault(counted["kernel"], [0] * len(row))
        found[counted["kernel"]] = [a + b for a, b in zip(sums, row, strict=True)]
    return found


def compilers() -> dict[str, str]:
    """Versions of the compilers. The table is valid only for the versions with which it was made."""
    import triton

    nvcc = toolkit.find().nvcc
    text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True).stdout if nvcc else ""
    return {"triton": triton.__version__, "cuda": next((part for part in text.split() if part.startswith("V")), "")}


def load() -> dict[str, Any]:
    return json.loads(TABLE.read_text())


def update() -> None:
    rows = {name(key): measured for key in keys() if (measured := measure(key))}
    lines = [f' "compilers": {json.dumps(compilers())}', f' "columns": {json.dumps(COLUMNS)}']
    lines += [f" {json.dumps(case)}: {json.dumps(row)}" for case, row in rows.items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
