"""Calls whose Triton kernels are compiled ahead of time.

First come the calls of bench/counting.py, then calls for which Triton compiles other code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from bench import counting
from bench.entry import Entry, Inputs, Shape, through_autograd
from bench.registry import ENTRIES
from moe_kernels import backends
from moe_kernels.cases.expert_mlp import EXPERT_MLP
from moe_kernels.cases.plan import MAKE_PLAN
from moe_kernels.cases.topk_gate import TOPK_GATE
from moe_kernels.cases.tree_gate import TREE_GATE

FP32, BF16, FP16 = (torch.float32,), (torch.bfloat16,), (torch.float16,)


class Call(NamedTuple):
    """A call of an operation with the bench's inputs."""

    entry: Entry
    op: str
    shape: Shape
    dtype: torch.dtype
    direction: str

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={n}" for name, n in self.shape.items() if name != "routing")
        return f"{self.op} {self.direction} {sizes}"

    def run(self) -> None:
        self.entry.kernel("triton")[self.direction](self.entry.inputs(self.shape, self.dtype, "cpu"))


def calls() -> Iterator[Call]:
    for case in counting.cases():
        if "triton" in case.backends and not backends.missing("triton", case.operation):
            for dtype in case.dtypes:
                for direction in case.directions:
                    yield Call(case.entry, case.operation, case.counted_shape, dtype, direction)
    yield from _more("kwta", "training", FP32 + BF16, "R=4 N=16384 p=0.1")
    yield from _more("kwta", "forward", FP16, "R=4 N=4096 p=0.1")
    yield from _more("kwta", "forward", BF16, "R=2 N=40000 p=0.1")
    yield from _more("topk_gate", "training", FP32, "T=32 D=1 E=8 K=2", "T=8 D=1 E=1024 K=2")
    yield from _more(_SOFTMAX_FIRST, "training", FP32, "T=32 D=1 E=8 K=2")
    yield from _more(_LONG_INDICES, "forward", FP32, "T=32 D=1 E=8 K=2")
    yield from _more("dispatch", "forward", FP32 + BF16, "T=32 D=64 E=8 K=2")
    yield from _more("combine", "training", FP32 + BF16, "T=32 D=64 E=8 K=2", "T=32 D=8192 E=8 K=2")
    yield from _more("grouped_gemm", "training", FP32 + BF16, "T=32 D=64 H=512 E=2 K=2")
    yield from _more("grouped_gemm", "training", BF16, "T=32 D=50 H=70 E=2 K=2", "T=512 D=64 H=64 E=2 K=2")
    yield from _more("grouped_gemm", "forward", FP16, "T=512 D=512 H=512 E=2 K=2")
    yield from _more("grouped_gemm", "training", BF16, "T=512 D=40 H=72 E=2 K=2")
    yield from _more(_GATED, "forward", FP32, "T=32 D=64 H=50 E=2 K=2")
    yield from _more(_GATED, "forward", BF16, "T=32 D=64 H=256 E=2 K=2")
    yield from _more(_GATED, "training", FP32 + BF16, "T=32 D=64 H=256 E=2 K=2")
    yield from _more(_GATED, "training", BF16, *(f"T=512 D=64 H={hidden} E=2 K=2" for hidden in (50, 64, 72, 512)))
    yield from _more("expert_norms", "forward", FP32, "T=64 D=64 H=64 E=2")
    yield from _more("sinkhorn", "training", BF16, "B=4 n=16 R=2 tau=1.0", "B=4 n=256 R=2 tau=1.0")
    yield from _more("sinkhorn", "training", FP32, "B=1 n=1024 R=2 tau=1.0")
    yield from _more(_SUMS, "training", FP32, "B=4 n=1024 R=2 tau=1.0")
    yield from _more("tree_gate", "training", FP32 + BF16, "T=32 P=64 E=8 K=1")
    yield from _more("tree_gate", "training", FP32, "T=32 P=64 E=1024 K=1")
    yield from _more(_LEAF_PROBS, "training", FP32, "T=32 P=64 E=64 K=1")


def _more(
    what: str | tuple[str, Entry], direction: str, dtypes: tuple[torch.dtype, ...], *shapes: str
) -> Iterator[Call]:
    name, entry = (what, ENTRIES[what]) if isinstance(what, str) else what
    for sizes in shapes:
        shape = {size: float(n) if "." in n else int(n) for size, n in re.findall(r"(\w+)=([\d.]+)", sizes)}
        yield from (Call(entry, name, {**shape, "routing": "uniform"}, dtype, direction) for dtype in dtypes)


def _variant(op: str, variant: str, forward: Callable[..., object]) -> tuple[str, Entry]:
    """A name, and a copy of the bench's entry of `op` that calls `forward` instead of the operation."""
    base = ENTRIES[op]
    calls = lambda backend: through_autograd(partial(forward, backend=backend), base.leaves, base.grad)  # noqa: E731
    return f"{op} {variant}", replace(base, kernel=calls)


def _gated(inputs: Inputs, backend: str) -> object:
    given = {**inputs, "w_in": torch.cat([inputs["w_in"]] * 2, -1), "activation": "swiglu"}
    return EXPERT_MLP.run(given, backend)


def _leaf_probs(inputs: Inputs, backend: str) -> object:
    gates, leaf_probs = TREE_GATE.run(inputs, backend)
    return gates + leaf_probs.sum(1)


def _softmax_first(inputs: Inputs, backend: str) -> object:
    return TOPK_GATE.run({**inputs, "order": "softmax_topk"}, backend)[0]


def _long_indices(inputs: Inputs, backend: str) -> object:
    return MAKE_PLAN.run({**inputs, "experts": inputs["experts"].long()}, backend).slot_row


_GATED = _variant("expert_mlp", "gated", _gated)
_LEAF_PROBS = _variant("tree_gate", "leaf_probs", _leaf_probs)
_SOFTMAX_FIRST = _variant("topk_gate", "softmax first", _softmax_first)
_LONG_INDICES = _variant("make_plan", "64-bit", _long_indices)
_SUMS = ("sinkhorn sums", counting.EXTRA["sums"])
