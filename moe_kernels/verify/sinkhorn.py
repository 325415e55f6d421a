"""Cases of Sinkhorn: tau from 1 down to 1e-7, forbidden entries (-inf), and given row and column sums."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from moe_kernels.cases.call import normal
from moe_kernels.cases.sinkhorn import SINKHORN, shapes
from moe_kernels.verify.operation import Case, Inputs, Operation, Outputs, differentiated


def _cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    many = ((1, 2), (4, 20), (16, 30), (17, 20), (40, 5), (80, 4))
    for n, iterations in ((3, 3), (12, 4), (70, 2)) if small else many:
        sizes = shapes({"B": 3, "n": n})
        # No low tau in float64: rounding errors, which grow with 1 / tau, would exceed the allowed error of 6e-14.
        for tau in (1.0, 0.2) if dtype == torch.float64 else (1.0, 0.05, 1e-3, 1e-7):
            for kind in ("normal", "forbidden"):
                inputs = normal(sizes, dtype, device, generator)
                if kind == "forbidden":
                    forbidden = torch.rand(3, n, n, generator=generator) < 0.3
                    inputs["scores"].masked_fill_(forbidden.to(device), -math.inf)
                inputs |= {"iterations": iterations, "tau": tau}
                yield Case(f"{kind} 3 x {n} x {n}, R={iterations}, tau={tau:g}", inputs)
        rows = torch.rand(3, n, generator=generator) + 0.5
        sums = {"rows": rows.to(dtype).to(device), "columns": rows.flip(1).to(dtype).to(device), "tolerance": 0.01}
        inputs = {**normal(sizes, dtype, device, generator), "iterations": iterations, "tau": 1.0, **sums}
        yield Case(f"sums 3 x {n} x {n}, R={iterations}", inputs)


def _run(inputs: Inputs, backend: str) -> Outputs:
    # For small tau p is nearly a matrix of zeros and ones, and gradients are mostly rounding errors divided by tau.
    return differentiated(inputs, backend, SINKHORN, leaves=None if inputs["tau"] >= 0.05 else ())


OPERATION = Operation(_cases, _run, exact=frozenset(), floor=8.0)
