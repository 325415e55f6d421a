"""The tree gate in Triton. A program has one or more tokens and keeps one tree's probabilities at a time in registers.

A tree of E leaves has 2^DEPTH places, one for each possible leaf of the last level, from left to right. A leaf of the
level above takes the left one of its two places; in the layout GROUPS leaves take consecutive places instead.
Backward sums pairs of neighbouring places, level by level up to the root. If tree_gate_fits, one forward kernel also
computes the matrix products that give the logits. In shapes K is the number of trees.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.backends.native.tree_gate import weighing
from moe_kernels.backends.triton import common_unit, launch, on_device, unsupported
from moe_kernels.backends.triton._tree_route import MAX_HELD, MAX_TREES, WARP, _tree_route_fwd
from moe_kernels.backends.triton._tree_steps import clamp, share, smooth
from moe_kernels.sizes import contiguous_rows

TILE = 2048  # places of a program, 16 a thread; 4096 above 2048 experts
MAX_EXPERTS = 4096
MAX_FUSED_EXPERTS = 64

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# FULL: all leaves are at the last level. GROUPS: a group of 16 places has 16 leaves of one level, or none. MIXED: else.
FULL, GROUPS, MIXED = tl.constexpr(2), tl.constexpr(1), tl.constexpr(0)
LOWEST = tl.constexpr(-3.4028234663852886e38)
TREE_GATE_ROUNDS = True  # gates and leaf probabilities leave the kernel in the dtype of x


def _blocks(num_experts: int, upwards: bool) -> tuple[dict[str, int], int]:
    """(tile arguments, warps). upwards: for backward, which goes up the tree."""
    depth = (num_experts - 1).bit_length()
    tokens = max(TILE >> depth, 1)
    return {"BLOCK_T": tokens, "DEPTH": depth, "LAYOUT": _layout(num_experts, upwards)}, (tokens << depth) * 4 // TILE


def _fused_blocks(num_experts: int) -> tuple[dict[str, int], int, int]:
    """(tile arguments, warps, pipeline stages) of _tree_gate_fused, whose two products have COLUMNS columns each."""
    depth = (num_experts - 1).bit_length()
    columns, layout = max(1 << depth, 16), _layout(num_experts)
    blocks = {"BLOCK_T": 64, "BLOCK_P": 64, "COLUMNS": columns, "DEPTH": depth, "LAYOUT": layout}
    return blocks, max(columns // 8, 4), 3


def _layout(num_experts: int, upwards: bool = False) -> int:
    """The layout of the leaves. Backward (upwards) sums pairs of neighbouring places, so it cannot use GROUPS."""
    if num_experts & (num_experts - 1) == 0:
        return FULL.value
    return GROUPS.value if num_experts % 16 == 0 and not upwards else MIXED.value


@triton.jit
def _derivative(t, left, right, half, slope):
    """d/dt of a h(t) + b (1 - h(t)), given left = a h and right = b (1 - h): left h' / h - right h' / (1 - h).

    h is the smooth step. With u = t / gamma + 1/2 and w = 1 - u, h' / h is 6 w / (gamma u (3 - 2u)); h' / (1 - h) has u
    and w exchanged. The result is 0 if the step is saturated.
    """
    t = clamp(t, half)
    u, w = share(t, 1.0, half, slope), share(t, -1.0, half, slope)
    of_u, of_w = u * tl.fma(u, -2.0, 3.0), w * tl.fma(w, -2.0, 3.0)
    saturated = (u == 0.0) | (w == 0.0)
    d = 6.0 * slope * tl.fma(left, w * of_w, -right * (u * of_u)) / tl.where(saturated, 1.0, of_u * of_w)
    return tl.where(saturated, 0.0, d)


@triton.jit
def _experts(E, DEPTH: tl.constexpr, LAYOUT: tl.constexpr):
    """(expert, leaf): the expert of each place, and whether the place has a leaf."""
    place = tl.arange(0, 1 << DEPTH)
    deep = 2 * E - (1 << DEPTH)  # number of leaves at the last level
    if LAYOUT == FULL:
        return place, place >= 0
    elif LAYOUT == GROUPS:
        return place, place < E
    else:
        return tl.where(place < deep, place, (place + deep) // 2), (place < deep) | (place % 2 == 0)


@triton.jit
def _node(node_ptr, exists):
    """The logit of a node; +inf if it does not exist, which gives the left child the whole probability."""
    return tl.load(node_ptr, mask=exists, other=float("inf")).to(tl.float32)


@triton.jit
def _below(v, first_ptr, first, valid, E, half, slope, INDEX: tl.constexpr, LEVELS: tl.constexpr, LAYOUT: tl.constexpr):
    """(BLOCK_T, groups, 2^LEVELS): the probability of each place below one node of every group.

    v: the probability of this node, whose number is first + INDEX. Node `first` is the left-most of its level in the
    group, and its logit is at first_ptr.
    """
    exists = valid & (first + INDEX < E) if LAYOUT == MIXED else valid
    t = _node(first_ptr + INDEX, exists)
    size = tl.minimum(tl.abs(t), half, propagate_nan=tl.PropagateNan.ALL)
    less = v * smooth(share(size, -1.0, half, slope))
    more = v - less  # at least v / 2, so nothing cancels
    left, right = tl.where(t < 0, less, more), tl.where(t < 0, more, less)
    if LEVELS == 1:
        return tl.join(left, right)
    else:
        first_ptr += first
        first *= 2
        left = _below(left, first_ptr, first, valid, E, half, slope, 2 * INDEX, LEVELS - 1, LAYOUT)
        right = _below(right, first_ptr, first, valid, E, half, slope, 2 * INDEX + 1, LEVELS - 1, LAYOUT)
        both = tl.permute(tl.join(left, right), (0, 1, 3, 2))
        return tl.reshape(both, (v.shape[0], v.shape[1], 1 << LEVELS))


@triton.jit
def _reach(nodes_ptr, row, real, E, half, slope, BLOCK_T: tl.constexpr, DEPTH: tl.constexpr, LAYOUT: tl.constexpr):
    """(BLOCK_T, 2^DEPTH): the probability of each place of the tree whose E - 1 logits are row `row` of nodes_ptr.

    The places below one node, the group's root, are a group: 16 places, or all if there are fewer. The loop computes
    the probability of each group's root, then _below those of its places. Node 1 is the root of the tree; node n has
    the children 2 n and 2 n + 1.
    """
    ABOVE: tl.constexpr = max(DEPTH - 4, 0)
    group = tl.arange(0, 1 << ABOVE)
    root = (1 << ABOVE) + group
    valid = real[:, None]
    if LAYOUT == GROUPS:  # in groups of leaves above the last level, the root is a level higher too
        root -= tl.where(16 * group < 2 * E - (1 << DEPTH), 0, E // 16)
        valid = valid & (16 * group < E)[None, :]
    nodes_ptr += row[:, None] * (E - 1) - 1
    v = tl.full((BLOCK_T, 1 << ABOVE), 1.0, tl.float32)
    for level in tl.static_range(ABOVE, 0, -1):
        child = root >> (level - 1)
        sign = 1.0 - 2.0 * (child % 2)
        exists = valid
        if LAYOUT == GROUPS:  # a path that is a level shorter has no node at the first step: its factor is 1
            sign = tl.where(child > 1, sign, 1.0)
            exists = valid & (child > 1)[None, :]
        t = clamp(_node(nodes_ptr + (child // 2)[None, :], exists), half)
        v *= smooth(share(t, sign[None, :], half, slope))
    if DEPTH > 0:
        first = root[None, :]
        v = _below(v, nodes_ptr + first, first, valid, E, half, slope, 0, min(DEPTH, 4), LAYOUT)
    return tl.reshape(v, (BLOCK_T, 1 << DEPTH))


@triton.jit
def _weighed(v, EPSILON: tl.constexpr):
    """A leaf's factor in the softmax: its probability plus EPSILON, which is 0 without `parity` (ops/tree_gate.py)."""
    if EPSILON > 0:
        v += EPSILON
    return v


