"""The top-k gate, by definition: sort every row of logits, keep the first k, softmax before or after.

"topk_softmax" is the gate of SMoE, CompeteSMoE and of paper 001's Top-k baseline; "softmax_topk" that of V-MoE (003)
and of the sparse ViT (002).
"""

import torch
from torch import Tensor


def topk_gate(
    logits: Tensor, k: int, *, order: str = "topk_softmax", noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits (T, E) -> weights (T, K) and experts (T, K), by descending logit; of equal logits the lower expert first.

    "softmax_topk" too selects by logits, since softmax may round different logits to equal probabilities.
    NaN ranks highest. The selection is a constant to autograd.
    """
    noisy = logits if noise is None else logits + noise
    promoted = noisy.to(torch.promote_types(noisy.dtype, torch.float32))
    experts = torch.sort(noisy.detach(), dim=-1, descending=True, stable=True).indices[:, :k]
    if order == "topk_softmax":
        weights = promoted.gather(1, experts).softmax(dim=-1)
    elif order == "softmax_topk":
        weights = promoted.softmax(dim=-1).gather(1, experts)
    else:
        raise ValueError(f"topk_gate: order must be 'topk_softmax' or 'softmax_topk', got {order!r}")
    return weights.to(logits.dtype), experts.to(torch.int32)
