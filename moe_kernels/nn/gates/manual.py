"""Manual routing: the expert of every label is given (the sparse ViT)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_kernels.nn.gates.table import TableGate
from moe_kernels.ops._checks import check_int

MNIST = (4, 0, 1, 2, 2, 1, 3, 0, 4, 3)  # digits {1,7} {2,5} {3,4} {6,9} {8,0} -> experts 0..4


class ManualGate(TableGate):
    """Tokens of label l go to expert assignment[l] with weight 1; `ids` are the labels. No parameters.

    Args:
        assignment: the expert of every label; experts and labels count from 0. gates.manual.MNIST is the assignment of
            the sparse ViT for digits.
        num_experts: E; None: one more than the largest expert in assignment.

    Source: the sparse ViT, section 4.4: experts train with this gate; then they are frozen, and a learned gate trains.

    Example:
        >>> gate = ManualGate((0, 0, 1, 1))
        >>> gate(torch.randn(3, 16), torch.tensor([0, 3, 1])).experts.flatten()
        tensor([0, 1, 0], dtype=torch.int32)
    """

    NAME, IDS = "assignment", "the labels of the tokens"

    def __init__(
        self,
        assignment: Sequence[int],
        num_experts: int | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        given = tuple(check_int("ManualGate", "assignment", each, 0, 2**31 - 2, "experts") for each in assignment)
        if not given:
            raise ValueError("ManualGate: assignment must have at least one label, got none")
        needed = max(given) + 1
        super().__init__(needed if num_experts is None else num_experts, len(given), needed, device)
        self.given = given
        self.reset_parameters()

    @property
    def assignment(self) -> Tensor:
        """(labels,) int32: the expert of every label."""
        return self.table

    def draw(self, generator: torch.Generator | None) -> Tensor:
        return torch.tensor(self.given, dtype=torch.int32, device="cpu")

    def extra_repr(self) -> str:
        return f"assignment={self.given}, num_experts={self.num_experts}"
