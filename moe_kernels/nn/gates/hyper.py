"""HyperRouter (Do et al. 2023): a frozen network computes the router's weights from a trained embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels.nn._parameters import router_dtype
from moe_kernels.nn.gates.gate import TopKRouter
from moe_kernels.ops._autocast import without_autocast
from moe_kernels.ops._checks import check_size


class FrozenLinear(nn.Linear):
    """An nn.Linear whose parameters get no gradient, even if requires_grad_() of a whole model sets their flags."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.detach(), None if self.bias is None else self.bias.detach())


class HyperRouterGate(TopKRouter):
    """k experts a token: topk_gate(W x + b, k) with (W | b) = H(v) reshaped (E, D + 1), the last column the bias.

    Args:
        dim, num_experts: D, E.
        k: choices of a token, from 1 to E.
        hidden: inner width of H = Linear(D, hidden), ReLU, nn.Linear(hidden, E (D + 1)); 256 in CompeteSMoE's code.
        backend: as in topk_gate.

    Parameters: `embedding` v (1, D), trained, and `hypernetwork` H, which is frozen: it gets no gradient, even if
    requires_grad_() of a whole model sets its flags; requires_grad_() of this gate leaves them False.
    Source: Do et al. 2023, a baseline of CompeteSMoE, and CompeteSMoE's published code.

    Example:
        >>> HyperRouterGate(16, 4, 2)(torch.randn(8, 16)).experts.shape
        torch.Size([8, 2])
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        k: int,
        *,
        hidden: int = 256,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dtype = router_dtype(dtype)
        super().__init__(dim, num_experts, k, backend)
        hidden = check_size("HyperRouterGate", "hidden", hidden)
        self.embedding = nn.Parameter(torch.randn(1, dim, device=device, dtype=dtype))
        self.hypernetwork = nn.Sequential(
            FrozenLinear(dim, hidden, device=device, dtype=dtype),
            nn.ReLU(),
            FrozenLinear(hidden, num_experts * (dim + 1), device=device, dtype=dtype),
        ).requires_grad_(False)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        nn.init.normal_(self.embedding, generator=generator)
        super().reset_parameters(generator)

    def requires_grad_(self, requires_grad: bool = True) -> HyperRouterGate:
        super().requires_grad_(requires_grad)
        for module in self.hypernetwork.modules():  # what wraps a FrozenLinear, such as LoRA, may train
            if isinstance(module, FrozenLinear):
                module.requires_grad_(False)
        return self

    def _logits(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        with without_autocast(x.device.type):
            rows = self.hypernetwork(self.embedding).view(self.num_experts, -1)
        return self.product(x, rows[:, :-1], rows[:, -1])
