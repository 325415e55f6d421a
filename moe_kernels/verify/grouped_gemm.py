"""Cases of grouped_gemm, expert_mlp and expert_norms: every routing and activation, few and many rows of an expert."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from moe_kernels.cases.call import normal
from moe_kernels.cases.expert_mlp import EXPERT_MLP
from moe_kernels.cases.expert_norms import EXPERT_NORMS
from moe_kernels.cases.grouped_gemm import GROUPED_GEMM, shapes
from moe_kernels.ops import grouped_gemm, plan
from moe_kernels.sizes import CLAMPED
from moe_kernels.verify.make_plan import routings
from moe_kernels.verify.operation import Case, Operation, differentiated

FLOOR = 8.0  # Operation.floor: the order of the sums changes results by several epsilons
SIZES = ((3, 6, 5), (17, 34, 9), (64, 48, 40))  # D, columns of the first product, Dout
LARGE, TOKENS = (512, 512, 512), 300  # sizes as in SIZES, and T
NARROW = (128, 128, 128)


def _cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
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
        sizes = {"T": made.num_tokens, "R": made.num_rows, "K": experts.shape[1], "E": num_experts, "D": dim, "O": dout}
        sizes |= {"H": width // 2 if activation in grouped_gemm.HALVING else width}
        tensors = normal(shapes({**sizes, "activation": activation, "bias": True}), dtype, device, generator)
        if dim in (LARGE[0], NARROW[0]):  # so that norms stay in the range of float16
            for weight in ("w_in", "w_out"):
                tensors[weight] /= dim**0.5
        inputs = {"plan": made, "activation": activation, **tensors}
        yield Case(f"{name}, {dim} x {width} x {dout}, {activation}", inputs)


def _norms_cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    """Cases of at most 8 experts, as every expert computes all tokens. expert_norms refuses swiglu_clamped."""
    for name, given in _cases(dtype, device, small):
        if given["plan"].num_experts <= 8 and given["activation"] != CLAMPED:
            yield Case(name, given)


GEMM, MLP, NORMS = (
    Operation(cases, partial(differentiated, call=call), exact=frozenset(), floor=FLOOR)
    for cases, call in ((_cases, GROUPED_GEMM), (_cases, EXPERT_MLP), (_norms_cases, EXPERT_NORMS))
)
