"""Cases of dispatch, and the plans and tensors that its cases share with those of combine."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_kernels.ops import dispatch, plan
from moe_kernels.verify.make_plan import routings
from moe_kernels.verify.operation import Case, Inputs, Operation, Outputs, differentiated


def moving_cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    """Cases with a plan, tokens x (T, D), rows (R, D) and weights (T, K); D is 1, 17 or 64."""
    generator = torch.Generator().manual_seed(0)
    for index, (name, experts, num_experts, capacity) in enumerate(routings(small)):
        made = plan.make_plan(experts, num_experts, capacity=capacity, backend="reference").to(device)
        dim = (1, 17, 64)[index % 3]
        sizes = {"x": (made.num_tokens, dim), "rows": (made.num_rows, dim), "weights": experts.shape}
        tensors = {each: torch.randn(size, generator=generator).to(dtype).to(device) for each, size in sizes.items()}
        yield Case(f"{name}, D={dim}", {"plan": made, **tensors})


def _cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    for name, given in moving_cases(dtype, device, small):
        yield Case(name, {"x": given["x"], "plan": given["plan"], "grad": given["rows"]})


def _run(inputs: Inputs, backend: str) -> Outputs:
    return differentiated(dispatch.dispatch, inputs, ("x",), ("rows",), backend=backend)


OPERATION = Operation(_cases, _run, exact=frozenset({"rows"}), floor=1.0)
