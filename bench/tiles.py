"""Times the tiles of the grouped products on this GPU, as MOE_KERNELS_AUTOTUNE=1 does, at the shapes of the aims.

The shipped ones are predicted by arithmetic (see _grouped_configs); this is what confirms or corrects them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bench.apart import Apart, Lost
from bench.entry import Shape, label
from bench.experts import SHAPES
from bench.registry import ENTRIES

Line = dict[str, Any]
SECONDS = 240  # a shape's first time compiles some 30 kernels at 3 to 4 s each


def timings(shape: Shape, activation: str) -> list[Line]:
    """Milliseconds of every tile of the products that one training step of an expert MLP in bfloat16 takes."""
    import moe_kernels as mk
    from moe_kernels.backends.triton._grouped_launch import timed

    inputs = ENTRIES["expert_mlp"].inputs(shape, torch.bfloat16, "cuda")
    x, w_in, w_out, weights = (inputs[f"leaf_{name}"] for name in ("x", "w_in", "w_out", "weights"))
    if activation == "swiglu":
        w_in = torch.cat([w_in.detach()] * 2, dim=2).requires_grad_()
    timed.clear()
    with _autotuned():
        y = mk.expert_mlp(x, inputs["plan"], w_in, w_out, weights=weights, activation=activation, backend="triton")
        torch.autograd.grad(y, [x, w_in, w_out, weights], inputs["grad"])
    return [
        {
            "shape": label(shape),
            "kernel": key[0],
            "K": key[3],
            "N": key[4],
            "activation": activation,
            "tiles": list(tiles),
        }
        | {"ms": None if milliseconds == math.inf else milliseconds}
        for key, found in timed.items()
        for tiles, milliseconds in found.items()
    ]


def sweep() -> Iterator[list[Line]]:
    """`timings` of the aims' shapes on uniform routing; a shape whose tiles lose the GPU is left out by name."""
    with Apart() as apart:
        for shape in SHAPES["aims"]:
            for activation in ("swiglu", "gelu"):
                if shape["routing"] == "uniform":
                    try:
                        yield apart(timings, shape, activation, seconds=SECONDS)
                    except (Lost, RuntimeError) as error:
                        yield [{"shape": label(shape), "activation": activation, "failed": str(error)}]


@contextmanager
def _autotuned() -> Iterator[None]:
    before = os.environ.get("MOE_KERNELS_AUTOTUNE")
    os.environ["MOE_KERNELS_AUTOTUNE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["MOE_KERNELS_AUTOTUNE"]
        else:
            os.environ["MOE_KERNELS_AUTOTUNE"] = before
