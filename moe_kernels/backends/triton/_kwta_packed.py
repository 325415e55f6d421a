"""k-winner-take-all of 16-bit rows, two elements in each 32-bit word.

Each round of the search counts the elements that reach a trial threshold. One instruction compares both halves of a
word as float16. Bit patterns of bfloat16 compare correctly too up to magnitude 2^121; greater ones are NaN in float16.
If a row has such a pattern, a float16 sum of the row is NaN (_needs_order). The program's rows then become integers
(_ordered).

The middle of a row consists of the 16-byte vectors (eight elements) that lie wholly in the row. A row that starts or
ends inside a vector has edges too: up to seven elements before the middle (head) and after it (tail).

pairs (C, R, L, 4): the words of the middle, for C chunks, R rows and L lanes for each row; a lane has eight
neighbouring elements of each chunk. edge (S, R, L): S * L words for each row; word i has element i of the head in its
low half and element i of the tail in its high half. Keys are integers in the order of the elements; NaN has key INF + 1
(_kwta_values.py, which also defines INF and FORMAT).
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.backends.triton._kwta_values import key_near, value_of

SIGNS = tl.constexpr(-0x7FFF8000)  # 0x80008000
ONES = tl.constexpr(0x00010001)
REST = tl.constexpr(0x7FFF7FFF)  # all bits but the signs


@triton.jit
def _fill_halves(flags):
    """0xFFFF in each half whose lowest bit is set in `flags`, else 0. No other bits of `flags` may be set."""
    return flags * 0xFFFF


@triton.jit
def _ordered(pairs, INF: tl.constexpr):
    """0x8000 + key of each half of `pairs`, an unsigned number of at least 1."""
    magnitude = pairs & REST
    nan = _fill_halves(((magnitude + ONES * (0x7FFF - INF)) >> 15) & ONES)
    magnitude = (magnitude & ~nan) | (nan & (ONES * (INF + 1)))
    negative = _fill_halves((pairs >> 15) & ONES) & ~nan
    return ((SIGNS + magnitude) & ~negative) | ((SIGNS - magnitude) & negative)


@triton.jit
def _at_least(pairs, least, ordered):
    """0xFFFF in each half of `pairs` >= the same half of `least`, else 0. If ordered, both halves of `least` must be
    the same number, not 0."""
    if ordered:
        # x >= least if the mean of x and 2^16 - least is at least 2^15.
        other = 0x10000 - least
        result = _fill_halves((((pairs & other) + (((pairs ^ other) >> 1) & REST)) >> 15) & ONES)
    else:
        result = tl.inline_asm_elementwise(
            "set.ge.u32.f16x2 $0, $1, $2;", "=r,r,r", [pairs, least], dtype=tl.int32, is_pure=True, pack=1
        )
    return result


@triton.jit
def _equal(pairs, tied, above, ordered):
    """0xFFFF in each half of `pairs` equal to `tied`, else 0. tied, above: (1, R, 1), the patterns of a key and of
    the next key."""
    if ordered:
        equal = _at_least(pairs, tied[:, :, :, None], True) & ~_at_least(pairs, above[:, :, :, None], True)
    else:
        equal = tl.inline_asm_elementwise(
            "set.eq.u32.f16x2 $0, $1, $2;", "=r,r,r", [pairs, tied[:, :, :, None]], dtype=tl.int32, is_pure=True, pack=1
        )
    return equal


@triton.jit
def _add_halves(a, b):
    return tl.inline_asm_elementwise("add.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _sums(x, edge):
    """(R): the sums over each row of x (C, R, L, 4) and edge (S, R, L)."""
    return tl.sum(tl.sum(tl.sum(x, 0), 2) + tl.sum(edge, 0), 1)


@triton.jit
def _needs_order(pairs, edge):
    """Whether the float16 sum of the low or of the high halves of some row is NaN."""
    sums = _add_halves(tl.reduce(tl.reduce(pairs, 0, _add_halves), 2, _add_halves), tl.reduce(edge, 0, _add_halves))
    sums = tl.reduce(sums, 1, _add_halves)
    return _any(_at_least(sums, sums, False) != -1)


@triton.jit
def _load_edge(row_ptr, slot, head, tail_at, tail):
    """Words with element `slot` of the head (low half) and of the tail (high half); 0 beyond the edge."""
    low = tl.load(row_ptr + slot, mask=slot < head, other=0).to(tl.int32)
    high = tl.load(row_ptr + tail_at + slot, mask=slot < tail, other=0).to(tl.int32)
    return (low & 0xFFFF) | (high << 16)


@triton.jit
def _store_edge(row_ptr, edge, slot, head, tail_at, tail):
    element: tl.constexpr = row_ptr.dtype.element_ty
    tl.store(row_ptr + slot, edge.to(element), mask=slot < head)
    tl.store(row_ptr + tail_at + slot, (edge >> 16).to(element), mask=slot < tail)


@triton.jit
def _any(x):
    return tl.max(x.to(tl.int32), 0) != 0


@triton.jit
def _first_guess(pairs, N, quantile, INF: tl.constexpr, FORMAT: tl.constexpr):
    """(threshold, step), (R) each, for N normal elements with the mean and deviation of `pairs`, a sample of the row:
    the threshold that about K elements exceed, and the increase of the threshold that makes one element fewer win."""
    if FORMAT == 1:
        low = (pairs << 16).to(tl.float32, bitcast=True)
        high = pairs.to(tl.float32, bitcast=True)  # the low half only changes the last digits
    else:
        low = pairs.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    count = tl.minimum(N, pairs.shape[0] * pairs.shape[2] * 8)
    mean = tl.sum(tl.sum(tl.sum(low + high, 0), 2), 1) / count
    squares = tl.sum(tl.sum(tl.sum(tl.fma(low, low, high * high), 0), 2), 1) / count
    deviation = tl.sqrt(tl.maximum(squares - mean * mean, 0.0))
    step = deviation * 2.5066283 * tl.exp(0.5 * quantile * quantile) / N
    return mean + quantile * deviation, step


@triton.jit
def _pattern(key, ordered):
    """(R): words with the same half twice: 0x8000 + key if ordered, else the bits of an element with that key."""
    return tl.where(ordered | (key < 0), 0x8000 + tl.where(ordered, key, -key), key) * ONES


@triton.jit
def _threshold(
    pairs, edge, guess, step, ordered, N, K, INF: tl.constexpr, FORMAT: tl.constexpr, TRIALS: tl.constexpr
):  # fmt: skip
    """(least, ties, tied), (R) each. Exactly K elements have key >= least or are among the first `ties` with key
    least - 1. If ties > 0, `tied` is the number of elements with key least - 1."""
    R: tl.constexpr = pairs.shape[1]
    # At least K keys are >= low, at most K are >= high. Unless `ordered`, all keys are from -0x7C00 to 0x7C00, the keys
    # of float16's infinities, and no element reaches a greater trial, which is NaN as float16.
    lowest = -INF
    if not ordered:
        lowest = -0x7C00
    low = tl.full((R,), 0, tl.int32) + tl.where(K == 0, INF + 1, tl.where(K >= N, lowest - 1, lowest))
    high = tl.full((R,), 0, tl.int32) + tl.where(K >= N, lowest, INF + 2)
    at_low = tl.full((R,), 0, tl.int32) + N
    at_high = tl.full((R,), 0, tl.int32) + tl.where(K >= N, N, 0)
    bottom = tl.full((R,), float("-inf"), tl.float32)
    top = tl.full((R,), float("inf"), tl.float32)
    round = 0
    while _any(high - low > 1):
        near = key_near(guess, INF, FORMAT)
        if round >= TRIALS:
            near = (low + high) >> 1
        trial = tl.minimum(tl.maximum(near, low + 1), high - 1)
        least = _pattern(trial, ordered)
        # In the sum, a high half that reaches the trial counts -65536, a low half 65535. If h high and l low halves
        # reach it, packed is 65536 (h - l) + l.
        reached = _at_least(pairs, least[None, :, None, None], ordered)
        packed = -_sums(reached, _at_least(edge, least[None, :, None], ordered))
        count = (packed >> 16) + 2 * (packed & 0xFFFF)
        # A row that has finished keeps high = low + 1.
        too_many = count > K
        value = value_of(trial, INF, FORMAT)
        low = tl.where(too_many, trial, tl.where(count == K, trial - 1, low))
        at_low = tl.where(too_many, count, at_low)
        bottom = tl.where(too_many, value, bottom)
        high = tl.where(too_many, high, trial)
        at_high = tl.where(too_many, at_high, count)
        top = tl.where(too_many, top, value)
        slope = (top - bottom) / (at_low - at_high).to(tl.float32)
        guess = value + (count - K).to(tl.float32) * tl.where(slope < float("inf"), slope, step)
        round += 1
    return high, K - at_high, at_low - at_high


@triton.jit
def _settle_edge_ties(edge, wins, least, ties, tied, ordered):
    """(wins, ties): 0xFFFF in the halves of the edges that win; `ties` minus the number of ties in the head. Ties of
    the head win first, ties of the tail last."""
    equal = _at_least(edge, _pattern(least - 1, ordered)[None, :, None], ordered) & ~wins
    flags = equal & ONES
    of_slots = tl.sum(flags, axis=2)
    in_slots = tl.sum(of_slots, axis=0)
    if _any(in_slots != 0):
        through = tl.cumsum(flags, axis=2) + (tl.cumsum(of_slots, axis=0) - of_slots)[:, :, None]
        first = (through & 0xFFFF) <= ties[None, :, None]
        last = (through >> 16) <= (ties - tied + (in_slots >> 16))[None, :, None]
        wins = wins | (equal & (tl.where(first, 0xFFFF, 0) | tl.where(last, -0x10000, 0)))
    return wins, ties - (in_slots & 0xFFFF)


@triton.jit
def _settle_ties(pairs, least, ties, ordered):
    """(least, partly, split): the winners of the middle if only the first `ties` ties win.

    least (C, R, L): elements win from this pattern on. split (C, R): True for the chunk, at most one of a row, in which
    some ties win and others do not. partly (R, L): bit 4 i is set if element i of the lane's eight in that chunk is a
    tie that wins while another tie of the eight does not.
    """
    above = _pattern(least, ordered)[None, :, None]
    tied = _pattern(least - 1, ordered)[None, :, None]
    equal = _equal(pairs, tied, above, ordered)
    packed = -tl.sum(equal, axis=3)
    in_lane = (packed >> 16) + 2 * (packed & 0xFFFF)
    # All ties of the first chunks win, some ties of at most one chunk, and no ties of later chunks.
    of_chunk = tl.sum(in_lane, axis=2)
    through = tl.cumsum(of_chunk, axis=0)
    whole = through <= ties[None, :]
    split = (through - of_chunk < ties[None, :]) & ~whole
    # The same for the lanes of that chunk.
    left = ties - tl.sum(tl.where(split, through - of_chunk, 0), axis=0)
    of_lane = tl.sum(tl.where(split[:, :, None], in_lane, 0), axis=0)
    through_lane = tl.cumsum(of_lane, axis=1)
    lane_whole = through_lane <= left[:, None]
    lane_ties = left[:, None] - (through_lane - of_lane)
    # The same for the eight elements of one lane: at most 7 are ties that win. Each element has four bits of a word,
    # which hold 8 + lane_ties - (number of ties up to the element). Only the first lane_ties ties have bit 3 set.
    pair = tl.arange(0, 4)[None, None, :]
    equal = tl.sum(tl.where(split[:, :, None, None], equal, 0), axis=0)
    flags = tl.sum(((equal & 0x1) | ((equal >> 12) & 0x10)) << (8 * pair), axis=2)
    first = (-0x77777778 + lane_ties * 0x11111111 - flags * 0x11111111) >> 3
    partly = tl.where(lane_whole | (lane_ties <= 0), 0, first & flags)
    least = tl.where(whole[:, :, None] | (split[:, :, None] & lane_whole[None, :, :]), tied, above)
    return least, partly, split


@triton.jit
def _shift_bits(bits_ptr, row, edge_flags, head, whole, N, WORDS: tl.constexpr):
    """Shifts the stored flags (1: wins) of a row's middle by `head` bits, and inserts the flags of the edges.

    row, edge_flags, head, whole: (R). edge_flags: the head's flags in bits 0 to 7, the tail's in bits 8 to 15. whole:
    number of bytes of the middle's flags.
    """
    n_words = (N + 31) // 32
    tl.store(bits_ptr + row * n_words * 4 + whole, (edge_flags >> 8).to(tl.int8), mask=whole < n_words * 4)
    tl.debug_barrier()  # lanes read flags that other lanes have stored
    word = tl.arange(0, WORDS)[None, :]
    ptrs = bits_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + (row * n_words)[:, None] + word
    later = tl.load(ptrs, mask=word < n_words, other=0)
    earlier = tl.load(ptrs - 1, mask=(word > 0) & (word < n_words), other=0).to(tl.uint32)
    shifted = (later << head[:, None]) | ((earlier >> 1) >> (31 - head)[:, None]).to(tl.int32)
    tl.debug_barrier()  # all words have been read before one is replaced
    tl.store(ptrs, shifted | tl.where(word == 0, edge_flags[:, None] & 0xFF, 0), mask=word < n_words)


@triton.jit(do_not_specialize=["rows", "units_x_R", "units_values_R", "units", "K"])
def kwta_fwd_packed(
    x_ptr,  # (R, N); each row has the same address modulo 16 bytes as the row of y
    values_ptr,  # (R, N), aligned like x
    y_ptr,  # (R, N) contiguous
    bits_ptr,  # (R, 4 ceil(N / 32)) int8, one bit for each element: 1 if it wins
    mask_ptr,  # (R, N) contiguous int8: 1 if the element wins
    rows,
    units_x_R,  # row strides and N in units of UNIT elements, so that the compiler knows a divisor
    units_values_R,
    units,
    K,
    quantile,  # the number that about K of N standard normal values exceed
    UNIT: tl.constexpr,  # 8, or 1 if rows may have edges
    TIES: tl.constexpr,  # which elements win if too many equal the k-th largest: 0 the first, 1 none, 2 all
    STORE_Y: tl.constexpr,
    STORE_BITS: tl.constexpr,
    STORE_MASK: tl.constexpr,
    OTHERS: tl.constexpr,  # `values` is another tensor than x
    INF: tl.constexpr,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
    TRIALS: tl.constexpr,  # rounds of interpolation before bisection
    ORDERED: tl.constexpr,  # rows always become integers: the interpreter has no inline assembly
):
    EDGES: tl.constexpr = UNIT == 1
    PAIR: tl.constexpr = tl.pointer_type(tl.int32)
    N = units * UNIT
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), rows - 1).to(tl.int64)[None, :, None]
    chunk = tl.arange(0, CHUNKS)[:, None, None]
    lane = tl.arange(0, LANES)[None, None, :]
    pair = tl.arange(0, 4)[None, None, None, :]
    group = chunk * LANES + lane  # index of a group of eight elements in the middle
    word = group[:, :, :, None] * 4 + pair
    x_row, y_row, values_row = row * units_x_R * UNIT, row * N, row * units_values_R * UNIT
    # Lengths: of head and tail in elements, of the middle (`whole`) in groups of eight elements.
    head = (8 - (row & 7).to(tl.int32) * (N & 7)) & 7 if EDGES else tl.zeros((1, ROWS, 1), tl.int32)
    head = tl.minimum(head, N)
    whole = (N - head) >> 3
    tail_at = head + whole * 8
    tail = N - tail_at
    inside = word < (whole * 4)[:, :, :, None]
    x_words = x_ptr.to(PAIR, bitcast=True) + (((x_row + 7) >> 3) * 4)[:, :, :, None]
    SAMPLE: tl.constexpr = CHUNKS // 4 if CHUNKS > 4 else 1
    sampled = (tl.arange(0, SAMPLE)[:, None, None] * (CHUNKS // SAMPLE) * LANES + lane)[:, :, :, None] * 4 + pair
    sample = tl.load(x_words + sampled, mask=sampled < (whole * 4)[:, :, :, None], other=0)
    guess, step = _first_guess(sample, N, quantile, INF, FORMAT)
    pairs = tl.load(x_words + word, mask=inside, other=0)
    SLOTS: tl.constexpr = 8 // LANES if LANES < 8 else 1
    slot = tl.arange(0, SLOTS)[:, None, None] * LANES + lane
    edge = tl.zeros((SLOTS, ROWS, LANES), tl.int32)
    if EDGES:
        edge = _load_edge(x_ptr + x_row, slot, head, tail_at, tail)
    ordered = True
    if not ORDERED:
        ordered = _needs_order(pairs, edge)
    if ordered:
        pairs = _ordered(pairs, INF)
        edge = _ordered(edge, INF)
    outside = tl.where(ordered, 0, -1)  # a word that reaches no threshold: 0 as integers, NaN as float16
    if EDGES or N < LANES * CHUNKS * 8:
        pairs = tl.where(inside, pairs, outside)
    kept = tl.where(slot < head, 0xFFFF, 0) | tl.where(slot < tail, -0x10000, 0)
    edge = (edge & kept) | (outside & ~kept)
    least, ties, tied = _threshold(pairs, edge, guess, step, ordered, N, K, INF, FORMAT, TRIALS)
    if TIES == 2:
        least -= (ties > 0).to(tl.int32)
    pattern = _pattern(least, ordered)[None, :, None] + tl.zeros((CHUNKS, 1, LANES), tl.int32)
    edge_wins = _at_least(edge, _pattern(least, ordered)[None, :, None], ordered)
    partly = tl.zeros((ROWS, LANES), tl.int32)
    split = tl.zeros((CHUNKS, ROWS), tl.int32) > 0
    if TIES == 0:
        if _any(ties > 0):
            if EDGES:
                edge_wins, ties = _settle_edge_ties(edge, edge_wins, least, ties, tied, ordered)
            pattern, partly, split = _settle_ties(pairs, least, ties, ordered)
    wins = _at_least(pairs, pattern[:, :, :, None], ordered)
    if TIES == 0:
        if _any(tl.max(partly != 0, 1)):
            two = (tl.where(split[:, :, None], partly[None, :, :], 0)[:, :, :, None] >> (8 * pair)) & 0x11
            wins = wins | _fill_halves((two | (two << 12)) & ONES)
    offsets = (((y_row + 7) >> 3) * 4)[:, :, :, None] + word
    if STORE_Y:
        values = pairs
        edge_values = edge
        if OTHERS or ordered:
            values_words = values_ptr.to(PAIR, bitcast=True) + (((values_row + 7) >> 3) * 4)[:, :, :, None]
            values = tl.load(values_words + word, mask=inside, other=0)
            if EDGES:
                edge_values = _load_edge(values_ptr + values_row, slot, head, tail_at, tail)
        tl.store(y_ptr.to(PAIR, bitcast=True) + offsets, values & wins, mask=inside)
        if EDGES:
            _store_edge(y_ptr + y_row, edge_values & edge_wins, slot, head, tail_at, tail)
    if STORE_MASK:
        flags = wins & ONES
        tl.store(
            mask_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + offsets,
            (flags | (flags >> 8)).to(tl.int16),
            mask=inside,
        )
        if EDGES:
            _store_edge(mask_ptr + y_row, edge_wins & ONES, slot, head, tail_at, tail)
    if STORE_BITS:
        flags = tl.sum(wins & (0x00020001 << (2 * pair)), axis=3)
        n_groups = (N + 31) // 32 * 4
        stored = group < n_groups
        if EDGES:
            stored = stored & (group != whole)  # _shift_bits writes the byte of the tail
        tl.store(bits_ptr + row * n_groups + group, (flags | (flags >> 16)).to(tl.int8), mask=stored)
        if EDGES:
            flags = ((edge_wins & 0x1) << (slot & 7)) | (((edge_wins >> 16) & 0x1) << (8 + (slot & 7)))
            edge_flags = tl.sum(tl.sum(flags, 0), 1)
            of_row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), rows - 1).to(tl.int64)
            _shift_bits(
                bits_ptr,
                of_row,
                edge_flags,
                tl.reshape(head, (ROWS,)),
                tl.reshape(whole, (ROWS,)),
                N,
                LANES * CHUNKS // 4,
            )
