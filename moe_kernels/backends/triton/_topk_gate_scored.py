"""The top-k gate in Triton with scores, a bias, groups of experts, forced experts or scaled weights. It chooses as the
kernel in topk_gate.py, by 32-bit keys: those of float32 logits, or of scores + bias.

A tile has a column for each place in a group, padded to BLOCK_S columns a group. So the experts of a group are
neighbours, aligned to a power of two, and columns are in the order of experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.backends.triton import keys_of, move_up, sorted_fours


@triton.jit
def _key_of_score(values):
    """The keys of scores + bias. None of them is -0, so that the bits of negative numbers need only be inverted."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(values != values, 0x7F800001, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _score_of_key(keys):
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _two_best(first, second, other_first, other_second):
    low = tl.minimum(first, other_first)
    return tl.maximum(first, other_first), tl.maximum(low, tl.maximum(second, other_second))


@triton.jit
def _kept_groups(first, second, SIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr):
    """(BLOCK_T, GROUPS) bool: the KEPT groups with the largest sums of two keys. first, second: (BLOCK_T, GROUPS, n),
    pairs of keys whose group's two largest ones are among them."""
    LOWEST: tl.constexpr = -0x80000000
    first, second = tl.reduce((first, second), 2, _two_best)
    score = first
    if SIZE > 1:
        score = _key_of_score(_score_of_key(first) + _score_of_key(second))
    group = tl.arange(0, score.shape[1])
    if score.shape[1] > GROUPS:
        score = tl.where(group < GROUPS, score, LOWEST)
    kept = score != score
    for _ in range(KEPT):
        best = tl.max(score, axis=1)
        lowest = tl.min(tl.where(score == best[:, None], group, score.shape[1]), axis=1)
        found = group == lowest[:, None]
        kept |= found
        score = tl.where(found, LOWEST, score)
    return kept


@triton.jit
def _weights(picked, inside_k, highest, total, RULE: tl.constexpr):
    """Weights of the choices with the logits `picked`, before renormalisation; 0 outside. highest and total are those
    of the softmax over all experts, which only "softmax_topk" reads."""
    if RULE == "sigmoid":
        return tl.where(inside_k, 1 / (1 + tl.exp(-picked)), 0.0)
    if RULE == "topk_softmax":
        highest = tl.max(tl.where(inside_k, picked, float("-inf")), axis=1)
        shares = tl.where(inside_k, tl.exp(picked - highest[:, None]), 0.0)
        total = tl.sum(shares, axis=1)
    else:
        shares = tl.where(inside_k, tl.exp(picked - highest[:, None]), 0.0)
    return shares / total[:, None]


