"""Counts the instructions and bytes of the GPU kernels without a GPU: tests/ptx executes their PTX on small shapes.

bench/predict.py scales the counts to full shapes, by the factors that `Case` computes.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from bench import ledger, registry
from bench.entry import Entry, Inputs, Shape, entry, label
from moe_kernels.cases.call import Call
from moe_kernels.cases.grouped_gemm import GROUPED_GEMM
from moe_kernels.cases.plan import PLAN_EXPERT_CHOICE, PLAN_PRIORITY
from moe_kernels.cases.sinkhorn import SINKHORN
from moe_kernels.cases.topk_gate import TOPK_GATE
from moe_kernels.verify import dtype_name

COUNTS = Path("bench/results/ptx/counts.json")  # below the root of a checkout
FP32, BF16 = torch.float32, torch.bfloat16


class NoExecutor(RuntimeError):
    """The executor of PTX cannot run here."""


@dataclass(frozen=True)
class Case:
    """An operation at the full shape of its prediction, and at the smaller shape that is executed and counted.

    small: the sizes of the counted shape that differ from the full one.
    units: names of sizes. From the counted to the full shape, instructions and FLOPs grow by `scale`, the product of
        the ratios of these sizes. Bytes grow by `bytes_scale`, the ratio of the least bytes.
    own_bytes: bytes grow by `scale` too, since `entry.least_bytes` does not describe this case.
    torch_products: torch computes products with the weights, in kernels that are not counted. So launches without
        matrix instructions read no weights, and their bytes grow by `scale` too.
    """

    operation: str
    entry: Entry
    shape: Shape
    small: Shape
    units: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = (FP32,)
    directions: tuple[str, ...] = ("forward", "training")
    backends: tuple[str, ...] = ledger.GPU_BACKENDS
    own_bytes: bool = False
    torch_products: bool = False

    @property
    def counted_shape(self) -> Shape:
        return {**self.shape, **self.small}

    def scale(self) -> float:
        return prod(self.shape[name] / self.counted_shape[name] for name in self.units)

    def bytes_scale(self, dtype: torch.dtype, direction: str) -> float:
        if self.own_bytes:
            return self.scale()
        full, counted = (self.entry.least_bytes(each, dtype, direction) for each in (self.shape, self.counted_shape))
        return full / counted


def cases() -> list[Case]:
    known, qwen = registry.ENTRIES, {"T": 32768, "D": 2048, "H": 768, "E": 128, "K": 8, "routing": "uniform"}
    rows = {name: size for name, size in qwen.items() if name != "H"}
    few, both = {"T": 256, "K": 2, "E": 2}, (FP32, BF16)
    competing, tree = {"T": 24576, "D": 352, "H": 352, "E": 16}, {"T": 16384, "P": 768, "E": 64, "K": 1}
    gelu, priority, choice, sums = (EXTRA[name] for name in ("gelu", "priority", "choice", "sums"))
    scored = {**rows, "D": 1, "scores": "sigmoid"}
    forward, tree_gate = ("forward",), partial(Case, "tree_gate", known["tree_gate"], units=("T",), torch_products=True)

    def sinkhorn(
        batch: int, n: int, iterations: int, counted: int, **more: str
    ) -> tuple[Shape, Shape, tuple[str, ...]]:
        return {"B": batch, "n": n, "R": iterations, "tau": 1.0, **more}, {"B": counted}, ("B",)

    return [
        Case("kwta", known["kwta"], {"R": 8192, "N": 4096, "p": 0.1}, {"R": 64}, ("R",), both),
        Case("kwta", known["kwta"], {"R": 8192, "N": 4095, "p": 0.1}, {"R": 64}, ("R",), (BF16,)),
        Case("kwta", known["kwta"], {"R": 8192, "N": 512, "p": 0.5}, {"R": 64}, ("R",), both),
        Case("kwta", known["kwta"], {"R": 8192, "N": 100, "p": 0.1}, {"R": 64}, ("R",), both),
        Case("kwta", known["kwta"], {"R": 8192, "N": 20000, "p": 0.1}, {"R": 4}, ("R",), both, forward),
        Case("topk_gate", known["topk_gate"], {**rows, "D": 1}, {"T": 256}, ("T",), both),
        Case("topk_gate", EXTRA["scored"], scored, {"T": 256}, ("T",), both),
        Case("make_plan", known["make_plan"], {**rows, "D": 1}, {"T": 2048}, ("T",), (FP32,), forward),
        Case("plan_priority", priority, {"T": 8192, "E": 64}, {"T": 256}, ("T",), (FP32,), forward, own_bytes=True),
        Case("plan_expert_choice", choice, {"T": 8192, "E": 64}, {"T": 2048}, ("T",), (FP32,), forward, own_bytes=True),
        Case("dispatch", known["dispatch"], rows, {"T": 256}, ("T",), both),
        Case("combine", known["combine"], rows, {"T": 256}, ("T",), both),
        Case("grouped_gemm", known["grouped_gemm"], qwen, few, ("T", "K"), (BF16,)),
        Case("grouped_gemm", gelu, {**qwen, "activation": "gelu"}, few, ("T", "K"), (BF16,)),
        Case("grouped_gemm", known["grouped_gemm"], {**qwen, "D": 352, "H": 352}, few, ("T", "K"), (FP32,), forward),
        Case("expert_mlp", known["expert_mlp"], qwen, few, ("T", "K"), (BF16,)),
        Case("expert_norms", known["expert_norms"], competing, {"T": 256, "E": 2}, ("T", "E"), (BF16,)),
        Case("sinkhorn", known["sinkhorn"], *sinkhorn(65536, 4, 20, 512)),
        Case("sinkhorn", known["sinkhorn"], *sinkhorn(4096, 16, 50, 16)),
        Case("sinkhorn", known["sinkhorn"], *sinkhorn(4096, 64, 50, 2)),
        Case("sinkhorn", known["sinkhorn"], *sinkhorn(64, 256, 20, 1), backends=("triton",)),
        Case("sinkhorn", sums, *sinkhorn(4096, 16, 20, 16, sums="given"), own_bytes=True),
        Case("sinkhorn", sums, *sinkhorn(64, 128, 20, 1, sums="given"), own_bytes=True, backends=("triton",)),
        tree_gate(shape=tree, small={"T": 128}, dtypes=both),
        tree_gate(shape={**tree, "K": 4}, small={"T": 128}),
        tree_gate(shape={**tree, "E": 48}, small={"T": 128}, dtypes=both),
        tree_gate(shape={**tree, "E": 1024}, small={"T": 16}),
        tree_gate(shape={**tree, "E": 1000}, small={"T": 16}, dtypes=both, backends=("cuda",)),
        tree_gate(shape={**tree, "E": 5}, small={"T": 128}, dtypes=both, directions=forward),
        Case("tree_route", known["tree_route"], tree, {"T": 128}, ("T",), both, forward),
    ]


def _gelu_inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    found = registry.ENTRIES["grouped_gemm"].inputs(shape, dtype, device)
    bias = torch.randn(shape["E"], shape["H"], device=device).to(dtype).requires_grad_()
    return {**found, "b_in": bias, "activation": "gelu"}


def _sums_inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    found = registry.ENTRIES["sinkhorn"].inputs(shape, dtype, device)
    rows, columns = (torch.rand(shape["B"], shape["n"], device=device) + 0.5 for _ in range(2))
    return {**found, "rows": rows, "columns": columns, "tolerance": 1e-9}


def _weights(inputs: Inputs, backend: str, call: Call) -> object:
    return call.run(inputs, backend)[1]


def _of_scores(call: Call) -> Entry:
    return entry(replace(call, leaves=()), {}, forward=partial(_weights, call=call), shapes={})


def _scored_inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    """As DeepSeek-V3's router: sigmoid scores, a bias, the best half of 8 groups."""
    bias = torch.randn(shape["E"], generator=torch.Generator().manual_seed(0)) / 10
    rule = {"scores": "sigmoid", "bias": bias.to(device), "groups": (8, 4), "renormalise": True, "scale": 2.5}
    return TOPK_GATE.inputs(shape, dtype, device) | rule


