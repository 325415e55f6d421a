"""Times the candidate tiles of Triton's grouped products on this GPU, as MOE_KERNELS_AUTOTUNE=1 does."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from bench.entry import Shape, label
from bench.experts import SHAPES
from bench.registry import ENTRIES
from bench.worker import Worker, WorkerLost

Line = dict[str, Any]
SECONDS = 240  # limit of one call of `timings`, with compilation


def timings(shape: Shape, activation: str) -> list[Line]:
    """Runs a training step of an expert MLP in bfloat16; returns a line for each product and candidate tiles.

    ms: milliseconds; None if the GPU has no room for such tiles.
    """
    import moe_kernels as mk
    from moe_kernels.backends.triton._grouped_configs import timed

    inputs = ENTRIES["expert_mlp"].inputs(shape, torch.bfloat16, "cuda")
    x, w_in, w_out, weights = (inputs[name] for name in ("x", "w_in", "w_out", "weights"))
    if activation == "swiglu":
        w_in = torch.cat([w_in.detach()] * 2, dim=2).requires_grad_()
    timed.clear()
    with mock.patch.dict(os.environ, {"MOE_KERNELS_AUTOTUNE": "1"}):
        y = mk.expert_mlp(x, inputs["plan"], w_in, w_out, weights=weights, activation=activation, backend="triton")
        torch.autograd.grad(y, [x, w_in, w_out, weights], inputs["grad"])
    lines = []
    for key, found in timed.items():
        facts = {"shape": label(shape), "kernel": key[0], "K": key[3], "N": key[4], "activation": activation}
        for tiles, ms in found.items():
            lines.append(facts | {"tiles": list(tiles), "ms": None if ms == math.inf else ms})
    return lines


def sweep() -> Iterator[list[Line]]:
    """`timings` of each uniform shape of the set "aims" and each activation; one line with the error if it fails."""
    with Worker() as worker:
        for shape in SHAPES["aims"]:
            for activation in ("swiglu", "gelu"):
                if shape["routing"] == "uniform":
                    try:
                        yield worker(timings, shape, activation, seconds=SECONDS)
                    except (WorkerLost, RuntimeError) as error:
                        yield [{"shape": label(shape), "activation": activation, "failed": str(error)}]
