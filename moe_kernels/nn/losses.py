"""Losses of gates and of pairs of outputs: functions of tensors that return a float32 scalar (float64 for float64).

p (T, E) are the probabilities of the gate. CV(v) = std(v) / mean(v) over the experts, std without bias correction.
Every loss of an empty batch (T = 0) is 0.

mask: bool, one for each token, True for real tokens and False for padding; None: all tokens are real. A loss with a
mask is that of the real tokens alone, and masked tokens get no gradient.

Across processes a loss counts only this rank's tokens, as GShard's and Switch's balance losses do. With the argument
`reduce`, a process group whose ranks have equally many tokens, masked ones included, importance_loss, load_loss and
balance_loss count the tokens of all its ranks: every rank returns the same number, and the mean of the ranks'
gradients, which DDP and FSDP2 compute, is the gradient of that number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.nn._mask import check_mask, mean, real_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def cv_squared(v: Tensor) -> Tensor:
    """Squared coefficient of variation of v (E): var(v) / mean(v)^2, with the population's variance.

    0 up to rounding if all elements are equal, also if all are 0; E - 1 if all but one are 0.

    Example:
        >>> cv_squared(torch.tensor([1.0, 1.0, 1.0])), cv_squared(torch.tensor([3.0, 0.0, 0.0]))
        (tensor(0.), tensor(2.))
    """
    v = _at_least_float32(v)
    variance = v.var(unbiased=False)
    return variance / torch.where(variance == 0, 1, v.mean().square())


def importance_loss(probs: Tensor, reduce: ProcessGroup | None = None, mask: Tensor | None = None) -> Tensor:
    """CV(sum over t of p_t)^2: 0, up to rounding, if every expert has the same total probability.

    Args:
        probs: (T, E), the softmax of the logits without noise, before any choice.
        reduce: process group whose tokens the sum counts (see the module's docstring); None: this rank's.
        mask: (T,); None: every token is real.

    Gradient: to probs. Source: Shazeer et al. 2017, eqs. 6 and 7; V-MoE (Riquelme et al. 2021), weight 0.005 there.

    Example:
        >>> importance_loss(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))  # both experts have the same total
        tensor(0.)
    """
    return cv_squared(_over_ranks(_real("importance_loss", probs, mask).sum(dim=0), reduce))


def load_loss(
    logits: Tensor,
    noisy_logits: Tensor,
    k: int,
    noise_std: float,
    reduce: ProcessGroup | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """CV(mean over t of P_t)^2; P_te: probability that logit e, with new noise, exceeds the token's threshold.

        P_te = 1 - Phi((threshold_t - logits_te) / noise_std),   threshold_t = the k-th largest of noisy_logits_t
        Phi: the standard normal distribution function

    Args:
        logits: (T, E), without noise.
        noisy_logits: (T, E), logits plus the noise that the gate used.
        k: choices a token, from 1 to E.
        noise_std: standard deviation of the noise, above 0; 1 / E in V-MoE.
        reduce: process group whose tokens the mean counts (see the module's docstring); None: this rank's.
        mask: (T,); None: every token is real.

    Gradient: to logits, and to noisy_logits through the threshold.
    Raises ValueError for k outside [1, E] and for noise_std <= 0.
    Source: V-MoE (Riquelme et al. 2021) and its public code; weight 0.005 there.

    Example:
        >>> logits = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> load_loss(logits, logits + 0.5 * torch.randn(2, 2), k=1, noise_std=0.5) > 0
        tensor(True)
    """
    _check("load_loss", logits, mask)
    return cv_squared(_rank_mean(selection_chances(logits, noisy_logits, k, noise_std), mask, reduce))


def selection_chances(logits: Tensor, noisy_logits: Tensor, k: int, noise_std: float) -> Tensor:
    """P (T, E) of `load_loss`."""
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"load_loss: k must be from 1 to {logits.shape[-1]}, got {k}")
    if not noise_std > 0:
        raise ValueError(
            f"load_loss: noise_std must be positive (the loss is not defined without noise), got {noise_std}"
        )
    threshold = _at_least_float32(noisy_logits).topk(k, dim=-1).values[:, -1:]
    return torch.special.ndtr((_at_least_float32(logits) - threshold) / noise_std)  # 1 - Phi(-z) = Phi(z)


def balance_loss(
    probs: Tensor, requested: Tensor, reduce: ProcessGroup | None = None, mask: Tensor | None = None
) -> Tensor:
    """E * sum over e of f_e m_e, with f_e = requested_e / sum of requested and m_e = mean over t of p_te.

    1 if f or m is uniform, E if one expert has all requests and m_e = 1. Switch's and GShard's losses count the first
    choices: `requested` of make_plan(experts[:, :1], E). With plan.requested all K choices count: transformers'
    load_balancing_loss_func then returns K times as much, since its f are shares of T, not of T K.

    Args:
        probs: (T, E).
        requested: (E), counts, such as RoutingPlan.requested; a constant. If all are 0, the loss is 0. With a mask the
            counts must be those of real tokens, as they are where masked tokens' experts are -1.
        reduce: process group whose tokens f and m count (see the module's docstring); None: this rank's.
        mask: (T,); None: every token is real.

    Gradient: to probs through m. Source: Switch Transformer, eq. 4 (weight 0.01 there); GShard, algorithm 1, has
    mean over e of f_e m_e, which is smaller by the factor E^2.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1], [0.9, 0.1]])
        >>> balance_loss(probs, torch.tensor([2, 0]))  # 2 (1 * 0.9 + 0 * 0.1)
        tensor(1.8000)
    """
    _check("balance_loss", probs, mask)
    share_of_probs = _rank_mean(_at_least_float32(probs), mask, reduce)
    requested = _over_ranks(requested.to(share_of_probs.dtype), reduce)
    total = requested.sum()
    share = requested / torch.where(total == 0, 1, total)
    return probs.shape[-1] * (share * share_of_probs).sum()


def router_z_loss(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """mean over t of (log sum over e of exp logits_te)^2: keeps logits small.

    Args:
        logits: (T, E).
        mask: (T,); None: every token is real.

    Gradient: to logits. Source: ST-MoE (Zoph et al. 2022), eq. 5; weight 0.001 there.

    Example:
        >>> router_z_loss(torch.zeros(3, 4))  # (log 4)^2
        tensor(1.9218)
    """
    _check("router_z_loss", logits, mask)
    return mean(torch.logsumexp(_at_least_float32(logits), dim=-1).square(), mask)


def inverse_cv(probs: Tensor, eps: float = 1e-2, mask: Tensor | None = None) -> Tensor:
    """mean over t of mu(p_t) / (var(p_t) + eps), mu and var over the experts: small if gates are close to one-hot.

    Args:
        probs: (T, E), rows that sum to one.
        eps: a uniform gate has the loss 1 / (E eps). The sparse ViT gives no value of eps.
        mask: (T,); None: every token is real.

    Gradient: to probs. Source: the sparse ViT, section 3.2, token-wise inverse coefficient of variance (mu over var).

    Example:
        >>> inverse_cv(torch.tensor([[0.5, 0.5]])), inverse_cv(torch.tensor([[1.0, 0.0]]))
        (tensor(50.), tensor(1.9231))
    """
    p = _real("inverse_cv", probs, mask)
    if not p.shape[0]:  # var would warn
        return p.sum()
    return mean(p.mean(-1) / (p.var(-1, unbiased=False) + eps), mask)


def batch_inverse_cv(probs: Tensor, eps: float = 1e-2, mask: Tensor | None = None) -> Tensor:
    """mean over e of mu_b(s_be) / (var_b(s_be) + eps); s_be: sum of expert e's gates over the tokens of image b.

    mu_b and var_b are over the images. The loss is small if an expert's total weight differs between images.

    Args:
        probs: (B, S, E), the gates of S tokens of B images.
        mask: (B, S); None: every token is real. An image without a real token does not count.

    Gradient: to probs. Source: the sparse ViT, section 3.2, batch-wise inverse coefficient of variance. The paper sums
    over a whole batch; one number for each expert has no variance, so here the sums are taken image by image.

    Example:
        >>> alike, apart = torch.full((2, 1, 2), 0.5), torch.eye(2)[:, None]
        >>> batch_inverse_cv(alike), batch_inverse_cv(apart)
        (tensor(50.), tensor(1.9231))
    """
    s, images = _sums("batch_inverse_cv", probs, mask)
    return (mean(s, images) / (batch_variance(s, images) + eps)).mean()


def batch_variation(probs: Tensor, eps: float = 1e-6, mask: Tensor | None = None) -> Tensor:
    """mean over e of var_b(s_be) / (mu_b(s_be) + eps), with s and the arguments as in `batch_inverse_cv`.

    Source: the sparse ViT, section 3.3, "batch-wise variation".

    Example:
        >>> batch_variation(torch.eye(2)[:, None])
        tensor(0.5000)
    """
    s, images = _sums("batch_variation", probs, mask)
    return (batch_variance(s, images) / (mean(s, images) + eps)).mean()


def competition_loss(
    routed: tuple[Tensor, Tensor], winners: tuple[Tensor, Tensor], num_experts: int, mask: Tensor | None = None
) -> Tensor:
    """mean over t and e of (softmax(TopK(s_R))_te - softmax(TopK(s_C))_te)^2, zeros outside each top k.

    Args:
        routed: (weights (T, K), experts (T, K)), topk_gate of the router's logits s_R.
        winners: the same for s_C, the norms of the experts' outputs; a constant.
        mask: (T,); None: every token is real. Experts of masked tokens may be -1.

    Gradient: to the weights in `routed`. Source: CompeteSMoE, eq. 3; the mean is over T * E, as in nn.MSELoss.

    Example:
        >>> routed, winners = (torch.ones(1, 1), torch.tensor([[0]])), (torch.ones(1, 1), torch.tensor([[1]]))
        >>> competition_loss(routed, winners, num_experts=4)  # two of four differ by 1
        tensor(0.5000)
    """
    _check("competition_loss", routed[0], mask)
    difference = _scattered(*routed, num_experts, mask) - _scattered(*winners, num_experts, mask).detach()
    return mean(difference.square().mean(-1), mask)


def symmetric_kl(logits: Tensor, others: Tensor, mask: Tensor | None = None) -> Tensor:
    """mean over rows of 1/2 sum (p - q)(log p - log q), p and q the softmax of logits and others (..., classes).

    mask: (...), the rows that count; None: all.
    Gradient: to both. Source: THOR's consistency loss CR; MoEBERT's distillation of predictions.

    Example:
        >>> symmetric_kl(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 2.0]]))
        tensor(1.5232)
    """
    log_p, log_q = (F.log_softmax(_at_least_float32(each), dim=-1) for each in (logits, others))
    _check("symmetric_kl", logits, mask, logits.dim() - 1)
    of_row = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1)
    return 0.5 * mean(of_row.flatten(), None if mask is None else mask.flatten())


def tree_entropy(leaf_probs: Tensor, eps: float = 1e-6, mask: Tensor | None = None) -> Tensor:
    """mean over t of the sum over trees and leaves of -p log(p + eps): about 0 if every tree is saturated.

    Args:
        leaf_probs: (T, K, E) of tree_gate.
        mask: (T,); None: every token is real.

    Gradient: to leaf_probs. Source: COMET trees, section 3.3, with the eps of the published code.

    Example:
        >>> tree_entropy(torch.tensor([[[0.5, 0.5]]]))  # log 2
        tensor(0.6931)
    """
    p = _at_least_float32(leaf_probs)
    _check("tree_entropy", leaf_probs, mask)
    return -mean((p * (p + eps).log()).sum((-2, -1)), mask)


def _check(name: str, x: Tensor, mask: Tensor | None, rank: int = 1) -> None:
    """Raises unless `mask` is None or has the first `rank` dimensions of x."""
    if mask is not None:
        check_mask(name, mask, x.shape[:rank], x.device)


def _real(name: str, x: Tensor, mask: Tensor | None, rank: int = 1) -> Tensor:
    """x in float32 at least, zeros for masked tokens."""
    _check(name, x, mask, rank)
    return real_rows(_at_least_float32(x), mask)


def _sums(name: str, probs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """s (B, E) of batch_inverse_cv, and which images have a real token, (B,); None without a mask."""
    return _real(name, probs, mask, 2).sum(1), None if mask is None else mask.any(1)


def _scattered(weights: Tensor, experts: Tensor, num_experts: int, mask: Tensor | None) -> Tensor:
    """(T, E): the weights at their experts, zeros elsewhere and for masked tokens."""
    zeros = _at_least_float32(weights).new_zeros(weights.shape[0], num_experts)
    columns = experts.long() if mask is None else experts.long().clamp(min=0)
    return zeros.scatter(1, columns, real_rows(_at_least_float32(weights), mask))


def batch_variance(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The population's variance over the first dimension, zeros if this dimension is empty."""
    if mask is None:
        return x.var(0, unbiased=False) if x.shape[0] else x.sum(0)
    return mean((x - mean(x, mask)).square(), mask)


def _rank_mean(x: Tensor, mask: Tensor | None, group: ProcessGroup | None) -> Tensor:
    """The mean over the (real) tokens of all ranks of a group, or of this rank. Ranks may have masked differently many
    tokens, so with a mask their sums are divided by their mean number of real tokens."""
    if mask is None or group is None:
        return _over_ranks(mean(x, mask), group)
    tokens = _over_ranks(mask.sum().to(x.dtype), group)
    return _over_ranks(real_rows(x, mask).sum(0) / torch.where(tokens == 0, 1, tokens), group)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _over_ranks(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The mean of x over the n ranks of a group; x if group is None. The gradient of the result goes to x
    unchanged, not divided by n."""
    if group is None:
        return x
    mean = x.detach() / group.size()
    torch.distributed.all_reduce(mean, group=group)
    return mean + (x - x.detach())
