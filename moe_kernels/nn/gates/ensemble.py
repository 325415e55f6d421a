"""E^3's gate (paper 003): the members of an ensemble share a network but not its experts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.nn._parameters import as_linear_, stacked
from moe_kernels.nn.gates.gate import Gate, GateOutput, expert_noise
from moe_kernels.ops._checks import check_backend, check_int
from moe_kernels.ops.topk_gate import topk_gate


class EnsembleGate(Gate):
    """Member m of M chooses k of its own E / M experts, m E / M up to (m + 1) E / M, by V-MoE's softmax-then-top-k.

    Args:
        dim: D. num_experts: E, a multiple of members. members: M. k: from 1 to E / M.
        noise: N(0, (M / E)^2) on a member's E / M logits in training. generator: draws it; None is torch's own.

    Input: x (T, D) and ids (T,), the member of each token (see `tile`). Output: sparse. Parameter: weight
    (M, D, E / M), each member's as an nn.Linear without bias. Source: paper 003, section 5; capacity counts all E.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        k: int,
        *,
        members: int = 2,
        noise: bool = False,
        generator: torch.Generator | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_experts, dim=dim)
        self.members = check_int("EnsembleGate", "members", members, 1, num_experts, "members that share E experts")
        if num_experts % members:
            raise ValueError(f"EnsembleGate: members must divide {num_experts} experts, got {members}")
        self.k = check_int("EnsembleGate", "k", k, 1, num_experts // members, "choices among E / M experts")
        self.weight = stacked(members, dim, num_experts // members, device=device, dtype=dtype)
        self.noise, self.generator, self.backend = noise, generator, check_backend("EnsembleGate", backend)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        as_linear_(self.weight, self.weight.shape[1], generator)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> GateOutput:
        member = self.known(x, ids, self.members, "the member of each token")
        every = self.product(x, self.weight.transpose(1, 2).flatten(0, 1)).unflatten(1, (self.members, -1))
        logits = every[torch.arange(x.shape[0], device=x.device), member]
        noise = expert_noise(logits, self.generator) if self.noise and self.training else None
        weights, experts = topk_gate(logits, self.k, order="softmax_topk", noise=noise, backend=self.backend)
        own = member.to(torch.int32)[:, None] * (self.num_experts // self.members)
        return GateOutput(weights, experts + own, self.num_experts)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, members={self.members}, k={self.k}, noise={self.noise}"


def tile(x: Tensor, members: int) -> tuple[Tensor, Tensor]:
    """x (B, ...) once for each member, (B M, ...) in the order x0 m0, x0 m1, x1 m0, ..., and the members (B M,)."""
    ids = torch.arange(members, dtype=torch.int32, device=x.device).repeat(x.shape[0])
    return x.repeat_interleave(members, dim=0), ids


def ensemble_log_probs(logits: Tensor, members: int) -> Tensor:
    """log of the mean over members of softmax: logits (B M, classes) of tiled samples -> (B, classes)."""
    log_probs = F.log_softmax(logits, dim=-1).unflatten(0, (-1, members))
    return log_probs.logsumexp(1) - math.log(members)
