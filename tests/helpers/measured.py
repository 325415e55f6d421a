"""A small checkout and results of the bench that nobody measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import counting, ledger, pipes, predict
from tests.helpers.bench import PEER


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with kwta on the CPU and in CUDA, and no Triton kernel."""
    included = {"csrc/cpu/kwta.cpp": ("ops.h",), "csrc/cuda/kwta.cu": ("ops.h", "moe/cuda/block.cuh", "here.h")}
    included |= {"csrc/include/moe/cuda/block.cuh": ("moe/cuda/warp.cuh",)}
    names = ["moe_kernels/ops/kwta.py", "csrc/include/moe/cuda/warp.cuh", "csrc/include/moe/other.cuh"]
    names += [f"csrc/cuda/{name}" for name in ("here.h", "ops.h", "shared.cu")]
    names += [f"moe_kernels/backends/native/{name}.py" for name in ("kwta", "kwta_cpu", "shared")]
    for name in (*included, *names):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'NAME = "{name}"\n' + "".join(f'#include "{header}"\n' for header in included.get(name, ())))
    (tmp_path / "moe_kernels/backends/native/kwta_cuda.py").write_text(
        "from moe_kernels.backends.native.shared import THRESHOLD\n"
    )
    return tmp_path


def result_of(tree: Path, backend: str, *, gpu: bool = True, date: str = "2026-01-02", **changes) -> ledger.Result:
    figure = {
        "op": "kwta", "backend": backend, "dtype": "float32", "direction": "forward", "shape": "R=4 N=100 p=0.5",
        "setting": "cuda" if gpu else "2 threads", "us": 123456.0, "low_us": 1.0, "high_us": 2.0, "samples": 5,
        "sizes": {"R": 4, "N": 100, "p": 0.5}, "least_bytes": 3200, "flops": 400,
        "gb_per_s": 7.0, "gflop_per_s": 1.0, "ceiling_percent": 87.0, "over_memcpy": 1.5, "peers": {PEER: 21.0},
    }  # fmt: skip
    entry = {
        "operation": "kwta", "backend": backend, "dtype": "float32", "device": "cuda" if gpu else "cpu",
        "sources": ledger.digest("kwta", backend, tree), "verdict": "ok",
        "cases": 3, "error": 0.0, "allowed": 0.0, "checks": {}, "figures": [figure], "curves": [],
    }  # fmt: skip
    machine = {"cpu": "Some CPU", "cores": 2, "isa": "avx2", "driver": "1", "python": "3", "torch": "2", "triton": "3"}
    machine["gpus"] = [{"name": "Some GPU"}] if gpu else []
    facts = {"device": "Some GPU" if gpu else "Some CPU", "gpu": gpu, "date": date, "machine": machine}
    facts |= {"ceilings": {figure["setting"]: {"copy": 8.0, "float32": 100.0}}, "not_measured": ["one: why"]}
    return {**facts, "entries": [entry | changes]}


def saved(result: ledger.Result, folder: Path) -> Path:
    path = ledger.free_path(folder, result["device"], ".json")
    ledger.write(result, path)
    return path


OPERATIONS = {"kwta": (PEER, 0), "grouped_gemm": ("torch loop", 8e6), "sinkhorn": ("torch logsumexp", 3e4)}


