"""The gate that is told: experts by label (paper 002, manual routing)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_kernels.nn.gates.gate import Gate, GateOutput
from moe_kernels.ops._checks import check_int

MNIST = (4, 0, 1, 2, 2, 1, 3, 0, 4, 3)  # digits {1,7} {2,5} {3,4} {6,9} {8,0} -> experts 0..4


class ManualGate(Gate):
    """Tokens of label l go to expert assignment[l] with weight 1; `ids` are the labels. No parameters.

    Args:
        assignment: the expert of every label, from 0; paper 002's for the digits is gates.manual.MNIST.
        num_experts: E; by default one more than the largest in assignment.

    Source: paper 002, section 4.4, Table 6: train the experts so, then freeze them and train a gate.
    """

    assignment: Tensor

    def __init__(self, assignment: Sequence[int], num_experts: int | None = None) -> None:
        told = [check_int("ManualGate", "assignment", each, 0, 2**31 - 2, "experts") for each in assignment]
        most = max(told, default=0) + 1
        super().__init__(most if num_experts is None else num_experts, most)
        self.register_buffer("assignment", torch.tensor(told, dtype=torch.int32))

    def forward(self, x: Tensor, ids: Tensor | None = None) -> GateOutput:
        experts = self.assignment[self.known(x, ids, len(self.assignment), "the labels of the tokens")][:, None]
        return GateOutput(x.new_ones(experts.shape), experts, self.num_experts)

    def extra_repr(self) -> str:
        return f"assignment={tuple(self.assignment.tolist())}, num_experts={self.num_experts}"
