"""Two gates, used one after the other: a dense and a sparse one (the sparse ViT), or a ManualGate and a learned one."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.nn._distributed import attach_unused
from moe_kernels.nn._mask import call_with_mask, mean
from moe_kernels.nn.gates.gate import Gate, GateOutput
from moe_kernels.nn.gates.topk import TopKGate
from moe_kernels.ops._checks import check_module, check_number


class StagedGate(Gate):
    """first(x) if `stage` is 1, else second(x). `stage` starts at 1; the training loop sets it.

    Args:
        first, second: gates over the same experts.
        distill: coefficient of the loss "distill" in training with stage = 2: the mean over tokens of
            KL(first's gates || softmax of second's logits). If it is not 0, second must be a TopKGate.
        second_in_evaluation: whether evaluation always uses the second gate, as for a first gate that needs labels.

    losses: those of the gate in use, and "distill". State dicts hold `stage`. The gate freezes no parameters;
    nn.schedules.train_gates_alone(model) does.

    Source: the sparse ViT, section 3.2.

    Example:
        >>> gate = StagedGate(SoftmaxGate(16, 4), TopKGate(16, 4, 1))
        >>> gate(torch.randn(8, 16)).experts.shape  # the dense gate
        torch.Size([8, 4])
        >>> gate.stage = 2
        >>> gate(torch.randn(8, 16)).experts.shape  # the sparse one
        torch.Size([8, 1])
    """

    def __init__(self, first: Gate, second: Gate, *, distill: float = 0.0, second_in_evaluation: bool = False) -> None:
        check_module("StagedGate", "first", first, Gate)
        check_module("StagedGate", "second", second, Gate)
        super().__init__(first.num_experts)
        if first.num_experts != second.num_experts:
            counts = f"{first.num_experts} and {second.num_experts}"
            raise ValueError(f"StagedGate: first and second must have equally many experts, got {counts}")
        if distill and not isinstance(second, TopKGate):
            raise TypeError(f"StagedGate: distill needs second to be a TopKGate, got {type(second).__name__}")
        self.first, self.second, self.stage = first, second, 1
        self.distill = check_number("StagedGate", "distill", distill)
        self.second_in_evaluation = second_in_evaluation

    def forward(self, x: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> GateOutput:
        if self._in_use() is self.first:
            output = call_with_mask("StagedGate", self.first, x, ids, mask=mask)
            return replace(output, weights=attach_unused(output.weights, self.second.parameters()))
        output = call_with_mask("StagedGate", self.second, x, ids, mask=mask)
        output = replace(output, weights=attach_unused(output.weights, self.first.parameters()))
        if not (self.training and self.distill and self.stage == 2 and isinstance(self.second, TopKGate)):
            return output
        with torch.no_grad():
            target = call_with_mask("StagedGate", self.first, x, ids, mask=mask).gates
        log_probs = self.second._logits(self.real(x, None, mask)[0]).log_softmax(-1)
        divergence = F.kl_div(log_probs, target.to(log_probs.dtype), reduction="none").sum(-1)
        losses = output.losses | {"distill": self.distill * mean(divergence, mask)}
        return replace(output, losses=losses)

    def router_probs(self, x: Tensor, ids: Tensor | None = None) -> Tensor | None:
        return self._in_use().router_probs(x, ids)

    def _in_use(self) -> Gate:
        return self.first if self.stage == 1 and (self.training or not self.second_in_evaluation) else self.second

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.stage, device="cpu")

    def set_extra_state(self, state: Tensor | int) -> None:
        self.stage = int(state)

    def extra_repr(self) -> str:
        return f"stage={self.stage}, distill={self.distill:g}"