def measured(tree: Path, gpu: bool) -> ledger.Result:
    """Two settings on a CPU, three operations, two dtypes and all directions; all that a report shows."""
    result = result_of(tree, "cuda" if gpu else "cpu", gpu=gpu)
    (first,) = result.pop("entries")
    (figure,) = first["figures"]
    settings = ["cuda"] if gpu else ["1 thread", "2 threads"]
    entries = []
    for index, (op, (peer, flops)) in enumerate(OPERATIONS.items()):
        for dtype, faster in (("float32", 1.0), ("bfloat16", 1.7)):
            figures = [
                {
                    **figure, "op": op, "dtype": dtype, "direction": direction, "setting": setting, "shape": shape,
                    "sizes": {"R": size, "routing": "zipf"}, "flops": flops * size, "least_bytes": 1000 * size,
                    "us": 3.0 * size * slower / faster, "low_us": 2.0 * size / faster, "high_us": 5.0 * size / faster,
                    "gb_per_s": size + index * faster, "gflop_per_s": flops * 1e-5 * faster / size,
                    "peers": {peer: 1.3 * size}, "ceiling_percent": 50.0 / size, "over_memcpy": 1.1 * size,
                }
                for setting in settings
                for size, shape in ((1, "R=1"), (2, "R=2"), (4, "R=4"))
                for direction, slower in (("forward", 1), ("backward", 2), ("training", 3))
                if op == "kwta" or direction != "backward"
            ]  # fmt: skip
            for each in figures:
                if each["direction"] == "training":
                    each |= {"peak_mib": 3.5, "peers_peak_mib": {peer: 7.25}}
                if gpu:
                    each |= {"launch_us": 4.0, "watts": 300.0, "celsius": 50, "memory_mhz": 2000, "sm_mhz": 1500}
                    each |= {"joules_per_call": 0.01, "throttled": "power cap"}
            curves = [each for each in figures if each["direction"] == "forward" and dtype == "float32"]
            checks = {"repeated": "ok", "sanitizer": "not run: no tool"} if gpu else {}
            sources = ledger.digest(op, first["figures"][0]["backend"], tree) if op != "sinkhorn" else "changed"
            entries.append(first | {
                "operation": op, "dtype": dtype, "error": 1e-3 * index, "allowed": 0.01, "checks": checks,
                "figures": figures, "curves": curves, "sources": sources,
            })  # fmt: skip
    for each in entries:
        each["note"] = ""
    entries[-1] |= {"verdict": "FAILED", "note": "worst: y"}
    limits = {"copy": 8.0, "float32": 100.0, "bfloat16": 300.0}
    lost = ["kwta R=9 float32 forward, 1 thread: out of time", "peer pot of sinkhorn: not installed"]
    more: dict[str, Any] = {"ceilings": dict.fromkeys(settings, limits), "not_measured": [*lost, lost[0]]}
    more["loads"] = {"shape": "T=8 E=4 K=2", "tokens": {"uniform": [4, 4, 4, 4], "zipf": [10, 4, 2, 0]}}
    more["suite"] = {"tests/machine": "ok", "tests/ops": "FAILED: 1"}
    return {**result, **more, "entries": entries}


def counted(tree: Path) -> list[dict[str, Any]]:
    """Writes and returns counts of four calls: of rows, of products, of float64, and beside products of torch."""
    calls = (
        ("kwta", "cuda", "float32", "forward", "R=8192 N=4096 p=0.1", (0, 0, 0, 9000)),
        ("kwta", "triton", "bfloat16", "training", "R=8192 N=4096 p=0.1", (0, 0, 0, 30)),
        (
            "grouped_gemm",
            "triton",
            "bfloat16",
            "forward",
            "T=4096 D=256 H=512 E=8 K=2 routing=uniform",
            (4e9, 7e5, 0, 0),
        ),
        ("sinkhorn", "cuda", "float32", "training", "B=4096 n=16 R=20 tau=1.0", (0, 0, 8e8, 0)),
        ("tree_gate", "triton", "float32", "forward", "T=16384 P=768 E=64 K=1", (0, 0, 0, 5e5)),
    )
    found = []
    for index, (op, backend, dtype, direction, shape, (tensor, loop, fp64, special)) in enumerate(calls):
        grown = {
            "blocks": 300 + index, "warp_instructions": 2e6, "loop_instructions": loop, "sectors": 4e5,
            "bytes_read": 7e6, "bytes_written": 3e6, "passes": 6e5, "tensor_flops": tensor,
            **dict.fromkeys(pipes.NAMES, 1e7), "fp64": fp64, "special": special,
        }  # fmt: skip
        each = {"kernel": f"{op}_kernel", "threads": 256, "shared_bytes": 30000, "barriers": 4, **grown}
        second = each | {"kernel": "small", "tensor_flops": 0, "loop_instructions": 0, "bytes_read": 9e7}
        launches = [one | {"full": {name: one[name] for name in grown}} for one in (each, second)]
        flops = counting.flops(op, predict.sizes_in(shape), getattr(torch, dtype), direction)
        found.append({
            "operation": op, "backend": backend, "dtype": dtype, "direction": direction, "capability": 80,
            "shape": shape, "counted_shape": shape, "torch_products": op == "tree_gate", "elements": 100_000,
            "flops": flops,
            "date": "2026-01-02", "sources": "changed" if op == "sinkhorn" else ledger.digest(op, backend, tree),
            "launches": launches,
        })  # fmt: skip
    found.append(found[2] | {"capability": 90, "launches": found[2]["launches"][:1]})
    path = tree / counting.COUNTS
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(found))
    return found
