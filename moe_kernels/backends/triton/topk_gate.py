"""The top-k gate in Triton. A program holds the logits of one or more tokens in registers, as integer keys in the order
of the logits (NaN highest, -0 equal to +0). Each group of four neighbouring keys is sorted once. A choice is the
largest of the first keys of all groups; the other keys of its group then move up.

A 16-bit key and its expert share a 32-bit integer (PACKED), so a choice takes one maximum; of equal keys the lower
expert has the larger integer. With 32-bit keys a choice takes a maximum of keys, then a minimum of the experts with
that key.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.backends.triton import (
    FORMATS,
    keys_of,
    launch,
    move_up,
    on_device,
    patterns,
    sorted_fours,
    unsupported,
)
from moe_kernels.backends.triton._topk_gate_scored import _topk_gate_scored_bwd, _topk_gate_scored_fwd

TILE = 1024  # logits of a program, padding included; a program with one longer row has more
LONGEST = 16384  # largest number of experts


def _blocks(num_experts: int, k: int) -> dict[str, int]:
    experts = max(triton.next_power_of_2(num_experts), 8)
    tokens = max(TILE // experts, 1)
    choices = max(triton.next_power_of_2(k), 1)
    return {"BLOCK_T": tokens, "BLOCK_E": experts, "BLOCK_K": choices, "num_warps": min(tokens * experts // 256, 16)}


@triton.jit(do_not_specialize=["T"])
def _topk_gate_fwd(
    logits_ptr,  # (T, E)
    bits_ptr,  # (T, E) the bit patterns of the same logits
    weights_ptr,  # (T, K) contiguous
    experts_ptr,  # (T, K) contiguous
    stride_logits_T, T, E, K,
    SOFTMAX_FIRST: tl.constexpr, INF: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    PACKED: tl.constexpr = INF <= 0xFFFF
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    inside = (token < T)[:, None] & (e < E)
    offsets = token[:, None] * stride_logits_T + e
    # Padding is -inf. Of equal logits the lower expert is chosen first, so padding is never chosen, as K <= E.
    NEGATIVE_INF: tl.constexpr = INF - 0x8000 if PACKED else INF - 0x80000000
    keys = keys_of(tl.load(bits_ptr + offsets, mask=inside, other=NEGATIVE_INF).to(tl.int32), INF)
    if PACKED:
        keys = (keys << 16) | (BLOCK_E - 1 - e)
    experts = tl.broadcast_to(e[None, :], (BLOCK_T, BLOCK_E))
    keys0, keys1, keys2, keys3, e0, e1, e2, e3 = sorted_fours(keys, experts, PACKED)
    chosen = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for choice in range(K):
        best = tl.max(keys0, axis=1)
        if PACKED:
            expert = best
            is_chosen = keys0 == best[:, None]
        else:
            expert = tl.min(tl.where(keys0 == best[:, None], e0, BLOCK_E), axis=1)
            is_chosen = e0 == expert[:, None]
        keys0, keys1, keys2, keys3, e0, e1 = move_up(is_chosen, keys0, keys1, keys2, keys3, e0, e1, e2, BLOCK_K)
        e2 = tl.where(is_chosen, e3, e2)
        chosen = tl.where(k == choice, expert[:, None], chosen)
    if PACKED:
        chosen = BLOCK_E - 1 - (chosen & (BLOCK_E - 1))
    inside_k = (token < T)[:, None] & (k < K)
    tl.store(experts_ptr + token[:, None] * K + k, chosen, mask=inside_k)
    # The first choice has the highest logit. If a row holds NaN, this is NaN, and all weights become NaN.
    picked = tl.load(logits_ptr + token[:, None] * stride_logits_T + chosen, mask=inside_k, other=0.0).to(tl.float32)
    highest = tl.sum(tl.where(k == 0, picked, 0.0), axis=1)
    shares = tl.exp(picked - highest[:, None])
    if SOFTMAX_FIRST:
        values = tl.load(logits_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        total = tl.sum(tl.where(inside, tl.exp(values - highest[:, None]), 0.0), axis=1)
    else:
        total = tl.sum(tl.where(inside_k, shares, 0.0), axis=1)
    tl.store(weights_ptr + token[:, None] * K + k, shares / total[:, None], mask=inside_k)


@triton.jit(do_not_specialize=["T"])
def _topk_gate_bwd(
    grad_ptr,  # (T, K) contiguous
    weights_ptr,  # (T, K) contiguous
    experts_ptr,  # (T, K) contiguous
    logits_ptr,  # (T, E); only read if SOFTMAX_FIRST
    dlogits_ptr,  # (T, E) contiguous
    stride_logits_T, T, E, K,
    SOFTMAX_FIRST: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    inside_k = (token < T)[:, None] & (k < K)
    inside = (token < T)[:, None] & (e < E)
    grads = tl.load(grad_ptr + token[:, None] * K + k, mask=inside_k, other=0.0)
    weights = tl.load(weights_ptr + token[:, None] * K + k, mask=inside_k, other=0.0)
    mean = tl.sum(grads * weights, axis=1)
    if SOFTMAX_FIRST:
        # The probability of expert e is w_0 exp(z_e - z_0), where z_0 and w_0 are the logit and weight of the first
        # choice. z_e - z_0 is rounded once, so a common offset of the logits costs no accuracy.
        first = tl.load(experts_ptr + token * K, mask=token < T, other=0)
        highest = tl.load(logits_ptr + token * stride_logits_T + first, mask=token < T, other=0.0).to(tl.float32)
        scale = -mean * tl.load(weights_ptr + token * K, mask=token < T, other=0.0)
        offsets = token[:, None] * stride_logits_T + e
        values = tl.load(logits_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        slopes = scale[:, None] * tl.exp(values - highest[:, None])
    else:
        slopes = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    row = dlogits_ptr + token[:, None] * E
    tl.store(row + e, slopes.to(dlogits_ptr.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # gradients of chosen experts overwrite values that other threads have stored
    experts = tl.load(experts_ptr + token[:, None] * K + k, mask=inside_k, other=0)
    chosen = weights * (grads - mean[:, None])
    tl.store(row + experts, chosen.to(dlogits_ptr.dtype.element_ty), mask=inside_k & (experts.to(tl.uint32) < E))


def topk_gate_supports(device: str, dtype: torch.dtype) -> str | None:
    return unsupported(device, dtype, tuple(FORMATS))


def topk_gate_limits(target: str) -> dict[str, int]:
    return {"E": LONGEST}


@on_device
def topk_gate_fwd(
    logits: Tensor, k: int, order: str, bias: Tensor | None = None, num_groups: int = 0, kept_groups: int = 0,
    renormalise: bool = False, scale: float = 1.0, forced: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_tokens, num_experts = logits.shape
    weights = logits.new_empty((num_tokens, k), dtype=torch.float32)
    experts = logits.new_empty((num_tokens, k), dtype=torch.int32)
    if not weights.numel():
        return weights, experts
    by_score = bias is not None or num_groups > 0
    if by_score or order == "sigmoid" or renormalise or scale != 1 or forced is not None:
        size = num_experts // (num_groups or 1)
        columns = max(triton.next_power_of_2(size), 4)
        blocks = _blocks(columns * triton.next_power_of_2(num_groups or 1), k)
        _check_experts(blocks["BLOCK_E"])
        launch(
            _topk_gate_scored_fwd, (triton.cdiv(num_tokens, blocks["BLOCK_T"]),),
            logits, bias, forced, weights, experts, logits.stride(0), num_tokens, k, scale,
            RULE=order, BY_SCORE=by_score, HAS_BIAS=bias is not None, FORCED=forced is not None,
            RENORMALISE=renormalise, SIZE=size, GROUPS=num_groups or 1, KEPT=kept_groups or 1, BLOCK_S=columns,
            **blocks,
        )  # fmt: skip
        return weights, experts
    _check_experts(num_experts)
    blocks = _blocks(num_experts, k)
    launch(
        _topk_gate_fwd, (triton.cdiv(num_tokens, blocks["BLOCK_T"]),),
        logits, patterns(logits), weights, experts, logits.stride(0), num_tokens, num_experts, k,
        SOFTMAX_FIRST=order == "softmax_topk", INF=FORMATS[logits.dtype][0], **blocks,
    )  # fmt: skip
    return weights, experts


@on_device
def topk_gate_bwd(
    grad: Tensor,
    weights: Tensor,
    experts: Tensor,
    logits: Tensor | None,
    num_experts: int,
    dtype: torch.dtype,
    order: str = "",
    renormalise: bool = False,
    scale: float = 1.0,
) -> Tensor:
    num_tokens, k = grad.shape
    dlogits = grad.new_empty((num_tokens, num_experts), dtype=dtype)
    if not dlogits.numel():
        return dlogits
    _check_experts(num_experts)
    blocks = _blocks(num_experts, k)
    grid = (triton.cdiv(num_tokens, blocks["BLOCK_T"]),)
    if order != "" and logits is not None:
        launch(
            _topk_gate_scored_bwd, grid, grad, experts, logits, dlogits, logits.stride(0), num_tokens, num_experts, k,
            scale, RULE=order, RENORMALISE=renormalise, **blocks,
        )  # fmt: skip
        return dlogits
    source = dlogits if logits is None else logits
    launch(
        _topk_gate_bwd, grid, grad, weights, experts, source, dlogits, source.stride(0), num_tokens, num_experts, k,
        SOFTMAX_FIRST=logits is not None, **blocks,
    )  # fmt: skip
    return dlogits


def _check_experts(num_experts: int) -> None:
    if num_experts > LONGEST:
        raise ValueError(
            f"topk_gate: the Triton kernel takes at most {LONGEST} experts (with each group of experts padded to a "
            f"power of two, at least 4, and their number too), got {num_experts}"
        )
