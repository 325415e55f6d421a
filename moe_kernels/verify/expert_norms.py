"""Expert norms, on the tokens and experts of the grouped GEMM's inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_kernels.library import CLAMPED
from moe_kernels.ops import expert_norms
from moe_kernels.verify.grouped_gemm import FLOOR, expert_cases, leaves_of, named_gradients
from moe_kernels.verify.operation import Case, Inputs, Operation, Outputs


def _run(inputs: Inputs, backend: str) -> Outputs:
    leaves = leaves_of(inputs, "x", "w_in", "w_out", "b_in", "b_out")
    norms = expert_norms.expert_norms(activation=inputs["activation"], backend=backend, **leaves)
    return {"norms": norms, **named_gradients(norms, leaves, inputs["grad_norms"])}


def _cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    """Cases with few experts, as every expert computes all tokens; no swiglu_clamped, which expert_norms refuses."""
    for case in expert_cases(dtype, device, small):
        if case.inputs["plan"].num_experts <= 8 and case.inputs["activation"] != CLAMPED:
            yield case


OPERATION = Operation(_cases, _run, exact=frozenset(), floor=FLOOR)
