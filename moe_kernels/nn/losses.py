"""Losses that keep experts in use. Plain functions: tensors in, a float32 scalar out (float64 stays), no state.

With p (T, E) the gate's probabilities and CV(v) = std(v) / mean(v) over the experts, std that of the population.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cv_squared(v: Tensor) -> Tensor:
    """Squared coefficient of variation of v (E): var(v) / mean(v)^2, with the population's variance.

    0 where all are equal, E - 1 where one has everything.
    """
    v = _wide(v)
    return v.var(unbiased=False) / v.mean().square()


def importance_loss(probs: Tensor) -> Tensor:
    """CV(sum over t of p_t)^2: every expert should get the same total weight.

    Args:
        probs: (T, E), the softmax of the clean logits, without noise and before any choice.

    Gradient: to probs. Source: Shazeer et al. 2017, eqs. 6 and 7; V-MoE (paper 003), appendix A, weight 0.005 there.
    """
    return cv_squared(_wide(probs).sum(dim=0))


def load_loss(logits: Tensor, noisy_logits: Tensor, k: int, noise_std: float) -> Tensor:
    """CV(mean over t of P_t)^2 with P_te the probability that new noise on expert e alone would put it among the top k.

        P_te = 1 - Phi((threshold_t - logits_te) / noise_std),   threshold_t = the k-th largest of noisy_logits_t

    Args:
        logits: (T, E), clean.
        noisy_logits: (T, E), logits plus the noise that the gate used.
        k: choices a token, from 1 to E.
        noise_std: of that noise, above 0: V-MoE's is 1 / E. Without noise this loss is not defined.

    Gradient: to logits, and to noisy_logits through the threshold.
    Raises ValueError for k outside [1, E] and for noise_std <= 0.
    Source: V-MoE (paper 003), appendix A, as its public code has it; weight 0.005 there.
    """
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"load_loss: k must be from 1 to {logits.shape[-1]}, got {k}")
    if not noise_std > 0:
        raise ValueError(
            f"load_loss: noise_std must be positive (the loss is not defined without noise), got {noise_std}"
        )
    threshold = _wide(noisy_logits).topk(k, dim=-1).values[:, -1:]
    selected = torch.special.ndtr((_wide(logits) - threshold) / noise_std)  # 1 - Phi(-z) = Phi(z)
    return cv_squared(selected.mean(dim=0))


def balance_loss(probs: Tensor, requested: Tensor) -> Tensor:
    """E * sum over e of f_e m_e, with f_e = requested_e / sum of requested and m_e = mean over t of p_te.

    1 where both are uniform, up to E where one expert gets everything. Switch's and GShard's loss count first choices:
    `requested` of make_plan(experts[:, :1], E); with plan.requested all K choices count.

    Args:
        probs: (T, E).
        requested: (E), counts, such as RoutingPlan.requested; a constant. All zero gives 0.

    Gradient: to probs through m. Source: Switch Transformer, eq. 4 (weight 0.01 there); GShard, algorithm 1, and
    V-MoE's "gshard" loss, E^2 mean(f m), are the same number.
    """
    mean = _wide(probs).mean(dim=0)
    share = requested.to(mean.dtype) / requested.sum().clamp(min=1)
    return probs.shape[-1] * (share * mean).sum()


def router_z_loss(logits: Tensor) -> Tensor:
    """mean over t of (log sum over e of exp logits_te)^2: keeps logits small, where float arithmetic is exact.

    Args:
        logits: (T, E).

    Gradient: to logits. Source: ST-MoE (Zoph et al. 2022), eq. 5; weight 0.001 there.
    """
    return torch.logsumexp(_wide(logits), dim=-1).square().mean()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
