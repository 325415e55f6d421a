"""A layer of experts in plain PyTorch: a loop over the experts, as most code has it, and torch's grouped product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.nn import MoE
from python_ref.grouped_gemm import activate

Layer = Callable[[MoE, Tensor, int | None], Tensor]  # of the MoE whose parameters it reads, x and the capacity


def chosen_by_torch(
    logits: Tensor, k: int, order: str, bias: Tensor | None, groups: tuple[int, int] | None
) -> tuple[Tensor, Tensor]:
    """Gate weights and experts (T, K) by torch; with a bias sigmoid scores, as transformers' DeepSeek-V3 has them."""
    if bias is None and order == "softmax_topk":
        return logits.softmax(-1).topk(k, -1)
    if bias is None:
        weights, experts = logits.topk(k, -1)
        return weights.softmax(-1), experts
    scores = logits.sigmoid()
    keys = scores + bias
    if groups is not None:
        best = keys.unflatten(-1, (groups[0], -1)).topk(2, -1).values.sum(-1).topk(groups[1], -1).indices
        kept = torch.zeros_like(keys[:, : groups[0]]).scatter(1, best, 1)
        keys = keys.masked_fill(kept.repeat_interleave(keys.shape[1] // groups[0], 1) == 0, -torch.inf)
    experts = keys.topk(k, -1).indices
    weights = scores.gather(1, experts)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20), experts


def _routed(layer: MoE, x: Tensor, capacity: int | None) -> tuple[Tensor, Tensor]:
    """Gate weights and experts (T, K), by torch; -1 for choices past the capacity, in V-MoE's order."""
    gate: Any = layer.gate
    logits = F.linear(x, gate.linear.weight, gate.linear.bias).float()
    bias = gate.balance_bias if gate.scores == "sigmoid" else None
    weights, experts = chosen_by_torch(logits, gate.k, gate.order, bias, gate.groups)
    if capacity is not None:
        chosen = F.one_hot(experts.t().reshape(-1), logits.shape[1])  # first choices of all tokens, then second ones
        slot = (chosen.cumsum(0) * chosen).sum(-1) - 1
        experts = torch.where((slot < capacity).view(-1, x.shape[0]).t(), experts, -1)
    return weights, experts


def loop(layer: MoE, x: Tensor, capacity: int | None = None) -> Tensor:
    """A product for each expert that has tokens; on a GPU the host waits for the tokens' numbers."""
    weights, experts = _routed(layer, x, capacity)
    mlp: Any = layer.experts
    y, none = torch.zeros_like(x), [None] * mlp.num_experts
    # unbind, whose gradient is one stack; indexing an expert would add E arrays of all experts' size in backward.
    given = (none if each is None else each.unbind() for each in (mlp.w_in, mlp.b_in, mlp.w_out, mlp.b_out))
    for e, (w_in, b_in, w_out, b_out) in enumerate(zip(*given, strict=True)):
        token, choice = (experts == e).nonzero(as_tuple=True)
        pre = x[token] @ w_in
        pre = pre if b_in is None else pre + b_in
        out = activate(pre, mlp.activation) @ w_out
        out = out if b_out is None else out + b_out
        y = y.index_add(0, token, out * weights[token, choice, None].to(x.dtype))
    return y


def grouped(layer: MoE, x: Tensor, capacity: int | None = None) -> Tensor:
    """Rows sorted by expert, then two grouped products; without a capacity the host waits for nothing."""
    weights, experts = _routed(layer, x, capacity)
    mlp, k = layer.experts, experts.shape[1]
    flat = experts.flatten()
    order = torch.argsort(torch.where(flat < 0, mlp.num_experts, flat), stable=True)
    if capacity is not None:
        order = order[: int((flat >= 0).sum())]
    expert, token = flat[order], order // k
    bounds = torch.bincount(expert, minlength=mlp.num_experts).cumsum(0).int()
    pre = F.grouped_mm(x[token], mlp.w_in, offs=bounds)  # type: ignore[arg-type]
    pre = pre if mlp.b_in is None else pre + mlp.b_in[expert]  # type: ignore[index]
    out = F.grouped_mm(activate(pre, mlp.activation), mlp.w_out, offs=bounds)  # type: ignore[arg-type]
    out = out if mlp.b_out is None else out + mlp.b_out[expert]  # type: ignore[index]
    return torch.zeros_like(x).index_add(0, token, out * weights.flatten()[order, None].to(x.dtype))


LAYERS: dict[str, Layer] = {"torch eager loop": loop}
if hasattr(F, "grouped_mm"):
    LAYERS["torch grouped_mm"] = grouped
