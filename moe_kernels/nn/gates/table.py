"""The base of gates with a table of the expert of every id."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels.nn.gates.gate import Gate, GateOutput, real_choices


class TableGate(Gate):
    """Tokens of id i go to expert table[i] with weight 1. A subclass draws the table in `draw`.

    State: the buffer `codes` (ids,) int32 = 2 table + 1. torch.optim.swa_utils.AveragedModel(use_buffers=True) averages
    buffers in floats and truncates the averages, so a code may become smaller by 1; codes // 2 is still the same
    expert. State dicts of earlier versions hold the table, under the name NAME; they load.
    """

    NAME = "table"
    IDS = "one for each token"
    codes: Tensor

    def __init__(
        self, num_experts: int, num_ids: int, fewest: int = 1, device: torch.device | str | None = None
    ) -> None:
        super().__init__(num_experts, fewest)
        self.register_buffer("codes", torch.empty(num_ids, dtype=torch.int32, device=device))

    def draw(self, generator: torch.Generator | None) -> Tensor:
        raise NotImplementedError

    @property
    def table(self) -> Tensor:
        """(ids,) int32: the expert of every id."""
        return self.codes >> 1

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        self.codes.copy_(2 * self.draw(generator) + 1)

    def forward(self, x: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> GateOutput:
        x, ids = self.real(x, ids, mask)
        experts = (self.codes[self.check_ids(x, ids, len(self.codes), self.IDS)] >> 1)[:, None]
        return GateOutput(*real_choices(x.new_ones(experts.shape), experts, mask), self.num_experts)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        table = state_dict.pop(prefix + self.NAME, None)
        if table is not None:
            state_dict[prefix + "codes"] = 2 * table + 1
        super()._load_from_state_dict(state_dict, prefix, *args)
