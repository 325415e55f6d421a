"""The top-k gate, by definition: sort every row of keys, keep the first k, weigh them by softmax or sigmoid.

"topk_softmax" is the gate of CompeteSMoE and of the Top-k baseline of COMET trees; "softmax_topk" is the gate of V-MoE
and of the sparse ViT; sigmoid scores with a bias and groups are DeepSeek-V3's.
"""

import torch
from torch import Tensor


def topk_gate(
    logits: Tensor,
    k: int,
    *,
    order: str = "topk_softmax",
    noise: Tensor | None = None,
    scores: str = "softmax",
    bias: Tensor | None = None,
    groups: tuple[int, int] | None = None,
    renormalise: bool = False,
    scale: float = 1.0,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """logits (T, E) -> weights (T, K) and experts (T, K), in descending order of keys.

    A key is logits + noise, or with a bias or groups the score + bias. Of equal keys the lower expert comes first; NaN
    ranks highest. Without bias and groups "softmax_topk" too selects by logits, not by probability: softmax may round
    different logits to equal probabilities. The selection is a constant to autograd. Positions of `forced` that are
    not -1 hold their expert; the others take the best experts that are not forced.
    """
    noisy = logits if noise is None else logits + noise
    promoted = noisy.to(torch.promote_types(noisy.dtype, torch.float32))
    keys = noisy.detach()
    if bias is not None or groups is not None:
        # torch's float32 sigmoid may round equal logits differently, by their position; rounded from float64 they tie.
        by_sigmoid = scores == "sigmoid"
        keys = promoted.detach().double().sigmoid() if by_sigmoid else promoted.detach().softmax(dim=-1)
        keys = keys.to(promoted.dtype) if bias is None else keys.to(promoted.dtype) + bias.detach()
    barred = torch.zeros_like(keys, dtype=torch.bool) if groups is None else ~in_best_groups(keys, *groups)
    if forced is not None:
        forced = forced.long()
        # Entries of -1 go to an extra column.
        taken = torch.cat([barred, barred[:, :1]], 1).scatter(1, forced.where(forced >= 0, logits.shape[1]), True)
        barred = taken[:, :-1]
    experts = torch.sort(keys, dim=-1, descending=True, stable=True).indices
    experts = experts.gather(1, torch.sort(barred.gather(1, experts), dim=-1, stable=True).indices)[:, :k]
    if forced is not None:
        position = ((forced < 0).cumsum(1) - 1).clamp(min=0)
        experts = forced.where(forced >= 0, experts.gather(1, position))
    if scores == "sigmoid":
        weights = promoted.gather(1, experts).sigmoid()
    elif order == "topk_softmax":
        weights = promoted.gather(1, experts).softmax(dim=-1)
    elif order == "softmax_topk":
        weights = promoted.softmax(dim=-1).gather(1, experts)
    else:
        raise ValueError(f"topk_gate: order must be 'topk_softmax' or 'softmax_topk', got {order!r}")
    if renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return (weights * scale).to(logits.dtype), experts.to(torch.int32)


def in_best_groups(keys: Tensor, count: int, kept: int) -> Tensor:
    """Whether each of the keys (T, E) is in one of the `kept` best of `count` groups of E / count neighbours.

    A group's score is the sum of its two largest keys, or its only key. Of equal scores the lower group is better.
    """
    by_group = keys.unflatten(1, (count, -1))
    score = torch.sort(by_group, dim=-1, descending=True).values[..., :2].sum(-1)
    best = torch.sort(score, dim=-1, descending=True, stable=True).indices[:, :kept]
    return torch.zeros_like(score, dtype=torch.bool).scatter(1, best, True)[..., None].expand_as(by_group).flatten(1)
