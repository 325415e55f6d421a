"""THOR's gate: random experts, for a loss that makes the experts agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels.nn._invariance import refuse_random
from moe_kernels.nn._recompute import noise_generator
from moe_kernels.nn.gates.gate import Gate, GateOutput, real_choices
from moe_kernels.ops._checks import check_choice, check_rank

INFERENCE = ("token", "ids")


class RandomGate(Gate):
    """One uniformly random expert a token, with weight 1; no parameters.

    In training every call draws one expert for the whole batch. THOR runs two passes over each batch; its loss is
    CE1 + CE2 + alpha * nn.symmetric_kl(logits1, logits2), with gradients to both passes.

    Args:
        num_experts: E.
        inference: draws in evaluation: "token", one for every token, or "ids", one for all tokens of equal id
            (0 to T - 1), such as those of a sentence. The published code draws by position instead.
        generator: draws the experts, on the device of x; None is torch's own generator.

    Source: THOR (Zuo et al. 2021), section 3 and algorithm 1.

    Example:
        >>> experts = RandomGate(4)(torch.randn(8, 16)).experts
        >>> bool((experts == experts[0]).all())  # in training the whole batch has one draw
        True
    """

    def __init__(self, num_experts: int, *, inference: str = "token", generator: torch.Generator | None = None) -> None:
        super().__init__(num_experts)
        check_choice("RandomGate", "inference", inference, INFERENCE)
        self.inference, self.generator = inference, generator

    def forward(self, x: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> GateOutput:
        check_rank("RandomGate", "x", x, "(T, D)")
        x, ids = self.real(x, ids, mask)
        refuse_random("RandomGate", "its choice of experts")
        draws = (1 if self.training else x.shape[0],)
        # torch.compile cannot trace torch.randint with symbolic sizes and generator=None.
        options: dict[str, Any] = {} if self.generator is None else {"generator": noise_generator(self.generator)}
        experts = torch.randint(self.num_experts, draws, dtype=torch.int32, device=x.device, **options)
        if self.inference == "ids" and not self.training:
            experts = experts[self.check_ids(x, ids, x.shape[0], "one for all tokens of a sentence")]
        experts = experts.expand(x.shape[0])[:, None]
        return GateOutput(*real_choices(x.new_ones(experts.shape), experts, mask), self.num_experts)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, inference={self.inference!r}"
