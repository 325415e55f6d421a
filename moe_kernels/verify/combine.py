"""Cases of combine, from the same plans and tensors as those of dispatch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_kernels.ops import combine
from moe_kernels.verify.dispatch import moving_cases
from moe_kernels.verify.operation import Case, Inputs, Operation, Outputs, differentiated


def _cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    for name, given in moving_cases(dtype, device, small):
        inputs = {each: given[each] for each in ("rows", "plan", "weights")}
        yield Case(name, inputs | {"grad": given["x"]})


def _run(inputs: Inputs, backend: str) -> Outputs:
    found = differentiated(combine.combine, inputs, ("rows", "weights"), ("y",), backend=backend)
    return found | {"y without weights": combine.combine(inputs["rows"], inputs["plan"], backend=backend)}


OPERATION = Operation(_cases, _run, exact=frozenset(), floor=2.0)