@triton.jit(do_not_specialize=["T"])
def _topk_gate_scored_fwd(
    logits_ptr,  # (T, E)
    bias_ptr,  # (E); only read if HAS_BIAS
    forced_ptr,  # (T, K) contiguous; only read if FORCED
    weights_ptr,  # (T, K) contiguous
    experts_ptr,  # (T, K) contiguous
    stride_logits_T, T, K, scale,
    RULE: tl.constexpr, BY_SCORE: tl.constexpr, HAS_BIAS: tl.constexpr, FORCED: tl.constexpr,
    RENORMALISE: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    LOWEST: tl.constexpr = -0x80000000
    E: tl.constexpr = SIZE * GROUPS
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_E)
    if GROUPS == 1 or SIZE == BLOCK_S:
        e = column
        exists = column < E
    else:
        e = column // BLOCK_S * SIZE + column % BLOCK_S
        exists = (column % BLOCK_S < SIZE) & (column // BLOCK_S < GROUPS)
    k = tl.arange(0, BLOCK_K)
    inside = (token < T)[:, None] & exists
    inside_k = (token < T)[:, None] & (k < K)
    values = tl.load(logits_ptr + token[:, None] * stride_logits_T + e, mask=inside, other=0.0).to(tl.float32)
    highest = 0.0 * tl.arange(0, BLOCK_T)
    total = highest
    if RULE == "softmax_topk" or (RULE == "topk_softmax" and BY_SCORE):
        highest = tl.max(tl.where(inside, values, float("-inf")), axis=1)
        shares = tl.where(inside, tl.exp(values - highest[:, None]), 0.0)
        total = tl.sum(shares, axis=1)
    if BY_SCORE:
        if RULE == "sigmoid":
            values = 1 / (1 + tl.exp(-values))
        else:
            values = shares / total[:, None]
        if HAS_BIAS:
            values += tl.load(bias_ptr + e, mask=exists, other=0.0)
    if BY_SCORE:
        keys = _key_of_score(values)
    else:
        keys = keys_of(values.to(tl.int32, bitcast=True), 0x7F800000)
    if BLOCK_E > E:
        keys = tl.where(exists, keys, LOWEST)
    experts = tl.broadcast_to(e[None, :], (BLOCK_T, BLOCK_E))
    keys0, keys1, keys2, keys3, e0, e1, e2, e3 = sorted_fours(keys, experts, False)
    if KEPT < GROUPS:
        PADDED: tl.constexpr = BLOCK_E // BLOCK_S
        pairs: tl.constexpr = (BLOCK_T, PADDED, BLOCK_S // 4)
        kept = _kept_groups(tl.reshape(keys0, pairs), tl.reshape(keys1, pairs), SIZE, GROUPS, KEPT)
        if FORCED:
            by_group = tl.reshape(keys, (BLOCK_T, PADDED, BLOCK_S))
            keys = tl.reshape(tl.where(kept[:, :, None], by_group, LOWEST), (BLOCK_T, BLOCK_E))
        else:
            keys0 = tl.reshape(tl.where(kept[:, :, None], tl.reshape(keys0, pairs), LOWEST), (BLOCK_T, BLOCK_E // 4))
    if FORCED:
        forced = tl.load(forced_ptr + token[:, None] * K + k, mask=inside_k, other=-1)
        forced = tl.minimum(tl.maximum(forced, -1), E - 1).to(tl.int32)
        for choice in range(K):
            taken = tl.sum(tl.where(k == choice, forced, 0), axis=1)
            keys = tl.where(e == taken[:, None], LOWEST, keys)
        keys0, keys1, keys2, keys3, e0, e1, e2, e3 = sorted_fours(keys, experts, False)
    chosen = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for choice in range(K):
        best = tl.max(keys0, axis=1)
        expert = tl.min(tl.where(keys0 == best[:, None], e0, E), axis=1)
        is_chosen = e0 == expert[:, None]
        if FORCED:
            taken = tl.sum(tl.where(k == choice, forced, 0), axis=1)
            is_chosen &= (taken < 0)[:, None]
            expert = tl.where(taken < 0, expert, taken)
        keys0, keys1, keys2, keys3, e0, e1 = move_up(is_chosen, keys0, keys1, keys2, keys3, e0, e1, e2, BLOCK_K)
        e2 = tl.where(is_chosen, e3, e2)
        chosen = tl.where(k == choice, expert[:, None], chosen)
    tl.store(experts_ptr + token[:, None] * K + k, chosen, mask=inside_k)
    picked = tl.load(logits_ptr + token[:, None] * stride_logits_T + chosen, mask=inside_k, other=0.0).to(tl.float32)
    weights = _weights(picked, inside_k, highest, total, RULE)
    if RENORMALISE:
        scale = scale / (tl.sum(weights, axis=1) + 1e-20)
        weights *= scale[:, None]
    else:
        weights *= scale
    tl.store(weights_ptr + token[:, None] * K + k, weights, mask=inside_k)


@triton.jit(do_not_specialize=["T"])
def _topk_gate_scored_bwd(
    grad_ptr,  # (T, K) contiguous
    experts_ptr,  # (T, K) contiguous
    logits_ptr,  # (T, E)
    dlogits_ptr,  # (T, E) contiguous
    stride_logits_T, T, E, K, scale,
    RULE: tl.constexpr, RENORMALISE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    inside = (token < T)[:, None] & (e < E)
    inside_k = (token < T)[:, None] & (k < K)
    experts = tl.load(experts_ptr + token[:, None] * K + k, mask=inside_k, other=0)
    chosen = inside_k & (experts.to(tl.uint32) < E)
    picked = tl.load(logits_ptr + token[:, None] * stride_logits_T + experts, mask=chosen, other=0.0).to(tl.float32)
    highest = 0.0 * tl.arange(0, BLOCK_T)
    total = highest
    if RULE == "softmax_topk":
        values = tl.load(logits_ptr + token[:, None] * stride_logits_T + e, mask=inside, other=0.0).to(tl.float32)
        highest = tl.max(tl.where(inside, values, float("-inf")), axis=1)
        shares = tl.where(inside, tl.exp(values - highest[:, None]), 0.0)
        total = tl.sum(shares, axis=1)
    weights = _weights(picked, inside_k, highest, total, RULE)
    grads = tl.load(grad_ptr + token[:, None] * K + k, mask=inside_k, other=0.0)
    if RENORMALISE:
        sums = tl.sum(weights, axis=1) + 1e-20
        mean = tl.sum(weights * grads, axis=1) / sums
        grads = (scale / sums)[:, None] * (grads - mean[:, None])
    else:
        grads *= scale
    common = tl.sum(weights * grads, axis=1)
    if RULE == "softmax_topk":
        slopes = shares * (-common / total)[:, None]
    else:
        slopes = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    row = dlogits_ptr + token[:, None] * E
    tl.store(row + e, slopes.to(dlogits_ptr.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # gradients of chosen experts overwrite values that other threads have stored
    if RULE == "sigmoid":
        slopes_k = weights * (1 / (1 + tl.exp(picked))) * grads
    else:
        slopes_k = weights * (grads - common[:, None])
    tl.store(row + experts, slopes_k.to(dlogits_ptr.dtype.element_ty), mask=chosen)
