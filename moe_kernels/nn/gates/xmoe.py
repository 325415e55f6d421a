"""XMoE's gate: compares a low-dimensional projection of x with each expert's embedding, by the cosine or a variant."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels.backends import is_batch_invariant
from moe_kernels.nn._invariance import normalize
from moe_kernels.nn._parameters import empty_parameter, orthogonal_init_, router_dtype
from moe_kernels.nn.gates.gate import GateOutput, TopKRouter
from moe_kernels.ops._autocast import without_autocast
from moe_kernels.ops._checks import check_choice, check_positive, check_size

SCORES = ("code", "cosine", "learned")
RADIUS = 1.5


class XMoEGate(TopKRouter):
    """k experts a token: topk_gate(scores, k). A score compares r = W_d x (d_e numbers) with an expert's embedding e_i.

    * "code": score_i = <r, e_i> / ||e_i||, as in the published code; r is not normalised. In training every forward
      first scales e_i in place to norm 1.5, without a gradient. Under fully_shard the scaling is lost, since it changes
      only the gathered copy of the parameter, so embeddings train at another rate than in one process.
    * "cosine": score_i = <r, e_i> / (||r|| ||e_i|| temperature).
    * "learned": as "cosine" with LayerNorm(r) and a learned temperature, as CompeteSMoE describes XMoE.

    Args:
        dim, num_experts: D, E.
        k: choices of a token, from 1 to E.
        embedding: d_e; 8 in the published code of CompeteSMoE.
        score: "code", "cosine" or "learned".
        temperature: of "cosine"; for "learned" the initial value.
        backend: as in topk_gate.

    Parameters: `linear` (d_e, D) without bias, `embeddings` (E, d_e), orthogonal with gain 0.32; "learned" also has
    `norm` and `log_temperature` (). Gradient: through r and e, also through the division by ||e_i||, but not through
    the scaling to norm 1.5.

    Source: Chi et al. 2022, a baseline of CompeteSMoE; the published code is CompeteSMoE's.

    Example:
        >>> XMoEGate(16, 4, 2, score="cosine")(torch.randn(8, 16)).weights.shape
        torch.Size([8, 2])
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        k: int,
        *,
        embedding: int = 8,
        score: str = "code",
        temperature: float = 0.3,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dtype = router_dtype(dtype)
        super().__init__(dim, num_experts, k, backend)
        check_choice("XMoEGate", "score", score, SCORES)
        embedding = check_size("XMoEGate", "embedding", embedding)
        self.linear = nn.Linear(dim, embedding, bias=False, device=device, dtype=dtype)
        self.embeddings = empty_parameter(num_experts, embedding, device=device, dtype=dtype)
        orthogonal_init_(self.embeddings, gain=0.32)
        self.score, self.temperature = score, check_positive("XMoEGate", "temperature", temperature)
        if score == "learned":
            self.norm = nn.LayerNorm(embedding, device=device, dtype=dtype)
            first = torch.full((), math.log(self.temperature), device=device, dtype=dtype)
            self.log_temperature = nn.Parameter(first)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        super().reset_parameters(generator)
        orthogonal_init_(self.embeddings, gain=0.32, generator=generator)
        if self.score == "learned":
            nn.init.constant_(self.log_temperature, math.log(self.temperature))

    def forward(self, x: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> GateOutput:
        if self.score == "code" and self.training:
            values = self.embeddings.detach()  # torch.compile ignores no_grad for in-place writes to a parameter
            norms = values.norm(dim=-1, keepdim=True)
            scaled = norms > 0
            if is_batch_invariant():  # scaling a scaled embedding again would change its last bits in every call
                scaled &= (norms - RADIUS).abs() > 2 * RADIUS * torch.finfo(norms.dtype).eps
            values.mul_(torch.where(scaled, RADIUS / norms, 1))
        return super().forward(x, ids, mask)

    def _logits(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        r = self.project(self.linear, x)
        # A copy for backward, since another forward before it would scale the parameter in place.
        directions = F.normalize(self.embeddings.clone(), dim=-1)
        if self.score == "code":
            return self.product(r, directions)
        if self.score == "learned":
            with without_autocast(x.device.type):
                r = self.norm(r)
            return self.product(normalize(r), directions) / self.log_temperature.exp()
        return self.product(normalize(r), directions) / self.temperature

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, score={self.score!r}"
