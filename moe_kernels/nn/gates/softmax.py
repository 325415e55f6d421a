"""The dense softmax gate: a baseline of COMET trees, and phase one of the sparse ViT."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_kernels.nn._invariance import refuse_random, softmax
from moe_kernels.nn._parameters import router_dtype
from moe_kernels.nn.gates.gate import Gate, GateOutput, expert_noise
from moe_kernels.nn.losses import importance_loss
from moe_kernels.ops._checks import check_number


class SoftmaxGate(Gate):
    """Every token goes to every expert: gates = softmax(W x + b + noise).

    Args:
        dim, num_experts: D, E.
        bias: whether there is a b.
        noise: whether training adds N(0, 1 / E^2) to the logits, as in V-MoE; the sparse ViT does not define its noise.
        importance: coefficient of nn.importance_loss of the probabilities without noise.
        generator: draws the noise; None is torch's own generator.

    Output: dense. losses: in training "importance", if its coefficient is not 0. Parameters: `linear`, initialised as
    nn.Linear. Gradient: to x and the parameters.

    Source: COMET trees, section 5.1 ("Softmax"); the sparse ViT, section 3.2.

    Example:
        >>> SoftmaxGate(16, 4)(torch.randn(8, 16)).gates.shape
        torch.Size([8, 4])
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        bias: bool = True,
        noise: bool = False,
        importance: float = 0.0,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dtype = router_dtype(dtype)
        super().__init__(num_experts, dim=dim)
        self.linear = nn.Linear(dim, num_experts, bias=bias, device=device, dtype=dtype)
        self.importance = check_number("SoftmaxGate", "importance", importance)
        self.noise, self.generator = noise, generator

    def forward(self, x: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> GateOutput:
        x, ids = self.real(x, ids, mask)
        logits = self._logits(x)
        if self.noise and self.training:
            refuse_random("SoftmaxGate", "noise=True")
        noisy = logits + expert_noise(logits, self.generator) if self.noise and self.training else logits
        losses = {}
        if self.training and self.importance:
            losses["importance"] = self.importance * importance_loss(logits.softmax(-1), mask=mask)
        return GateOutput.of_gates(softmax(noisy), losses, mask=mask)

    def _logits(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        return self.project(self.linear, x)

    def extra_repr(self) -> str:
        return f"noise={self.noise}, importance={self.importance:g}"
