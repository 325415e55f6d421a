"""E^3's gate: the members of an ensemble share a network but not its experts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.nn._invariance import refuse_random
from moe_kernels.nn._mask import real_rows
from moe_kernels.nn._parameters import empty_parameter, linear_init_, router_dtype
from moe_kernels.nn.gates.gate import Gate, GateOutput, expert_noise, real_choices
from moe_kernels.nn.losses import cv_squared, selection_chances
from moe_kernels.ops._checks import check_backend, check_int, check_number
from moe_kernels.ops.topk_gate import topk_gate


class EnsembleGate(Gate):
    """Member m of M chooses k of its own experts m E / M .. (m + 1) E / M - 1: softmax over these, then top-k.

    Args:
        dim: D.
        num_experts: E, a multiple of members.
        members: M.
        k: from 1 to E / M.
        noise: whether training adds N(0, (M / E)^2) to a member's E / M logits.
        generator: draws the noise; None is torch's own generator.
        importance, load: coefficients of importance_loss and load_loss in training, computed for each member over its
            own experts and tokens and averaged over the members; `load` needs noise.

    Input: x (T, D) and ids (T,), the member of each token (see `tile`). Output: sparse, over all E experts. Parameter:
    weight (M, D, E / M), initialised as M nn.Linear without bias.
    Source: E^3 (Allingham et al. 2021).

    Example:
        >>> x, ids = tile(torch.randn(4, 16), 2)  # every sample once for each member
        >>> EnsembleGate(16, 8, 2, members=2)(x, ids).experts.shape
        torch.Size([8, 2])
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        k: int,
        *,
        members: int = 2,
        noise: bool = False,
        importance: float = 0.0,
        load: float = 0.0,
        generator: torch.Generator | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dtype = router_dtype(dtype)
        super().__init__(num_experts, dim=dim)
        self.members = check_int("EnsembleGate", "members", members, 1, num_experts, "members, each with own experts")
        if num_experts % members:
            raise ValueError(f"EnsembleGate: members must divide {num_experts} experts, got {members}")
        self.k = check_int("EnsembleGate", "k", k, 1, num_experts // members, "choices among E / M experts")
        self.weight = empty_parameter(members, dim, num_experts // members, device=device, dtype=dtype)
        self.noise, self.generator, self.backend = noise, generator, check_backend("EnsembleGate", backend)
        self.importance = check_number("EnsembleGate", "importance", importance)
        self.load = check_number("EnsembleGate", "load", load)
        if load and not noise:
            raise ValueError("EnsembleGate: load needs noise=True, as load_loss assumes noise; got noise=False")
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        linear_init_(self.weight, self.weight.shape[1], generator)

    def forward(self, x: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> GateOutput:
        x, ids = self.real(x, ids, mask)
        member = self.check_ids(x, ids, self.members, "the member of each token")
        logits = self._of_member(x, member)
        if self.noise and self.training:
            refuse_random("EnsembleGate", "noise=True")
        noise = expert_noise(logits, self.generator) if self.noise and self.training else None
        weights, experts = topk_gate(logits, self.k, order="softmax_topk", noise=noise, backend=self.backend)
        first = member.to(torch.int32)[:, None] * (self.num_experts // self.members)  # the member's first expert
        weights, experts = real_choices(weights, experts + first, mask)
        losses = self._losses(logits, noise, member, mask) if self.training else {}
        return GateOutput(weights, experts, self.num_experts, losses=losses)

    @torch.no_grad()
    def router_probs(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """(T, E / M): the router's softmax over the experts of each token's member."""
        return self._of_member(x, self.check_ids(x, ids, self.members, "the member of each token")).softmax(-1)

    def _of_member(self, x: Tensor, member: Tensor) -> Tensor:
        """Logits (T, E / M) of each token's member."""
        of_all = self.product(x, self.weight.transpose(1, 2).flatten(0, 1)).unflatten(1, (self.members, -1))
        return of_all[torch.arange(x.shape[0], device=x.device), member]

    def _losses(self, logits: Tensor, noise: Tensor | None, member: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        losses = {}
        if self.importance:
            losses["importance"] = self.importance * self._mean_cv_squared(real_rows(logits.softmax(-1), mask), member)
        if self.load and noise is not None:
            chances = selection_chances(logits, logits + noise, self.k, 1 / logits.shape[1])
            losses["load"] = self.load * self._mean_cv_squared(real_rows(chances, mask), member)
        return losses

    def _mean_cv_squared(self, values: Tensor, member: Tensor) -> Tensor:
        """Sums values (T, E / M) over each member's tokens; returns the mean over members of cv_squared of the sums."""
        sums = F.one_hot(member, self.members).to(values.dtype).t() @ values
        return torch.stack([cv_squared(row) for row in sums]).mean()

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, members={self.members}, k={self.k}, noise={self.noise}"


def tile(x: Tensor, members: int) -> tuple[Tensor, Tensor]:
    """Repeats each sample of x (B, ...) for all M members: returns (B M, ...) and the member of each row, int32 (B M,).

    Example:
        >>> tile(torch.tensor([[1.0], [2.0]]), 2)
        (tensor([[1.],
                [1.],
                [2.],
                [2.]]), tensor([0, 1, 0, 1], dtype=torch.int32))
    """
    ids = torch.arange(members, dtype=torch.int32, device=x.device).repeat(x.shape[0])
    return x.repeat_interleave(members, dim=0), ids


def ensemble_log_probs(logits: Tensor, members: int) -> Tensor:
    """log of the mean over members of softmax(logits): logits (B M, classes) of samples from `tile` -> (B, classes).

    Example:
        >>> ensemble_log_probs(torch.tensor([[20.0, 0.0], [0.0, 20.0]]), 2).exp()  # the members disagree
        tensor([[0.5000, 0.5000]])
    """
    log_probs = F.log_softmax(logits, dim=-1).unflatten(0, (-1, members))
    return log_probs.logsumexp(1) - math.log(members)
