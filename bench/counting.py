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

from bench import ledger, pipes, registry
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
    units: names of sizes. From the counted to the full shape, counts grow by `scale`, the product of the ratios of
        these sizes.
    fixed: a size with which the rest grows that does not grow with `units`, such as weights with experts. A second
        count, at twice the first unit, tells both parts apart.
    torch_products: torch computes products with the weights, in kernels that are not counted.
    capabilities: of Triton's code.
    """

    operation: str
    entry: Entry
    shape: Shape
    small: Shape
    units: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = (FP32,)
    directions: tuple[str, ...] = ("forward", "training")
    backends: tuple[str, ...] = ledger.GPU_BACKENDS
    fixed: str = ""
    torch_products: bool = False
    capabilities: tuple[int, ...] = (80,)

    @property
    def counted_shape(self) -> Shape:
        return {**self.shape, **self.small}

    def scale(self) -> float:
        return prod(self.shape[name] / self.counted_shape[name] for name in self.units)

    @property
    def twice(self) -> Case:
        first = self.units[0]
        return replace(self, small={**self.small, first: 2 * self.counted_shape[first]})


def cases() -> list[Case]:
    known, qwen = registry.ENTRIES, {"T": 32768, "D": 2048, "H": 768, "E": 128, "K": 8, "routing": "uniform"}
    rows = {name: size for name, size in qwen.items() if name != "H"}
    few, both = {"T": 128, "K": 8, "E": 8}, (FP32, BF16)
    competing, tree = {"T": 24576, "D": 352, "H": 352, "E": 16}, {"T": 16384, "P": 768, "E": 64, "K": 1}
    few_winners = {"T": 8, "D": 4096, "N": 14336, "p": 0.1}
    gelu, priority, choice, sums = (EXTRA[name] for name in ("gelu", "priority", "choice", "sums"))
    scored = {**rows, "D": 1, "scores": "sigmoid"}
    products: dict[str, Any] = {"fixed": "E", "capabilities": (80, 90)}
    narrow = {**qwen, "D": 352, "H": 352}
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
        Case("kwta_linear", known["kwta_linear"], few_winners, {"T": 1}, ("T",), both, forward),
        Case("topk_gate", known["topk_gate"], {**rows, "D": 1}, {"T": 256}, ("T",), both),
        Case("topk_gate", EXTRA["scored"], scored, {"T": 256}, ("T",), both),
        Case("make_plan", known["make_plan"], {**rows, "D": 1}, {"T": 2048}, ("T",), (FP32,), forward),
        Case("plan_priority", priority, {"T": 8192, "E": 64}, {"T": 256}, ("T",), (FP32,), forward),
        Case("plan_expert_choice", choice, {"T": 8192, "E": 64}, {"T": 2048}, ("T",), (FP32,), forward),
        Case("dispatch", known["dispatch"], rows, {"T": 256}, ("T",), both),
        Case("combine", known["combine"], rows, {"T": 256}, ("T",), both),
        Case("grouped_gemm", known["grouped_gemm"], qwen, few, ("T",), (BF16,), **products),
        Case("grouped_gemm", gelu, {**qwen, "activation": "gelu"}, few, ("T",), (BF16,), **products),
        Case(
            "grouped_gemm",
            known["grouped_gemm"],
            narrow,
            few,
            ("T",),
            (FP32,),
            forward,
            fixed="E",
        ),
        Case("expert_mlp", known["expert_mlp"], qwen, few, ("T",), (BF16,), **products),
        Case("expert_norms", known["expert_norms"], competing, {"T": 256, "E": 2}, ("T", "E"), (BF16,), fixed="E"),
        Case("sinkhorn", known["sinkhorn"], *sinkhorn(65536, 4, 20, 512)),
        Case("sinkhorn", known["sinkhorn"], *sinkhorn(4096, 16, 50, 16)),
        Case("sinkhorn", known["sinkhorn"], *sinkhorn(4096, 64, 50, 2)),
        Case("sinkhorn", known["sinkhorn"], *sinkhorn(64, 256, 20, 1), backends=("triton",)),
        Case("sinkhorn", sums, *sinkhorn(4096, 16, 20, 16, sums="given")),
        Case("sinkhorn", sums, *sinkhorn(64, 128, 20, 1, sums="given"), backends=("triton",)),
        tree_gate(shape=tree, small={"T": 128}, dtypes=both),
        tree_gate(shape={**tree, "K": 4}, small={"T": 128}),
        tree_gate(shape={**tree, "E": 48}, small={"T": 128}, dtypes=both),
        tree_gate(shape={**tree, "E": 1024}, small={"T": 16}),
        tree_gate(shape={**tree, "E": 1000}, small={"T": 16}, dtypes=both, backends=("cuda",)),
        tree_gate(shape={**tree, "E": 5}, small={"T": 128}, dtypes=both, directions=forward),
        Case("tree_route", known["tree_route"], tree, {"T": 128}, ("T",), both, forward),
    ]


def entry_of(operation: str) -> Entry:
    return next(case.entry for case in cases() if case.operation == operation)


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


def count(
    case: Case, backend: str, dtype: torch.dtype, direction: str, session: Any, capability: int = 80
) -> dict[str, Any]:
    """Executes one call, twice if a part of its counts is fixed; returns the counts of each of its launches."""
    launches, elements = _launches(case, backend, dtype, direction, session)
    if case.fixed:
        twice, _ = _launches(case.twice, backend, dtype, direction, session)
        ratio = case.shape[case.fixed] / case.counted_shape[case.fixed]
        pairs = zip(launches, twice, strict=True)
        full = [_extrapolated(one, two, ratio, case.scale()) for one, two in pairs]
    else:
        full = [{name: n * case.scale() for name, n in each.items() if name in GROWING} for each in launches]
    return {
        "operation": case.operation,
        "backend": backend,
        "dtype": dtype_name(dtype),
        "direction": direction,
        "capability": capability,
        "shape": label(case.shape),
        "counted_shape": label(case.counted_shape),
        "torch_products": case.torch_products,
        "elements": elements,
        "flops": flops(case.operation, case.shape, dtype, direction),
        "date": datetime.date.today().isoformat(),
        "sources": ledger.digest(case.operation, backend),
        "launches": [each | {"full": one} for each, one in zip(launches, full, strict=True)],
    }


def flops(operation: str, shape: Shape, dtype: torch.dtype, direction: str) -> float:
    """FLOPs of a call, which grow with its first size, from a call with at most 64 of these."""
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    entry, first = entry_of(operation), next(iter(shape))
    small = {**shape, first: min(shape[first], 64)}
    if {"E", "K", "H"} <= shape.keys():  # rows, not experts, have FLOPs: weights of few experts are enough
        small["E"] = shape["K"]
    with FlopCounterMode(display=False) as counter:
        entry.kernel("cpu")[direction](entry.inputs(small, dtype, "cpu"))
    return counter.get_total_flops() * shape[first] / small[first]


# Counts of a launch that grow with its shape.
GROWING = (
    "blocks", "warp_instructions", "loop_instructions", "sectors", "bytes_read", "bytes_written", "passes",
    "tensor_flops", *pipes.NAMES,
)  # fmt: skip


def _extrapolated(one: dict[str, Any], two: dict[str, Any], ratio: float, scale: float) -> dict[str, float]:
    """Each count at the full shape, from a part that grows by `ratio` and one that grows by `scale` and doubles from
    `one` to `two`."""
    if any(one[name] != two[name] for name in ("kernel", "threads", "shared_bytes")):
        raise RuntimeError(f"bench predict: {one['kernel']} and {two['kernel']} are not the same launch")
    fixed = {name: max(2 * one[name] - two[name], 0) for name in GROWING}
    return {name: fixed[name] * ratio + (one[name] - fixed[name]) * scale for name in GROWING}


def _launches(
    case: Case, backend: str, dtype: torch.dtype, direction: str, session: Any
) -> tuple[list[dict[str, Any]], int]:
    """The counts of each launch at the counted shape, and the elements of the largest input."""
    torch.manual_seed(0)
    inputs = case.entry.inputs(case.counted_shape, dtype, "cpu")
    with session.recorded() as results:
        case.entry.kernel(backend)[direction](inputs)
    elements = max(each.numel() for each in inputs.values() if isinstance(each, torch.Tensor))
    return [_launch(each) for each in results], elements


def _launch(result: Any) -> dict[str, Any]:
    from tests.ptx import counters

    found = counters.count(result)
    kept = ("threads", "shared_bytes", "warp_instructions", "sectors", "bytes_read", "bytes_written", "barriers")
    return {
        "kernel": re.sub(r"^_+|_$", "", re.split(r"[<( ]", str(found["kernel"]))[0]),
        "blocks": prod(found["grid"]),
        **{name: found[name] for name in kept},
        "passes": found["bank_passes"],
        "loop_instructions": pipes.product_loop(result),
        "tensor_flops": pipes.tensor_flops(result),
        **pipes.lanes(result),
    }


def counted(wanted: Iterable[Case], backends: Sequence[str] = ledger.GPU_BACKENDS) -> Iterator[dict[str, Any]]:
    from moe_kernels import backends as choice

    with executor() as session:
        from tests.ptx import triton_launch

        for case in wanted:
            for backend in (each for each in case.backends if each in backends):
                for dtype in case.dtypes:
                    if choice.missing(backend, case.operation) or choice.unsupported(
                        backend, case.operation, "cpu", dtype
                    ):
                        continue
                    for capability in case.capabilities if backend == "triton" else (80,):
                        with triton_launch.capability(capability):
                            for direction in case.directions:
                                yield count(case, backend, dtype, direction, session, capability)


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
