"""An input's gradient does not depend on which of the other inputs need one, as with frozen weights or biases."""

from __future__ import annotations

import pytest
import torch

from moe_kernels import verify
from moe_kernels.cases.combine import COMBINE
from moe_kernels.cases.expert_mlp import EXPERT_MLP
from moe_kernels.cases.expert_norms import EXPERT_NORMS
from moe_kernels.cases.grouped_gemm import GROUPED_GEMM
from moe_kernels.cases.kwta_linear import KWTA_LINEAR
from moe_kernels.cases.sinkhorn import SINKHORN
from moe_kernels.cases.tree_gate import TREE_GATE
from moe_kernels.verify.operation import differentiated

CALLS = {
    "combine": COMBINE,
    "expert_mlp": EXPERT_MLP,
    "expert_norms": EXPERT_NORMS,
    "grouped_gemm": GROUPED_GEMM,
    "kwta_linear": KWTA_LINEAR,
    "sinkhorn": SINKHORN,
    "tree_gate": TREE_GATE,
}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("op", CALLS)
def test_each_gradient_alone_and_all_but_each(op, backend):
    call, tried = CALLS[op], 0
    for name, inputs in verify.cases(op, torch.float64, small=True):
        leaves = [each for each in (*call.leaves, *call.optional) if inputs.get(each) is not None]
        if len(leaves) == 1:
            continue
        every = differentiated(inputs, backend, call)
        for one in leaves:
            for some in ([one], [each for each in leaves if each != one]):
                found, tried = differentiated(inputs, backend, call, some), tried + 1
                for each in some:
                    got, expected = (of[f"gradient of {each}"] for of in (found, every))
                    close = torch.allclose(got, expected, rtol=1e-9, atol=1e-10, equal_nan=True)
                    assert close, f"{name}: {each} of {', '.join(some)}"
    assert tried
