"""tree_route in Triton. A program, one warp, has one token and searches its trees in turn for their likeliest leaves.

The search goes from each node to the likelier child, and pushes the other child onto a stack if that child's
probability is above 0. A node from the stack is visited only if it is at least as likely as the best leaf so far. Only
the weights of visited nodes and of the best leaf are read. Node 1 is the root, node n has the children 2 n and 2 n + 1,
nodes E to 2 E - 1 are leaves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.backends.triton._tree_steps import clamp, share, smooth

MAX_TREES = 1024  # a program keeps two values a tree in registers
MAX_HELD = 1024  # elements of the token in registers, 32 a thread
WARP = 32
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _piece(row_ptr, start, P, BLOCK_P: tl.constexpr, EVEN: tl.constexpr):
    """BLOCK_P elements from `start` on, in float32; 0 from P on. EVEN: BLOCK_P divides P."""
    p = start + tl.arange(0, BLOCK_P)
    if EVEN:
        piece = tl.load(row_ptr + p)
    else:
        piece = tl.load(row_ptr + p, mask=p < P, other=0.0)
    return piece.to(tl.float32)


@triton.jit
def _logit(
    held, x_ptr, weight_ptr, bias_ptr, row, P,
    BIAS: tl.constexpr, HELD: tl.constexpr, LONG: tl.constexpr, BLOCK_P: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """<x, weight[row]> + bias[row], rounded to the dtype of the weight. held: the first HELD pieces of x, which are all
    unless LONG."""
    weight_ptr += row * P
    sums = held[0] * _piece(weight_ptr, 0, P, BLOCK_P, EVEN)
    for piece in tl.static_range(1, HELD):
        sums = tl.fma(held[piece], _piece(weight_ptr, piece * BLOCK_P, P, BLOCK_P, EVEN), sums)
    if LONG:
        for start in range(HELD * BLOCK_P, P, BLOCK_P):
            x = _piece(x_ptr, start, P, BLOCK_P, EVEN)
            sums = tl.fma(x, _piece(weight_ptr, start, P, BLOCK_P, EVEN), sums)
    logit = tl.sum(sums)
    if BIAS:
        logit += tl.load(bias_ptr + row).to(tl.float32)
    return logit.to(weight_ptr.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["x_stride", "P_units", "E", "full", "deep"])
def _tree_route_fwd(
    x_ptr,  # (T, P), rows x_stride UNIT elements apart
    split_weight_ptr,  # (K, E - 1, P) contiguous
    leaf_weight_ptr,  # (K, E, P) contiguous
    split_bias_ptr,  # (K, E - 1) contiguous; not read unless BIASES & 1
    leaf_bias_ptr,  # (K, E) contiguous; not read unless BIASES & 2
    weights_ptr,  # (T, K) contiguous, as the other results
    experts_ptr,
    visited_ptr,
    unsaturated_ptr,
    x_stride,
    P_units,  # P / UNIT
    K,
    E,
    full,  # the first place of the last level, a power of two
    deep,  # number of leaves at the last level, the left-most ones
    half,  # gamma / 2
    slope,  # 1 / gamma
    UNIT: tl.constexpr,
    BIASES: tl.constexpr,
    HELD: tl.constexpr,
    LONG: tl.constexpr,
    BLOCK_P: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    P, experts = P_units * UNIT, E.to(tl.int64)
    place, tree = tl.arange(0, 32), tl.arange(0, BLOCK_K)
    x_ptr += token * x_stride * UNIT
    held = (_piece(x_ptr, 0, P, BLOCK_P, EVEN),)
    for piece in tl.static_range(1, HELD):  # Triton cannot unpack a tuple
        held = held + (_piece(x_ptr, piece * BLOCK_P, P, BLOCK_P, EVEN),)  # type: ignore  # noqa: RUF005
    chosen = tl.full((BLOCK_K,), -1, tl.int32)
    sums = tl.zeros((BLOCK_K,), tl.float32)
    highest = LOWEST
    for k in range(K):
        # Place i of the stack is in element i. 32 places suffice: each is the sibling of a node on the path from the
        # root to the current node, and a tree has at most 30 levels below the root.
        nodes, probs, size = tl.zeros((32,), tl.int32), tl.zeros((32,), tl.float32), 0
        node, prob, visited = 1, 1.0, 0
        expert, best = E, 0.0  # of the likeliest leaf so far, the left-most if tied
        # Largest probabilities: of visited nodes that are not saturated, and of visited nodes with a NaN logit.
        undecided, unknown = -1.0, -1.0
        while node > 0:
            if (node < E) & (prob >= best):
                row = k * (experts - 1) + (node - 1)
                t = _logit(held, x_ptr, split_weight_ptr, split_bias_ptr, row, P, BIASES & 1, HELD, LONG, BLOCK_P, EVEN)
                visited += 1
                is_nan = t != t
                unknown = tl.where(is_nan, tl.maximum(unknown, prob), unknown)
                t = clamp(tl.where(is_nan, half, t), half)  # at a node whose logit is NaN, the left child alone
                u, w = share(t, 1.0, half, slope), share(t, -1.0, half, slope)
                undecided = tl.where((u == 0.0) | (w == 0.0), undecided, tl.maximum(undecided, prob))
                left, right = prob * smooth(u), prob * smooth(w)
                side = (right > left).to(tl.int32)
                less = tl.minimum(left, right)
                pushed = place == tl.where(less > 0.0, size, -1)
                nodes = tl.where(pushed, 2 * node + 1 - side, nodes)
                probs = tl.where(pushed, less, probs)
                size += (less > 0.0).to(tl.int32)
                node = 2 * node + side
                prob = tl.maximum(left, right)
            else:
                found = tl.where(node >= full, node - full, node - E + deep)
                better = (node >= E) & ((prob > best) | ((prob == best) & (found < expert)))
                best = tl.where(better, prob, best)
                expert = tl.where(better, found, expert)
                size -= 1
                node = tl.sum(tl.where(place == size, nodes, 0))  # 0, which ends the search, if the stack is empty
                prob = tl.sum(tl.where(place == size, probs, 0.0))
        row = k * experts + expert
        a = _logit(held, x_ptr, leaf_weight_ptr, leaf_bias_ptr, row, P, BIASES & 2, HELD, LONG, BLOCK_P, EVEN)
        a = tl.where(unknown >= best, float("nan"), a)
        owner = tl.min(tl.where(chosen == expert, tree, k))  # the first tree that chose this expert
        chosen = tl.where(tree == tl.where(owner == k, k, -1), expert, chosen)
        higher = tl.maximum(highest, a)
        sums = tl.fma(sums, tl.exp(highest - higher), tl.where(tree == owner, tl.exp(a - higher), 0.0))
        highest = higher
        tl.store(visited_ptr + token * K + k, visited)
        tl.store(unsaturated_ptr + token * K + k, tl.where(undecided >= best, 1, 0).to(tl.uint8))
    weights = tl.where(chosen < 0, 0.0, tl.div_rn(sums, tl.sum(sums)))
    tl.store(weights_ptr + token * K + tree, weights, mask=tree < K)
    tl.store(experts_ptr + token * K + tree, chosen, mask=tree < K)
