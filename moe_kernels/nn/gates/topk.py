"""The top-k gate: top-k, then softmax (COMET trees, CompeteSMoE), or softmax, then top-k (V-MoE, the sparse ViT)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.nn._invariance import refuse_random
from moe_kernels.nn._parameters import RouterLinear, router_dtype
from moe_kernels.nn.bias import BalanceBias
from moe_kernels.nn.gates.gate import GateOutput, TopKRouter, expert_noise, normal_like, real_choices
from moe_kernels.nn.losses import balance_loss, importance_loss, load_loss, router_z_loss
from moe_kernels.ops._checks import check_choice, check_number, check_positive
from moe_kernels.ops.topk_gate import check_groups, check_scale, check_scores, topk_gate

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from moe_kernels.nn._replay import Recording, Replay

NOISES = (None, "jitter", "vmoe")


class TopKGate(BalanceBias, TopKRouter):
    """k experts a token: weights, experts = topk_gate(W x + b + noise, k).

    Args:
        dim, num_experts: D, E.
        k: from 1 to E.
        order: as in topk_gate; with k = 1 weights have a nonzero gradient only for "softmax_topk".
        scores, groups, renormalise, scale: as in topk_gate.
        balance_rate: balances loads without a loss: the choice is by scores + balance_bias, and `nn.update_biases`,
            called once a step, moves balance_bias (E) by this rate, 0.001 in DeepSeek-V3, for each expert with more or
            fewer requests than the mean. None: no bias.
        noise: noise of the logits in training: "jitter", N(0, 1) softplus(W_n x) with W_n learned, zero at first (an
            option of COMET trees' code; not Switch's jitter, which multiplies the router's input by U(1 - eps, 1 + eps)
            without parameters); "vmoe", N(0, 1 / E^2) (V-MoE); or None. Evaluation has no noise.
        bias: whether there is a b: none in V-MoE, one in CompeteSMoE's code.
        importance, load, balance, z: coefficients of importance_loss, load_loss, balance_loss and router_z_loss of
            moe_kernels.nn in training. `load` needs noise="vmoe"; `balance` counts first choices, as Switch and GShard
            do, while transformers' balance loss counts all K (see nn.balance_loss). V-MoE: importance = load = 0.005.
            With sigmoid scores s, s / (sum of s) takes the place of the probabilities.
        reduce: process group over whose ranks importance, load and balance are computed; None: this rank alone.
        generator: draws the noise; None is torch's own generator.
        backend: as in topk_gate.

    Output: sparse, choices in descending order. losses: in training those whose coefficient is not 0. Parameters:
    `linear`, initialised as nn.Linear but b = 0; with jitter also `noise_linear` (W_n). Buffers with a balance_rate:
    `balance_bias` and `loads` (E), float32: the requests in training since the last update, before drops, without
    repetitions by checkpoints. Gradient: to x and the parameters through weights and losses; the choice is a constant.
    nn.record_routing and nn.replay_routing record and replay the choices.

    Source: COMET trees, section 5.1 ("Top-k"), without the fault of its code, which drops a chosen logit of 0; V-MoE.

    Example:
        >>> gate = TopKGate(16, 8, 2, order="softmax_topk", noise="vmoe", importance=0.005, load=0.005)
        >>> out = gate(torch.randn(32, 16))
        >>> out.weights.shape, out.experts.shape, list(out.losses)
        (torch.Size([32, 2]), torch.Size([32, 2]), ['importance', 'load'])
    """

    recording: Recording | None = None  # set by nn.record_routing
    replay: Replay | None = None  # set by nn.replay_routing

    def __init__(
        self,
        dim: int,
        num_experts: int,
        k: int,
        *,
        order: str = "topk_softmax",
        scores: str = "softmax",
        groups: tuple[int, int] | None = None,
        renormalise: bool = False,
        scale: float = 1.0,
        balance_rate: float | None = None,
        noise: str | None = None,
        bias: bool = True,
        importance: float = 0.0,
        load: float = 0.0,
        balance: float = 0.0,
        z: float = 0.0,
        reduce: ProcessGroup | None = None,
        generator: torch.Generator | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dtype = router_dtype(dtype)
        super().__init__(dim, num_experts, k, backend)
        check_choice("TopKGate", "noise", noise, NOISES)
        check_scores("TopKGate", order, scores, renormalise)
        check_groups("TopKGate", groups, num_experts, k)
        if balance_rate is not None:
            balance_rate = check_positive("TopKGate", "balance_rate", balance_rate)
        coefficients = {"importance": importance, "load": load, "balance": balance, "z": z}
        self.coefficients = {name: check_number("TopKGate", name, each) for name, each in coefficients.items()}
        if load and noise != "vmoe":
            raise ValueError(f"TopKGate: load needs noise='vmoe', as load_loss assumes this noise; got {noise!r}")
        self.linear = RouterLinear(dim, num_experts, bias=bias, zero_bias=True, device=device, dtype=dtype)
        if noise == "jitter":
            self.noise_linear = RouterLinear(dim, num_experts, bias=False, bound=0, device=device, dtype=dtype)
        self.order, self.noise, self.generator, self.reduce = order, noise, generator, reduce
        self.scores, self.groups, self.renormalise = scores, groups, renormalise
        self.scale = check_scale("TopKGate", scale)
        self.add_balance(num_experts, balance_rate, device)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        super().reset_parameters(generator)
        self.clear_balance()

    def forward(self, x: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> GateOutput:
        x, ids = self.real(x, ids, mask)
        logits = self._logits(x)
        noise = self._noise(logits, x) if self.training else None
        weights, experts = topk_gate(
            logits,
            self.k,
            order=self.order,
            noise=noise,
            scores=self.scores,
            bias=None if self.balance_rate is None else self.balance_bias,
            groups=self.groups,
            renormalise=self.renormalise,
            scale=self.scale,
            forced=None if self.replay is None else self.replay.take(logits, self.k),
            backend=self.backend,
        )
        if mask is not None:
            weights, experts = real_choices(weights, experts, mask)
        if self.recording is not None:
            self.recording.add(experts)
        if self.balance_rate is not None:
            self.count_loads(experts)
        losses = self._losses(logits, noise, experts, mask) if self.training else {}
        return GateOutput(weights, experts, self.num_experts, losses=losses)

    def _noise(self, logits: Tensor, x: Tensor) -> Tensor | None:
        if self.noise is None:
            return None
        refuse_random("TopKGate", f"noise={self.noise!r}")
        if self.noise == "vmoe":
            return expert_noise(logits, self.generator)
        return normal_like(logits, self.generator) * F.softplus(self.project(self.noise_linear, x))

    def _losses(self, logits: Tensor, noise: Tensor | None, experts: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        losses = {}
        used = {name: coefficient for name, coefficient in self.coefficients.items() if coefficient}
        if "importance" in used:
            losses["importance"] = importance_loss(self._probs(logits), self.reduce, mask)
        if "load" in used and noise is not None:
            losses["load"] = load_loss(logits, logits + noise, self.k, 1 / self.num_experts, self.reduce, mask)
        if "balance" in used:
            masked = 0 if mask is None else 1  # a column for tokens without an expert
            first = F.one_hot(experts[:, 0].long() + masked, self.num_experts + masked).sum(0)[masked:]
            losses["balance"] = balance_loss(self._probs(logits), first, self.reduce, mask)
        if "z" in used:
            losses["z"] = router_z_loss(logits, mask)
        return {name: used[name] * loss for name, loss in losses.items()}

    def _logits(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        return self.project(self.linear, x)

    def _probs(self, logits: Tensor) -> Tensor:
        """(T, E): the softmax of the logits, or sigmoid scores divided by their sum."""
        if self.scores == "softmax":
            return logits.softmax(-1)
        scores = logits.sigmoid()
        return scores / (scores.sum(-1, keepdim=True) + 1e-20)

    def extra_repr(self) -> str:
        rule = f"order={self.order!r}" if self.scores == "softmax" else f"scores={self.scores!r}"
        rate = "" if self.balance_rate is None else f", balance_rate={self.balance_rate:g}"
        return f"{super().extra_repr()}, {rule}, groups={self.groups}, noise={self.noise!r}{rate}"
