"""Cases of the grouped GEMM, which gathers its rows from tokens; inputs for expert_mlp and expert_norms."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_kernels.ops import grouped_gemm, plan
from moe_kernels.verify.make_plan import routings
from moe_kernels.verify.operation import Case, Inputs, Operation, Outputs, differentiated

FLOOR = 8.0  # Operation.floor: the order of the sums changes results by several epsilons
SIZES = ((3, 6, 5), (17, 34, 9), (64, 48, 40))  # D, columns of the first product, Dout
LARGE, TOKENS = (512, 512, 512), 300  # sizes as in SIZES, and T
NARROW = (128, 128, 128)


def expert_cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    """Cases with a plan, an activation, the tensors of an expert MLP, and gradients of the outputs."""
    activations, generator = (None, *grouped_gemm.ACTIVATIONS), torch.Generator().manual_seed(0)
    calls = [(*routing, activations[i % len(activations)], SIZES[i % 3]) for i, routing in enumerate(routings(small))]
    if not small:
        experts = torch.randint(2, (TOKENS, 2), generator=generator)
        calls += [("large experts", experts, 2, None, activation, LARGE) for activation in (None, "relu", "swiglu")]
        calls += [
            ("few rows of a large expert", experts[:20] * 0, 1, None, activation, LARGE)
            for activation in (None, "relu")
        ]
        calls += [("narrow experts", experts, 2, None, activation, NARROW) for activation in (None, "gelu", "swiglu")]
    for name, experts, num_experts, capacity, activation, (dim, width, dout) in calls:
        if num_experts > 128:  # slow: the reference computes one expert after the other
            continue
        made = plan.make_plan(experts, num_experts, capacity=capacity, backend="reference").to(device)
        hidden = width // 2 if activation in grouped_gemm.HALVING else width
        sizes = {
            "x": (made.num_tokens, dim),
            "weights": tuple(experts.shape),
            "w_in": (num_experts, dim, width),
            "w_out": (num_experts, hidden, dout),
            "b_in": (num_experts, width),
            "b_out": (num_experts, dout),
            "grad_hidden": (made.num_rows, hidden),
            "grad": (made.num_tokens, dout),
            "grad_norms": (made.num_tokens, num_experts),
        }
        tensors = {each: torch.randn(size, generator=generator).to(dtype).to(device) for each, size in sizes.items()}
        if dim in (LARGE[0], NARROW[0]):  # so that norms stay in the range of float16
            for weight in ("w_in", "w_out"):
                tensors[weight] /= dim**0.5
        inputs = {"plan": made, "activation": activation, **tensors}
        yield Case(f"{name}, {dim} x {width} x {dout}, {activation}", inputs)


def _cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    for name, given in expert_cases(dtype, device, small):
        inputs = {"rows": given["x"], "weight": given["w_in"], "bias": given["b_in"], "grad": given["grad_hidden"]}
        inputs |= {each: getattr(given["plan"], each) for each in ("expert_offsets", "row_token")}
        yield Case(name, inputs | {"activation": given["activation"]})


def _run(inputs: Inputs, backend: str) -> Outputs:
    return differentiated(grouped_gemm.grouped_gemm, inputs, ("rows", "weight", "bias"), ("out",), backend=backend)


OPERATION = Operation(_cases, _run, exact=frozenset(), floor=FLOOR)
