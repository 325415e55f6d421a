"""Cases of dispatch and combine: for every routing a plan and tensors of 1, 17 or 64 columns."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from moe_kernels.cases.call import normal
from moe_kernels.cases.combine import COMBINE
from moe_kernels.cases.dispatch import DISPATCH
from moe_kernels.cases.routing import shapes
from moe_kernels.ops import plan
from moe_kernels.verify.make_plan import routings
from moe_kernels.verify.operation import Case, Inputs, Operation, Outputs, differentiated


def _cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for index, (name, experts, num_experts, capacity) in enumerate(routings(small)):
        made = plan.make_plan(experts, num_experts, capacity=capacity, backend="reference").to(device)
        sizes = {"T": made.num_tokens, "R": made.num_rows, "D": (1, 17, 64)[index % 3], "K": experts.shape[1]}
        tensors = normal(shapes(sizes), dtype, device, generator)
        yield Case(f"{name}, D={sizes['D']}", {"plan": made, **tensors})


def _combine(inputs: Inputs, backend: str) -> Outputs:
    found = differentiated(inputs, backend, COMBINE)
    return found | {"y without weights": COMBINE.run({**inputs, "weights": None}, backend)}


TO_ROWS = Operation(_cases, partial(differentiated, call=DISPATCH), exact=frozenset({"rows"}), floor=1.0)
FROM_ROWS = Operation(_cases, _combine, exact=frozenset(), floor=2.0)
