"""Cases of expert norms, with the tokens and experts of verify.grouped_gemm.expert_cases."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_kernels.ops import expert_norms
from moe_kernels.sizes import CLAMPED
from moe_kernels.verify.grouped_gemm import FLOOR, expert_cases
from moe_kernels.verify.operation import Case, Inputs, Operation, Outputs, differentiated

LEAVES = ("x", "w_in", "w_out", "b_in", "b_out")


def _cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    """Cases of at most 8 experts, as every expert computes all tokens. expert_norms refuses swiglu_clamped."""
    for name, given in expert_cases(dtype, device, small):
        if given["plan"].num_experts <= 8 and given["activation"] != CLAMPED:
            yield Case(name, {each: given[each] for each in (*LEAVES, "activation")} | {"grad": given["grad_norms"]})


def _run(inputs: Inputs, backend: str) -> Outputs:
    return differentiated(expert_norms.expert_norms, inputs, LEAVES, ("norms",), backend=backend)


OPERATION = Operation(_cases, _run, exact=frozenset(), floor=FLOOR)