EXTRA = {
    "scored": entry(replace(TOPK_GATE, inputs=_scored_inputs), {}, shapes={}),
    "gelu": entry(replace(GROUPED_GEMM, leaves=("x", "w_in", "b_in"), inputs=_gelu_inputs), {}, shapes={}),
    "priority": _of_scores(PLAN_PRIORITY),
    "choice": _of_scores(PLAN_EXPERT_CHOICE),
    "sums": entry(replace(SINKHORN, inputs=_sums_inputs), {}, shapes={}),
}


@contextlib.contextmanager
def executor() -> Iterator[Any]:
    """In the block Triton and CUDA kernels take CPU tensors, and tests/ptx executes their PTX.

    For Triton's kernels this does not end with the block. Yields the module `session` of tests/ptx.

    Raises:
        NoExecutor: no tests/ptx here, no Triton, Triton imported with TRITON_INTERPRET=1, or no nvcc.
    """
    if not (ledger.ROOT / "tests" / "ptx" / "executor").is_dir():
        raise NoExecutor("counting runs compiled PTX on the executor in tests/ptx: it needs a checkout of the sources")
    if importlib.util.find_spec("triton") is None:
        raise NoExecutor("counting runs compiled PTX, but Triton is not installed")
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise NoExecutor("counting runs compiled PTX, but Triton was imported with TRITON_INTERPRET=1: set it to 0")
    os.environ["TRITON_INTERPRET"] = "0"
    if str(ledger.ROOT) not in sys.path:
        sys.path.insert(0, str(ledger.ROOT))
    from tests.ptx import cuda_launch, session, triton_launch

    if cuda_launch.unavailable():
        raise NoExecutor(f"counting compiles csrc/cuda: {cuda_launch.unavailable()}")
    triton_launch.install()
    with cuda_launch.use():
        yield session


