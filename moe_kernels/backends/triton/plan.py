"""The routing plan in Triton.

Choices claim capacity in the visiting order: token by token, or all first choices first; tokens by priority or by
index. make_plan_fwd splits the T * K choices, so ordered, into chunks. A request is a choice that names an expert. Its
slot is the number of earlier requests to the same expert: those in earlier chunks plus those in its own chunk. If the
slot is below the capacity, its row is the slot plus the rows of the experts before; else the request is dropped.
_plan_count counts the requests to each expert in each chunk, _plan_scan sums the counts of earlier chunks, and
_plan_rank computes slots and rows.

plan_priority_fwd sorts the T * E pairs of a token and an expert by score. One program then assigns them in this order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.backends.triton import FORMATS, launch, on_device, unsupported
from moe_kernels.backends.triton.kwta import kwta_mask
from moe_kernels.sizes import plan_rows

TILE = 32  # choices that a program (one warp) of _plan_rank compares with each other at a time
SHORTEST = 2048  # plan_expert_choice_fwd pads T to at least this: k-winner-take-all then compiles for fewer lengths
MATCH_TILE = 64  # pairs that _match_tile compares with each other at a time
CHUNKS = 1024  # largest number of chunks: a program of _plan_scan holds the counts of all chunks for its experts
COUNTS = 2**22  # bound on chunks * E, if there is more than one chunk
COUNT_BLOCK = 256  # choices that a program of _plan_count reads at a time
WINDOW = 1024  # largest number of experts for which a program of _plan_count counts requests
MATCH_BLOCK = 1024  # pairs that _plan_match skips at once if none of them can be assigned
FEW_CHUNKS = tl.constexpr(32)  # with at most this many chunks, a program of _plan_scan takes 128 experts, else 4
SCAN_TILE = tl.constexpr(4096)  # counts that a program of _plan_scan holds


@triton.jit
def _requests(
    experts_ptr,  # (T, K)
    visit_ptr,  # (T) tokens in visiting order; only read if VISIT, else tokens are visited in index order
    place,  # (BLOCK) int64 positions in the visiting order of choices
    end,
    T,
    K,
    E,
    VISIT: tl.constexpr,
    BY_CHOICE: tl.constexpr,  # all first choices come first, then all second ones; else token by token
):
    """(token, choice, expert) of the choices at these places; expert -1 if a choice names none or is beyond `end`."""
    inside = place < end
    index = tl.where(inside, place, 0).to(tl.int32)
    if BY_CHOICE:
        choice = index // T
        position = index - choice * T
    else:
        position = index // K
        choice = index - position * K
    token = position.to(tl.int64)
    if VISIT:
        token = tl.load(visit_ptr + token, mask=inside, other=0)
    expert = tl.load(experts_ptr + token * K + choice, mask=inside, other=-1)
    return token, choice, tl.where((expert >= 0) & (expert < E), expert, -1).to(tl.int32)


@triton.jit(do_not_specialize=["chunk", "T", "E"])
def _plan_count(
    experts_ptr,  # (T, K)
    visit_ptr,  # (T)
    counts_ptr,  # (chunks, E)
    scanned_ptr,  # () receives 0; _plan_scan counts its finished programs there
    chunk,
    T,
    K,
    E,
    VISIT: tl.constexpr,
    BY_CHOICE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * chunk
    end = tl.minimum(start + chunk, tl.full((), 1, tl.int64) * T * K)
    window = tl.program_id(1) * BLOCK_E
    counts = tl.zeros((BLOCK_E,), tl.int32)
    while start < end:
        place = start + tl.arange(0, BLOCK)
        _, _, expert = _requests(experts_ptr, visit_ptr, place, end, T, K, E, VISIT, BY_CHOICE)
        bin = expert - window
        valid = (expert >= 0) & (bin >= 0) & (bin < BLOCK_E)
        counts += tl.histogram(tl.where(valid, bin, 0), BLOCK_E, mask=valid)
        start += BLOCK
    e = window + tl.arange(0, BLOCK_E)
    tl.store(counts_ptr + tl.program_id(0).to(tl.int64) * E + e, counts, mask=e < E)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scanned_ptr, 0)


@triton.jit(do_not_specialize=["capacity", "chunks"])
def _plan_scan(
    counts_ptr,  # (chunks, E), receives the sums over earlier chunks
    scanned_ptr,  # () 0 at the start; counts the programs that have finished
    requested_ptr,  # (E)
    kept_ptr,  # (E)
    expert_offsets_ptr,  # (E + 1)
    dropped_ptr,  # ()
    capacity,
    chunks,
    E,
    limit_ptr,  # (E), or None: the capacity alone
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Both tile shapes are in one kernel, so that it need not be compiled again when the number of chunks changes.
    if chunks <= FEW_CHUNKS:
        _scan_chunks(counts_ptr, requested_ptr, chunks, E, FEW_CHUNKS, SCAN_TILE // FEW_CHUNKS)
    else:
        _scan_chunks(counts_ptr, requested_ptr, chunks, E, CHUNKS, SCAN_TILE // CHUNKS)
    # The last program to finish sees what all others stored: each program has a barrier after its stores, and then an
    # atomic addition with acquire and release semantics.
    tl.debug_barrier()
    if tl.atomic_add(scanned_ptr, 1) == tl.num_programs(0) - 1:
        tl.debug_barrier()
        _finish(requested_ptr, kept_ptr, expert_offsets_ptr, dropped_ptr, capacity, limit_ptr, E, BLOCK)


@triton.jit
def _scan_chunks(
    counts_ptr,
    requested_ptr,
    chunks,
    E,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    c = tl.arange(0, BLOCK_C)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    ptrs = counts_ptr + c[:, None].to(tl.int64) * E + e
    inside = (c < chunks)[:, None] & (e < E)
    counts = tl.load(ptrs, mask=inside, other=0)
    tl.store(ptrs, tl.cumsum(counts, axis=0) - counts, mask=inside)
    tl.store(requested_ptr + e, tl.sum(counts, axis=0), mask=e < E)


@triton.jit
def _finish(
    requested_ptr,
    kept_ptr,
    expert_offsets_ptr,
    dropped_ptr,
    capacity,
    limit_ptr,
    E,
    BLOCK: tl.constexpr,
):
    used = tl.zeros((), tl.int32)
    total = tl.zeros((), tl.int32)
    start = 0
    while start < E:
        e = start + tl.arange(0, BLOCK)
        requested = tl.load(requested_ptr + e, mask=e < E, other=0, cache_modifier=".cg")  # L1 may hold old values
        kept = tl.minimum(requested, capacity)
        if limit_ptr is not None:
            kept = tl.minimum(kept, tl.maximum(tl.load(limit_ptr + e, mask=e < E, other=0), 0))
        tl.store(kept_ptr + e, kept, mask=e < E)
        tl.store(expert_offsets_ptr + e, used + tl.cumsum(kept, axis=0) - kept, mask=e < E)
        used += tl.sum(kept)
        total += tl.sum(requested)
        start += BLOCK
    tl.store(expert_offsets_ptr + E, used)
    tl.store(dropped_ptr, total - used)


@triton.jit(do_not_specialize=["capacity", "R", "chunk", "T", "E"])
def _plan_rank(
    experts_ptr,  # (T, K)
    visit_ptr,  # (T)
    counts_ptr,  # (chunks, E) requests to each expert in earlier chunks; overwritten
    expert_offsets_ptr,  # (E + 1)
    row_token_ptr,  # (R)
    row_choice_ptr,  # (R)
    slot_row_ptr,  # (T, K)
    capacity,
    R,
    chunk,
    T,
    K,
    E,
    kept_ptr,  # (E) rows of each expert, or None: the capacity alone decides
    VISIT: tl.constexpr,
    BY_CHOICE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    no_token = tl.full((BLOCK,), -1, tl.int32)
    unused = tl.load(expert_offsets_ptr + E) + tl.program_id(0).to(tl.int64) * BLOCK
    while unused < R:
        tl.store(row_token_ptr + unused + i, no_token, mask=unused + i < R)
        tl.store(row_choice_ptr + unused + i, no_token, mask=unused + i < R)
        unused += tl.num_programs(0).to(tl.int64) * BLOCK

    next_ptr = counts_ptr + tl.program_id(0).to(tl.int64) * E
    start = tl.program_id(0).to(tl.int64) * chunk
    end = tl.minimum(start + chunk, tl.full((), 1, tl.int64) * T * K)
    while start < end:
        place = start + i
        token, choice, expert = _requests(experts_ptr, visit_ptr, place, end, T, K, E, VISIT, BY_CHOICE)
        valid = expert >= 0
        # peers: how many earlier (low 16 bits) and later (high 16 bits) requests of this block are to the same expert.
        side = tl.where(i[:, None] < i[None, :], 1, tl.where(i[:, None] > i[None, :], 0x10000, 0))
        peers = tl.sum(tl.where(expert[:, None] == expert[None, :], side, 0), axis=0)
        later = peers >> 16
        slot = tl.load(next_ptr + expert, mask=valid, other=0) + (peers & 0xFFFF)
        # Counts change only between the two barriers, when no thread reads them.
        tl.debug_barrier()
        tl.store(next_ptr + expert, slot + 1, mask=valid & (later == 0))
        tl.debug_barrier()
        if kept_ptr is not None:
            keep = valid & (slot < tl.load(kept_ptr + expert, mask=valid, other=0))
        else:
            keep = valid & (slot < capacity)
        row = tl.load(expert_offsets_ptr + expert, mask=valid, other=0) + slot
        tl.store(slot_row_ptr + token * K + choice, tl.where(keep, row, -1), mask=place < end)
        tl.store(row_token_ptr + row, token.to(tl.int32), mask=keep)
        tl.store(row_choice_ptr + row, choice, mask=keep)
        start += BLOCK


@triton.jit
def _assignable(
    pairs_ptr,  # (T * E)
    experts_ptr,  # (T)
    room_ptr,  # (E)
    place,  # (BLOCK) int64 positions in descending order of score
    pairs,
    E,
):
    """(token, expert, assignable) of the pairs at these places; assignable: the token is free, the expert has room."""
    inside = place < pairs
    pair = tl.load(pairs_ptr + place, mask=inside, other=0).to(tl.int32)  # T * E is below 2^31
    token = pair // E
    expert = pair - token * E
    free = tl.load(experts_ptr + token, mask=inside, other=0) < 0
    return token, expert, free & (tl.load(room_ptr + expert, mask=inside, other=0) > 0)


@triton.jit
def _match_tile(pairs_ptr, experts_ptr, room_ptr, place, pairs, E, TILE: tl.constexpr):
    """Assigns the pairs of one tile, as if one by one from the highest score on; returns how many it assigned."""
    i = tl.arange(0, TILE)
    before = i[None, :] < i[:, None]
    token, expert, pending = _assignable(pairs_ptr, experts_ptr, room_ptr, place + i, pairs, E)
    assigned = tl.zeros((), tl.int32)
    num_pending = tl.sum(pending.to(tl.int32))
    while num_pending > 0:
        # rivals and ahead count the earlier pending pairs with the same token and with the same expert. A pair without
        # rivals is assigned if its expert has room for more pairs than those ahead.
        earlier = pending[None, :] & before
        rivals = tl.sum((earlier & (token[:, None] == token[None, :])).to(tl.int32), axis=1)
        ahead = tl.sum((earlier & (expert[:, None] == expert[None, :])).to(tl.int32), axis=1)
        assign = pending & (rivals == 0) & (ahead < tl.load(room_ptr + expert, mask=pending, other=0))
        # Experts and room change only between the two barriers, when no thread reads them.
        tl.debug_barrier()
        tl.store(experts_ptr + token, expert, mask=assign)
        tl.atomic_add(room_ptr + expert, tl.full((TILE,), -1, tl.int32), mask=assign)
        tl.debug_barrier()
        assigned += tl.sum(assign.to(tl.int32))
        _, _, assignable = _assignable(pairs_ptr, experts_ptr, room_ptr, place + i, pairs, E)
        pending = pending & assignable
        num_pending = tl.sum(pending.to(tl.int32))
    return assigned


@triton.jit(do_not_specialize=["limit", "pairs", "E"])
def _plan_match(
    pairs_ptr,  # (T * E) token * E + expert in descending score
    experts_ptr,  # (T) -1, receives the expert of each assigned token
    room_ptr,  # (E) the capacity, receives the remaining capacity
    limit,  # largest number of pairs that can be assigned
    pairs,
    E,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    assigned = tl.zeros((), tl.int32)
    start = tl.zeros((), tl.int64)
    while (start < pairs) & (assigned < limit):
        _, _, assignable = _assignable(pairs_ptr, experts_ptr, room_ptr, start + tl.arange(0, BLOCK), pairs, E)
        if tl.sum(assignable.to(tl.int32)) > 0:
            tile = start
            while tile < start + BLOCK:
                assigned += _match_tile(pairs_ptr, experts_ptr, room_ptr, tile, pairs, E, TILE)
                tile += TILE
        start += BLOCK


def make_plan_supports(device: str, dtype: torch.dtype) -> str | None:
    return unsupported(device, torch.float32, (torch.float32,))  # only the device matters


@on_device
def make_plan_fwd(
    experts: Tensor,
    num_experts: int,
    capacity: int | None,
    priority: Tensor | None,
    order: str,
    limit: Tensor | None = None,
) -> tuple[Tensor, ...]:
    num_tokens, k = experts.shape
    total = num_tokens * k
    num_rows = plan_rows(num_tokens, k, num_experts, capacity)
    shapes = ((num_experts + 1,), (num_rows,), (num_rows,), (num_tokens, k), (num_experts,), (num_experts,), ())
    arrays = tuple(experts.new_empty(shape, dtype=torch.int32) for shape in shapes)
    expert_offsets, row_token, row_choice, slot_row, requested, kept, dropped = arrays
    if total == 0:
        for array in (expert_offsets, requested, kept, dropped):
            array.zero_()
        return arrays
    visit = None if priority is None else torch.sort(priority, descending=True, stable=True).indices
    tiles = triton.cdiv(total, TILE)
    chunk = triton.cdiv(tiles, max(1, min(CHUNKS, COUNTS // num_experts))) * TILE
    chunks = triton.cdiv(total, chunk)
    counts = experts.new_empty((chunks, num_experts), dtype=torch.int32)
    room = total if capacity is None else min(capacity, total)
    each_limit = None if limit is None else limit.expand(num_experts).contiguous()
    requests = (experts, experts if visit is None else visit, counts)
    sizes = (chunk, num_tokens, k, num_experts)
    options = {"VISIT": visit is not None, "BY_CHOICE": order == "choice"}

    window = min(max(triton.next_power_of_2(num_experts), 32), WINDOW)
    grid = (chunks, triton.cdiv(num_experts, window))
    # `dropped` first counts the finished programs of _plan_scan; the last program stores the result there.
    launch(_plan_count, grid, *requests, dropped, *sizes, **options, BLOCK=COUNT_BLOCK, BLOCK_E=window, num_warps=4)
    block_c = FEW_CHUNKS.value if chunks <= FEW_CHUNKS.value else CHUNKS
    launch(
        _plan_scan, (triton.cdiv(num_experts, SCAN_TILE.value // block_c),),
        counts, dropped, requested, kept, expert_offsets, dropped, room, chunks, num_experts, each_limit,
        CHUNKS=CHUNKS, BLOCK=window, num_warps=8,
    )  # fmt: skip
    launch(
        _plan_rank, (chunks,),
        *requests, expert_offsets, row_token, row_choice, slot_row, room, num_rows, *sizes,
        None if limit is None else kept, **options,
        BLOCK=TILE, num_warps=1,
    )  # fmt: skip
    return arrays


def plan_expert_choice_supports(device: str, dtype: torch.dtype) -> str | None:
    return unsupported(device, dtype, tuple(FORMATS))


plan_priority_supports = plan_expert_choice_supports


@on_device
def plan_expert_choice_fwd(scores: Tensor, capacity: int, limit: Tensor | None = None) -> tuple[Tensor, ...]:
    """The plan in which every expert takes the min(capacity, limit, T) tokens of highest score in its column (T, E)."""
    num_tokens, num_experts = scores.shape
    expert = torch.arange(num_experts, dtype=torch.int32, device=scores.device)
    if limit is not None:  # kWTA has one k for all columns
        best = torch.sort(scores, dim=0, descending=True, stable=True).indices
        place = torch.arange(num_tokens, dtype=torch.int32, device=scores.device)[:, None]
        among_best = (place < limit.clamp(max=capacity)).expand_as(best)
        chosen = torch.zeros_like(among_best).scatter_(0, best, among_best)
        return make_plan_fwd(torch.where(chosen, expert, -1), num_experts, capacity, None, "choice")
    # Of equal scores kWTA takes the first, so it takes none of the padding, which is -inf and comes last.
    columns = scores.new_empty((num_experts, max(triton.cdiv(num_tokens, 16) * 16, SHORTEST)))
    columns[:, :num_tokens], columns[:, num_tokens:] = scores.t(), -float("inf")
    chosen = kwta_mask(columns, min(capacity, num_tokens), "index")[:, :num_tokens].t()
    return make_plan_fwd(torch.where(chosen, expert, -1).contiguous(), num_experts, capacity, None, "choice")


@on_device
def plan_priority_fwd(scores: Tensor, capacity: int, limit: Tensor | None = None) -> tuple[Tensor, ...]:
    num_tokens, num_experts = scores.shape
    capacity = min(capacity, num_tokens)
    pairs = torch.sort(scores.flatten(), descending=True, stable=True).indices
    experts = scores.new_full((num_tokens, 1), -1, dtype=torch.int32)
    room = scores.new_full((num_experts,), capacity, dtype=torch.int32)
    if limit is not None:
        room = torch.minimum(room, limit.clamp(min=0))
    most = min(num_tokens, num_experts * capacity)  # pairs that can be assigned
    if most:
        sizes = (most, pairs.numel(), num_experts)
        launch(_plan_match, (1,), pairs, experts, room, *sizes, BLOCK=MATCH_BLOCK, TILE=MATCH_TILE, num_warps=4)
    first = scores.argmax(dim=1) if num_tokens else pairs
    requested = torch.zeros_like(room).scatter_add_(0, first, torch.ones_like(first, dtype=torch.int32))
    offsets, row_token, row_choice, slot_row, _, kept, _ = make_plan_fwd(experts, num_experts, capacity, None, "token")
    return offsets, row_token, row_choice, slot_row, requested, kept, num_tokens - offsets[-1], experts
