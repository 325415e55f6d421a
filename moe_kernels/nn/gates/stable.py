"""StableMoE's gate: stage one learns a routing and distils it into a small router, which is fixed in stage two."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels.nn._distributed import attach_unused
from moe_kernels.nn._invariance import sigmoid
from moe_kernels.nn._mask import count, mean, real_rows
from moe_kernels.nn._parameters import empty_parameter, orthogonal_init_, router_dtype
from moe_kernels.nn.gates.gate import Gate, GateOutput, real_choices
from moe_kernels.ops._checks import check_int, check_number, check_size


class StableGate(Gate):
    """One expert a token: first by affinity s_i = <x, centroid_i>, later by a small router that reads the ids.

        training in stage one                expert = argmax_i s_i
        in stage two and in evaluation       expert = argmax_i (embedding[id] W_r)_i
        always                               weight = sigmoid(s_expert)

    MoE(..., pass_through=True) adds (1 - weight) x to the output, for a layer without a residual around it.

    Losses of stage one, with n_i the number of tokens of expert i and nbar the mean of n_i:

    * "balance": balance * sum_i (n_i - nbar) / nbar * sum over the tokens t of expert i of sigmoid(s_ti) / T
    * "distill": distill * mean over tokens of CE(embedding[id] W_r, argmax s)

    Both are divided by T, to be added to a task loss that is a mean over tokens. The published code has sums.

    Args:
        dim, num_experts: D, E.
        vocabulary: number of ids.
        embedding: width of the router's own embedding.
        balance, distill: coefficients of the losses.

    Input: x (T, D) and ids (T,). Parameters: `centroids` (E, D), orthogonal with gain 0.1; `embedding`, `router` (W_r).
    Gradient: to x and centroids through the weight and the balance loss, to `embedding` and `router` through the loss
    "distill" alone; the choice is a constant. State dicts keep `stage`.
    router_probs: the softmax of the small router's logits, also in stage one; affinities are no probabilities.

    Source: Dai et al. 2022, eqs. 3 to 9, a baseline of CompeteSMoE.

    Example:
        >>> gate = StableGate(16, 4, vocabulary=100)
        >>> list(gate(torch.randn(8, 16), torch.arange(8)).losses)
        ['distill', 'balance']
        >>> gate.begin_stage_two()
        >>> list(gate(torch.randn(8, 16), torch.arange(8)).losses)
        []
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        vocabulary: int,
        *,
        embedding: int = 50,
        balance: float = 0.3,
        distill: float = 0.3,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dtype = router_dtype(dtype)
        super().__init__(num_experts, dim=dim)
        self.centroids = empty_parameter(num_experts, dim, device=device, dtype=dtype)
        orthogonal_init_(self.centroids, gain=0.1)
        check_int("StableGate", "vocabulary", vocabulary, 1, 2**31 - 1, "ids")
        check_size("StableGate", "embedding", embedding)
        self.embedding = nn.Embedding(vocabulary, embedding, device=device, dtype=dtype)
        self.router = nn.Linear(embedding, num_experts, bias=False, device=device, dtype=dtype)
        self.balance = check_number("StableGate", "balance", balance)
        self.distill = check_number("StableGate", "distill", distill)
        self.stage = 1

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        orthogonal_init_(self.centroids, gain=0.1, generator=generator)
        super().reset_parameters(generator)

    def begin_stage_two(self) -> None:
        """Begins stage two: the small router chooses the experts in training, too."""
        self.stage = 2

    def forward(self, x: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> GateOutput:
        x, ids = self.real(x, ids, mask)
        affinity = self.product(x, self.centroids)
        losses = {}
        learning = self.training and self.stage == 1
        if learning:
            experts = affinity.detach().argmax(-1)
            cross_entropy = F.cross_entropy(self._logits(x, ids), experts, reduction="none")
            losses["distill"] = self.distill * mean(cross_entropy, mask)
        else:
            with torch.no_grad():
                experts = self._logits(x, ids).argmax(-1)
        weights = sigmoid(affinity.gather(1, experts[:, None]))
        if self.training and not learning:
            weights = attach_unused(weights, (*self.embedding.parameters(), *self.router.parameters()))
        if learning:
            ones = torch.ones(x.shape[0], dtype=torch.promote_types(weights.dtype, torch.float32), device=x.device)
            ones = real_rows(ones, mask)
            counts = ones.new_zeros(self.num_experts).scatter_add_(0, experts, ones)
            nbar = (max(x.shape[0], 1) if mask is None else count(mask, ones.dtype)) / self.num_experts
            losses["balance"] = self.balance * mean(((counts - nbar) / nbar)[experts] * weights[:, 0], mask)
        weights, experts = real_choices(weights, experts.to(torch.int32)[:, None], mask)
        return GateOutput(weights, experts, self.num_experts, losses=losses)

    def _logits(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """The logits (T, E) of the small router, which depend only on the ids."""
        ids = self.check_ids(x, ids, self.embedding.num_embeddings, "the inputs of the distilled router")
        return self.project(self.router, self.embedding(ids))

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, balance={self.balance:g}, distill={self.distill:g}, stage={self.stage}"

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.stage, device="cpu")

    def set_extra_state(self, state: Tensor | int) -> None:
        self.stage = int(state)