@triton.jit
def _gates(
    split_logits_ptr,  # (T, K, E - 1) contiguous
    leaf_logits_ptr,  # (T, K, E) contiguous
    gates_ptr,  # (T, E) contiguous
    leaf_probs_ptr,  # (T, K, E) contiguous
    first,  # first token
    T,
    K,
    E,
    half,  # gamma / 2
    slope,  # 1 / gamma
    least,  # leaves of smaller probability do not count in the softmax
    EPSILON: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DEPTH: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Stores the gates and leaf probabilities of up to BLOCK_T tokens, from `first` on."""
    split_logits_ptr += first * K * (E - 1)
    leaf_logits_ptr += first * K * E
    leaf_probs_ptr += first * K * E
    token = tl.arange(0, BLOCK_T)
    real = token < T - first
    expert, leaf = _experts(E, DEPTH, LAYOUT)
    inside = real[:, None] & leaf
    highest = tl.full((BLOCK_T,), LOWEST, tl.float32)
    sums = tl.zeros((BLOCK_T, 1 << DEPTH), tl.float32)
    for k in range(K):
        row = token * K + k
        v = _reach(split_logits_ptr, row, real, E, half, slope, BLOCK_T, DEPTH, LAYOUT)
        at = row[:, None] * E + expert
        tl.store(leaf_probs_ptr + at, v.to(leaf_probs_ptr.dtype.element_ty), mask=inside)
        a = tl.load(leaf_logits_ptr + at, mask=inside, other=0.0).to(tl.float32)
        a = tl.where(leaf[None, :] & ~(v < least), a, -float("inf"))
        higher = tl.maximum(highest, tl.max(a, axis=1))
        terms = _weighed(v, EPSILON) * tl.exp(a - higher[:, None])
        sums = tl.fma(sums, tl.exp(highest - higher)[:, None], terms)
        highest = higher
    gates = tl.div_rn(sums, tl.sum(sums, axis=1)[:, None])  # correctly rounded: a gate is 1 if no other expert counts
    at = gates_ptr + first * E + token[:, None] * E + expert
    tl.store(at, gates.to(gates_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def _tree_gate_fwd(
    split_logits_ptr,
    leaf_logits_ptr,
    gates_ptr,
    leaf_probs_ptr,
    T,
    K,
    E,
    half,
    slope,
    least,
    EPSILON: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DEPTH: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    _gates(
        split_logits_ptr, leaf_logits_ptr, gates_ptr, leaf_probs_ptr, tl.program_id(0).to(tl.int64) * BLOCK_T,
        T, K, E, half, slope, least, EPSILON, BLOCK_T, DEPTH, LAYOUT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _tree_gate_bwd(
    grad_gates_ptr,  # (T, E) contiguous
    grad_leaf_probs_ptr,  # (T, K, E) contiguous; not read unless LEAF_PROBS
    split_logits_ptr,  # (T, K, E - 1) contiguous
    leaf_logits_ptr,  # (T, K, E) contiguous
    dsplit_ptr,  # (T, K, E - 1) contiguous
    dleaf_ptr,  # (T, K, E) contiguous
    T,
    K,
    E,
    half,
    slope,
    least,
    EPSILON: tl.constexpr,
    LEAF_PROBS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DEPTH: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    split_logits_ptr += first * K * (E - 1)
    dsplit_ptr += first * K * (E - 1)
    leaf_logits_ptr += first * K * E
    dleaf_ptr += first * K * E
    token = tl.arange(0, BLOCK_T)
    real = token < T - first
    expert, leaf = _experts(E, DEPTH, LAYOUT)
    inside = real[:, None] & leaf
    grad_gates_ptr += first * E
    grad = tl.load(grad_gates_ptr + token[:, None] * E + expert, mask=inside, other=0.0).to(tl.float32)
    highest = tl.full((BLOCK_T,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    dot = tl.zeros((BLOCK_T,), tl.float32)
    for k in range(K):
        row = token * K + k
        v = _reach(split_logits_ptr, row, real, E, half, slope, BLOCK_T, DEPTH, LAYOUT)
        a = tl.load(leaf_logits_ptr + row[:, None] * E + expert, mask=inside, other=0.0).to(tl.float32)
        a = tl.where(leaf[None, :] & ~(v < least), a, -float("inf"))
        higher = tl.maximum(highest, tl.max(a, axis=1))
        terms = _weighed(v, EPSILON) * tl.exp(a - higher[:, None])
        scale = tl.exp(highest - higher)
        total = tl.fma(total, scale, tl.sum(terms, axis=1))
        dot = tl.fma(dot, scale, tl.sum(terms * grad, axis=1))
        highest = higher
    grad -= (dot / total)[:, None]
    # Computes the probabilities of each tree again: those of K trees may not fit in registers.
    for k in range(K):
        row = token * K + k
        v = _reach(split_logits_ptr, row, real, E, half, slope, BLOCK_T, DEPTH, LAYOUT)
        at = row[:, None] * E + expert
        a = tl.load(leaf_logits_ptr + at, mask=inside, other=0.0).to(tl.float32)
        counted = leaf[None, :] & ~(v < least)
        # `total` is at least _weighed(v) of the counted leaf of highest logit, so share is finite. Below, v * share
        # comes first, since share * grad could overflow.
        share = tl.where(counted, tl.exp(a - highest[:, None]) / total[:, None], 0.0)
        dleaf = _weighed(v, EPSILON) * share * grad
        tl.store(dleaf_ptr + at, dleaf.to(dleaf_ptr.dtype.element_ty), mask=inside)
        below = v * share * grad
        if LEAF_PROBS:
            grad_probs = tl.load(grad_leaf_probs_ptr + first * K * E + at, mask=inside, other=0.0)
            below += tl.where(leaf, v, 0.0) * grad_probs.to(tl.float32)
        for up in tl.static_range(1, DEPTH + 1):
            pairs = tl.reshape(below, (BLOCK_T, 1 << (DEPTH - up), 2))
            left, right = tl.split(pairs)
            node = (1 << (DEPTH - up)) - 1 + tl.arange(0, 1 << (DEPTH - up))
            at, exists = row[:, None] * (E - 1) + node, real[:, None] & (node < E - 1)
            t = tl.load(split_logits_ptr + at, mask=exists, other=0.0).to(tl.float32)
            dsplit = _derivative(t, left, right, half, slope)
            tl.store(dsplit_ptr + at, dsplit.to(dsplit_ptr.dtype.element_ty), mask=exists)
            below = tl.sum(pairs, axis=2)


@triton.jit(do_not_specialize=["T"])
def _tree_gate_fused(
    x_ptr,  # (T, P) contiguous
    split_weight_ptr,  # (1, E - 1, P) contiguous
    leaf_weight_ptr,  # (1, E, P) contiguous
    split_bias_ptr,  # (1, E - 1); not read unless BIASES & 1
    leaf_bias_ptr,  # (1, E); not read unless BIASES & 2
    gates_ptr,  # (T, E) contiguous
    leaf_probs_ptr,  # (T, 1, E) contiguous
    split_logits_ptr,  # (T, 1, E - 1) contiguous
    leaf_logits_ptr,  # (T, 1, E) contiguous
    T,
    P_16,  # P / 16, so that the compiler knows that rows are aligned to 16 bytes
    E,
    half,
    slope,
    least,
    EPSILON: tl.constexpr,
    BIASES: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    token = tl.arange(0, BLOCK_T)
    real = token < T - first
    column = tl.arange(0, COLUMNS)
    node, leaf = column < E - 1, column < E
    splits = tl.zeros((BLOCK_T, COLUMNS), tl.float32)
    leaves = tl.zeros((BLOCK_T, COLUMNS), tl.float32)
    p, P = tl.arange(0, BLOCK_P), P_16 * 16
    x_ptr += first * P
    for start in range(0, P, BLOCK_P):
        p_inside = start + p < P
        x = tl.load(x_ptr + token[:, None] * P + start + p, mask=real[:, None] & p_inside, other=0.0)
        at = split_weight_ptr + column * P + (start + p)[:, None]
        split_weight = tl.load(at, mask=node & p_inside[:, None], other=0.0)
        at = leaf_weight_ptr + column * P + (start + p)[:, None]
        leaf_weight = tl.load(at, mask=leaf & p_inside[:, None], other=0.0)
        if WIDEN:
            x, split_weight, leaf_weight = x.to(tl.float32), split_weight.to(tl.float32), leaf_weight.to(tl.float32)
        splits = tl.dot(x, split_weight, splits)
        leaves = tl.dot(x, leaf_weight, leaves)
    if BIASES & 1:
        splits += tl.load(split_bias_ptr + column, mask=node, other=0.0).to(tl.float32)
    if BIASES & 2:
        leaves += tl.load(leaf_bias_ptr + column, mask=leaf, other=0.0).to(tl.float32)
    at = split_logits_ptr + first * (E - 1) + token[:, None] * (E - 1) + column
    tl.store(at, splits.to(x_ptr.dtype.element_ty), mask=real[:, None] & node)
    at = leaf_logits_ptr + first * E + token[:, None] * E + column
    tl.store(at, leaves.to(x_ptr.dtype.element_ty), mask=real[:, None] & leaf)
    # _gates reads the logits that other threads have stored, rounded to the dtype of x as in backward.
    tl.debug_barrier()
    _gates(
        split_logits_ptr, leaf_logits_ptr, gates_ptr, leaf_probs_ptr, first,
        T, 1, E, half, slope, least, EPSILON, BLOCK_T, DEPTH, LAYOUT,
    )  # fmt: skip


def tree_gate_supports(device: str, dtype: torch.dtype) -> str | None:
    return unsupported(device, dtype, tuple(TYPES))


tree_route_supports = tree_gate_supports


def tree_gate_limits(target: str) -> dict[str, int]:
    return {"E": MAX_EXPERTS}


def tree_route_limits(target: str) -> dict[str, int]:
    return {"K": MAX_TREES, "E": 2**30}  # a node's number, up to 2 E - 1, is an int32


@on_device
def tree_gate_fwd(split_logits: Tensor, leaf_logits: Tensor, gamma: float, mode: str) -> tuple[Tensor, Tensor]:
    num_tokens, _, num_experts = leaf_logits.shape
    gates = leaf_logits.new_empty((num_tokens, num_experts))
    leaf_probs = gates.new_empty(leaf_logits.shape)
    _launch(_tree_gate_fwd, (split_logits, leaf_logits, gates, leaf_probs), leaf_logits, gamma, mode)
    return gates, leaf_probs


@on_device
def tree_gate_bwd(
    grad_gates: Tensor,
    grad_leaf_probs: Tensor | None,
    split_logits: Tensor,
    leaf_logits: Tensor,
    gamma: float,
    mode: str,
) -> tuple[Tensor, Tensor]:
    dsplit, dleaf = torch.empty_like(split_logits), torch.empty_like(leaf_logits)
    grads = grad_gates, grad_gates if grad_leaf_probs is None else grad_leaf_probs
    tensors = (*grads, split_logits, leaf_logits, dsplit, dleaf)
    given = grad_leaf_probs is not None
    _launch(_tree_gate_bwd, tensors, leaf_logits, gamma, mode, upwards=True, LEAF_PROBS=given)
    return dsplit, dleaf


def _launch(
    kernel, tensors: tuple[Tensor, ...], leaf_logits: Tensor, gamma: float, mode: str, upwards=False, **constants
) -> None:
    num_tokens, num_trees, num_experts = leaf_logits.shape
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"tree_gate: the Triton kernel takes at most {MAX_EXPERTS} experts, got {num_experts}")
    if num_tokens == 0:
        return
    blocks, warps = _blocks(num_experts, upwards)
    launch(
        kernel, (triton.cdiv(num_tokens, blocks["BLOCK_T"]),),
        *tensors, num_tokens, num_trees, num_experts,
        **_numbers(gamma, mode), **blocks, **constants, num_warps=warps,
    )  # fmt: skip


def _numbers(gamma: float, mode: str) -> dict[str, float]:
    epsilon, least = weighing(mode, torch.float32)
    return {"half": gamma / 2, "slope": 1 / gamma, "least": least, "EPSILON": epsilon}


def tree_gate_fits(x: Tensor, split_weight: Tensor, leaf_weight: Tensor) -> bool:
    """Whether tree_gate_fused_fwd takes these: 16-bit, one tree, E <= MAX_FUSED_EXPERTS, P a multiple of 16."""
    num_trees, num_experts, dim = leaf_weight.shape
    return x.dtype != torch.float32 and num_trees == 1 and num_experts <= MAX_FUSED_EXPERTS and dim % 16 == 0


@on_device
def tree_gate_fused_fwd(
    x: Tensor,
    split_weight: Tensor,
    leaf_weight: Tensor,
    split_bias: Tensor | None,
    leaf_bias: Tensor | None,
    gamma: float,
    mode: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, (num_tokens, dim), num_experts = x.contiguous(), x.shape, leaf_weight.shape[1]
    gates = x.new_empty((num_tokens, num_experts))
    leaf_probs = gates.new_empty((num_tokens, 1, num_experts))
    split_logits, leaf_logits = x.new_empty((num_tokens, 1, num_experts - 1)), x.new_empty(leaf_probs.shape)
    if num_tokens == 0:
        return gates, leaf_probs, split_logits, leaf_logits
    biases = [x if bias is None else bias.contiguous() for bias in (split_bias, leaf_bias)]
    given = (split_bias is not None) + 2 * (leaf_bias is not None)
    blocks, warps, stages = _fused_blocks(num_experts)
    widen = triton.knobs.runtime.interpret  # the interpreter would multiply bfloat16 as integers
    launch(
        _tree_gate_fused, (triton.cdiv(num_tokens, blocks["BLOCK_T"]),),
        x, split_weight.contiguous(), leaf_weight.contiguous(), *biases, gates, leaf_probs, split_logits, leaf_logits,
        num_tokens, dim // 16, num_experts,
        BIASES=given, WIDEN=widen, **_numbers(gamma, mode), **blocks, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return gates, leaf_probs, split_logits, leaf_logits


@on_device
def tree_route_fwd(
    x: Tensor,
    split_weight: Tensor,
    leaf_weight: Tensor,
    split_bias: Tensor | None,
    leaf_bias: Tensor | None,
    gamma: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (num_tokens, dim), (num_trees, num_experts, _) = x.shape, leaf_weight.shape
    weights = x.new_empty((num_tokens, num_trees), dtype=torch.float32)
    experts, visited = (x.new_empty(weights.shape, dtype=torch.int32) for _ in range(2))
    unsaturated = x.new_empty(weights.shape, dtype=torch.bool)
    if num_trees > MAX_TREES:
        raise ValueError(f"tree_route: the Triton kernel takes at most {MAX_TREES} trees, got {num_trees}")
    if num_tokens == 0:
        return weights, experts, visited, unsaturated
    x, *factors = contiguous_rows(x), *(each.contiguous().flatten(0, 1) for each in (split_weight, leaf_weight))
    biases = [x if bias is None else bias.contiguous() for bias in (split_bias, leaf_bias)]
    unit, full = common_unit((x, *factors), dim), 1 << (num_experts - 1).bit_length()
    block = WARP * 16 // x.element_size()  # 16 bytes a thread
    held = min(max(triton.cdiv(dim, block), 1), MAX_HELD // block)
    launch(
        _tree_route_fwd, (num_tokens,),
        x, *factors, *biases, weights, experts, visited, unsaturated.view(torch.uint8),
        x.stride(0) // unit, dim // unit, num_trees, num_experts, full, 2 * num_experts - full, gamma / 2, 1 / gamma,
        UNIT=unit, BIASES=(split_bias is not None) + 2 * (leaf_bias is not None), HELD=held, LONG=dim > held * block,
        BLOCK_P=block, EVEN=dim > 0 and dim % block == 0, BLOCK_K=max(triton.next_power_of_2(num_trees), WARP),
        num_warps=1,
    )  # fmt: skip
    return weights, experts, visited, unsaturated