def count(case: Case, backend: str, dtype: torch.dtype, direction: str, session: Any) -> dict[str, Any]:
    """Executes one call; returns the counts of each of its launches, and the factors to the full shape."""
    torch.manual_seed(0)
    inputs = case.entry.inputs(case.counted_shape, dtype, "cpu")
    with session.recorded() as results:
        case.entry.kernel(backend)[direction](inputs)
    launches = [_launch(each) for each in results]
    if case.torch_products:
        launches = [each if each["tensor_flops"] else each | {"bytes_grow": case.scale()} for each in launches]
    return {
        "operation": case.operation,
        "backend": backend,
        "dtype": dtype_name(dtype),
        "direction": direction,
        "shape": label(case.shape),
        "counted_shape": label(case.counted_shape),
        "grows": case.scale(),
        "bytes_grow": case.bytes_scale(dtype, direction),
        "elements": max(each.numel() for each in inputs.values() if isinstance(each, torch.Tensor)),
        "date": datetime.date.today().isoformat(),
        "sources": ledger.digest(case.operation, backend),
        "launches": launches,
    }


def _launch(result: Any) -> dict[str, Any]:
    from tests.ptx import counters

    found = counters.count(result)
    kept = ("warp_instructions", "instructions", "sectors", "ideal_sectors", "bytes_read", "bytes_written", "barriers")
    flops = 0
    for text, runs in zip(result.kernel.texts, result.counters["runs"], strict=False):
        shape = re.search(r"mma\S*\.m(\d+)n(\d+)k(\d+)\.", text)
        flops += int(runs) * 2 * prod(map(int, shape.groups())) if shape else 0
    names = {"kernel": re.sub(r"^_+|_$", "", re.split(r"[<( ]", str(found["kernel"]))[0])}
    return names | {name: found[name] for name in kept} | {"tensor_flops": flops}


def counted(wanted: Iterable[Case], backends: Sequence[str] = ledger.GPU_BACKENDS) -> Iterator[dict[str, Any]]:
    from moe_kernels import backends as choice

    with executor() as session:
        for case in wanted:
            for backend in (each for each in case.backends if each in backends):
                for dtype in case.dtypes:
                    if choice.missing(backend, case.operation) or choice.unsupported(
                        backend, case.operation, "cpu", dtype
                    ):
                        continue
                    for direction in case.directions:
                        yield count(case, backend, dtype, direction, session)


def verified(
    ops: Iterable[str] = (), kernels: Sequence[str] = ledger.GPU_BACKENDS
) -> dict[str, dict[str, dict[str, str]]]:
    """operation -> backend -> date and digest of the sources, if `verify` is "ok" in all dtypes that ran."""
    from moe_kernels import verify

    with executor():
        found: dict[str, dict[str, list[verify.Row]]] = {}
        for row in verify.verify(ops, kernels):
            if row.verdict != "not run":
                found.setdefault(row.operation, {}).setdefault(row.backend, []).append(row)
    today = datetime.date.today().isoformat()
    return {
        op: {
            backend: {"date": today, "sources": ledger.digest(op, backend)}
            for backend, rows in backends.items()
            if all(row.verdict == "ok" for row in rows)
        }
        for op, backends in found.items()
    }


def write(counts: list[dict[str, Any]], root: Path = ledger.ROOT) -> Path:
    path = root / COUNTS
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(each) for each in counts) + "\n]\n")
    return path


def read(root: Path = ledger.ROOT) -> list[dict[str, Any]]:
    path = root / COUNTS
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return found
