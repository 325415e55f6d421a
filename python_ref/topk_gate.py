"""The top-k gate, by definition: sort every row of logits, keep the first k, softmax before or after.

"topk_softmax" is the gate of CompeteSMoE and of the Top-k baseline of COMET trees; "softmax_topk" is the gate of V-MoE
and of the sparse ViT.
"""

import torch
from torch import Tensor


def topk_gate(
    logits: Tensor, k: int, *, order: str = "topk_softmax", noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits (T, E) -> weights (T, K) and experts (T, K), in descending order of logits + noise.

    Of equal sums the lower expert comes first; NaN ranks highest. "softmax_topk" too selects by these sums, not by
    probability: softmax may round different sums to equal probabilities. The selection is a constant to autograd.
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
