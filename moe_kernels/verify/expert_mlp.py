"""Cases of the expert MLP, from verify.grouped_gemm.expert_cases."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_kernels.ops import expert_mlp
from moe_kernels.verify.grouped_gemm import FLOOR, expert_cases
from moe_kernels.verify.operation import Case, Inputs, Operation, Outputs, differentiated

LEAVES = ("x", "weights", "w_in", "w_out", "b_in", "b_out")


def _cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    for name, given in expert_cases(dtype, device, small):
        yield Case(name, {each: given[each] for each in (*LEAVES, "plan", "activation", "grad")})


def _run(inputs: Inputs, backend: str) -> Outputs:
    return differentiated(expert_mlp.expert_mlp, inputs, LEAVES, ("y",), backend=backend)


OPERATION = Operation(_cases, _run, exact=frozenset(), floor=FLOOR)
