"""k-winner-take-all of 16-bit rows, two elements in each 32-bit word.

One instruction compares both halves of a word as float16 numbers. bfloat16 compares so too, bit pattern by bit pattern,
up to 2^121. Rows with greater elements or NaN become ordered integers first, and take five instructions a comparison.
Short rows share a warp: a lane holds up to 64 elements, so that what a round of the search costs beside them is paid by
few lanes.

A row's middle is its whole 16-byte vectors of memory, eight elements each. Rows that start or end inside a vector have
edges too: up to seven elements before the middle, the head, and as many behind it, the tail. Lane i holds element i of
both, as the halves of one word.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.backends.triton._kwta_values import key_near, value_of

SIGNS = tl.constexpr(-0x7FFF8000)  # 0x80008000
ONES = tl.constexpr(0x00010001)
REST = tl.constexpr(0x7FFF7FFF)


@triton.jit
def _halves(flags):
    """0xFFFF in each half whose lowest bit is set: flags have no other bits."""
    return flags * 0xFFFF


@triton.jit
def _ordered(pairs, INF: tl.constexpr):
    """16-bit integers that order as the elements do, from 1 on: -0 equals 0, and every NaN is the next after +inf."""
    magnitude = pairs & REST
    nan = _halves(((magnitude + ONES * (0x7FFF - INF)) >> 15) & ONES)
    magnitude = (magnitude & ~nan) | (nan & (ONES * (INF + 1)))
    negative = _halves((pairs >> 15) & ONES) & ~nan
    return ((SIGNS + magnitude) & ~negative) | ((SIGNS - magnitude) & negative)


@triton.jit
def _reaching(pairs, least, ordered):
    """All bits of the halves that reach those of `least`, which are equal and, where ordered, not 0."""
    if ordered:
        # The carry of x + (2^16 - least), as the top bit of half that sum. No term is of `pairs` alone: the compiler
        # would keep such terms, two a word, in registers during the search.
        other = 0x10000 - least
        reaching = _halves((((pairs & other) + (((pairs ^ other) >> 1) & REST)) >> 15) & ONES)
    else:
        reaching = tl.inline_asm_elementwise(
            "set.ge.u32.f16x2 $0, $1, $2;", "=r,r,r", [pairs, least], dtype=tl.int32, is_pure=True, pack=1
        )
    return reaching


@triton.jit
def _equal(pairs, tied, above, ordered):
    """All bits of the halves that reach those of `tied` and not those of `above`, its neighbour: (C, R, L) both."""
    if ordered:
        equal = _reaching(pairs, tied[:, :, :, None], True) & ~_reaching(pairs, above[:, :, :, None], True)
    else:
        equal = tl.inline_asm_elementwise(
            "set.eq.u32.f16x2 $0, $1, $2;", "=r,r,r", [pairs, tied[:, :, :, None]], dtype=tl.int32, is_pure=True, pack=1
        )
    return equal


@triton.jit
def _sum_of_halves(a, b):
    return tl.inline_asm_elementwise("add.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _sums(x, edge):
    """Of each row: (C, R, L, 4) and (E, R, L) to (R)."""
    return tl.sum(tl.sum(tl.sum(x, 0), 2) + tl.sum(edge, 0), 1)


@triton.jit
def _ordering(pairs, edge):
    """Whether a row has elements that cannot be compared as float16."""
    sums = _sum_of_halves(
        tl.reduce(tl.reduce(pairs, 0, _sum_of_halves), 2, _sum_of_halves), tl.reduce(edge, 0, _sum_of_halves)
    )
    sums = tl.reduce(sums, 1, _sum_of_halves)
    return _any(_reaching(sums, sums, False) != -1)


@triton.jit
def _load_edge(row_ptr, slot, head, tail_at, tail):
    """Elements `slot` of the head and of the tail in one word; anything where there is none."""
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
    """(R): the threshold of a normal row with the mean and deviation of these elements, and by how much one element too
    many moves it."""
    if FORMAT == 1:
        low = (pairs << 16).to(tl.float32, bitcast=True)
        high = pairs.to(tl.float32, bitcast=True)  # near enough with the other element as its last digits
    else:
        low = pairs.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    seen = tl.minimum(N, pairs.shape[0] * pairs.shape[2] * 8)
    mean = tl.sum(tl.sum(tl.sum(low + high, 0), 2), 1) / seen
    squares = tl.sum(tl.sum(tl.sum(tl.fma(low, low, high * high), 0), 2), 1) / seen
    deviation = tl.sqrt(tl.maximum(squares - mean * mean, 0.0))
    step = deviation * 2.5066283 * tl.exp(0.5 * quantile * quantile) / N
    return mean + quantile * deviation, step


@triton.jit
def _pattern(key, ordered):
    """(R): what the elements of a row are compared with, in both halves of a word."""
    return tl.where(ordered | (key < 0), 0x8000 + tl.where(ordered, key, -key), key) * ONES


@triton.jit
def _threshold(
    pairs, edge, guess, step, ordered, N, K, INF: tl.constexpr, FORMAT: tl.constexpr, TRIALS: tl.constexpr
):  # fmt: skip
    """(R): (least, ties, tied): keys from `least` on win, and of the `tied` ones one below it the first `ties`."""
    R: tl.constexpr = pairs.shape[1]
    # K keys at least reach low, and no more than K reach high. As float16 no pattern is below -inf.
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
        # -1 in each half, as one number: -65536 for the high one, 65535 for the low one.
        reaching = _reaching(pairs, least[None, :, None, None], ordered)
        halves = -_sums(reaching, _reaching(edge, least[None, :, None], ordered))
        count = (halves >> 16) + 2 * (halves & 0xFFFF)
        # A row that has its bracket of two neighbours keeps one.
        many = count > K
        here = value_of(trial, INF, FORMAT)
        low = tl.where(many, trial, tl.where(count == K, trial - 1, low))
        at_low = tl.where(many, count, at_low)
        bottom = tl.where(many, here, bottom)
        high = tl.where(many, high, trial)
        at_high = tl.where(many, at_high, count)
        top = tl.where(many, top, here)
        slope = (top - bottom) / (at_low - at_high).to(tl.float32)
        guess = here + (count - K).to(tl.float32) * tl.where(slope < float("inf"), slope, step)
        round += 1
    return high, K - at_high, at_low - at_high


@triton.jit
def _settle_edge_ties(edge, wins, least, ties, tied, ordered):
    """All bits of the edges' elements that win, and how many ties win behind the head: its own come first, those of
    the tail last."""
    equal = _reaching(edge, _pattern(least - 1, ordered)[None, :, None], ordered) & ~wins
    flags = equal & ONES
    of_slots = tl.sum(flags, axis=2)
    here = tl.sum(of_slots, axis=0)
    if _any(here != 0):
        through = tl.cumsum(flags, axis=2) + (tl.cumsum(of_slots, axis=0) - of_slots)[:, :, None]
        first = (through & 0xFFFF) <= ties[None, :, None]
        last = (through >> 16) <= (ties - tied + (here >> 16))[None, :, None]
        wins = wins | (equal & (tl.where(first, 0xFFFF, 0) | tl.where(last, -0x10000, 0)))
    return wins, ties - (here & 0xFFFF)


@triton.jit
def _settle_ties(pairs, least, ties, ordered):
    """(C, R, L): from which patterns on elements win; and, of ties that lanes win in part, flags at bits 4 i of eight
    elements: (R, L), and the chunk that they are in, (C, R)."""
    above = _pattern(least, ordered)[None, :, None]
    tied = _pattern(least - 1, ordered)[None, :, None]
    equal = _equal(pairs, tied, above, ordered)
    halves = -tl.sum(equal, axis=3)
    here = (halves >> 16) + 2 * (halves & 0xFFFF)
    # The first chunks win all of their ties, one wins some, the others none.
    of_chunk = tl.sum(here, axis=2)
    through = tl.cumsum(of_chunk, axis=0)
    whole = through <= ties[None, :]
    split = (through - of_chunk < ties[None, :]) & ~whole
    # So do the lanes in that one.
    left = ties - tl.sum(tl.where(split, through - of_chunk, 0), axis=0)
    of_lane = tl.sum(tl.where(split[:, :, None], here, 0), axis=0)
    through_lane = tl.cumsum(of_lane, axis=1)
    lane_whole = through_lane <= left[:, None]
    own = left[:, None] - (through_lane - of_lane)
    # And the elements in that lane: a flag and the number of flags up to it in four bits each, of which 7 win at most.
    place = tl.arange(0, 4)[None, None, :]
    equal = tl.sum(tl.where(split[:, :, None, None], equal, 0), axis=0)
    flags = tl.sum(((equal & 0x1) | ((equal >> 12) & 0x10)) << (8 * place), axis=2)
    first = (-0x77777778 + own * 0x11111111 - flags * 0x11111111) >> 3
    partly = tl.where(lane_whole | (own <= 0), 0, first & flags)
    least = tl.where(whole[:, :, None] | (split[:, :, None] & lane_whole[None, :, :]), tied, above)
    return least, partly, split


@triton.jit
def _shift_bits(bits_ptr, row, edge_flags, head, whole, N, WORDS: tl.constexpr):
    """Moves the flags of a row's middle behind those of its head, which are bits 0 to 7 of `edge_flags`; the tail's are
    the next ones. (R): row, edge_flags, head, whole."""
    n_words = (N + 31) // 32
    tl.store(bits_ptr + row * n_words * 4 + whole, (edge_flags >> 8).to(tl.int8), mask=whole < n_words * 4)
    tl.debug_barrier()  # lanes read flags that others have stored
    word = tl.arange(0, WORDS)[None, :]
    at = bits_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + (row * n_words)[:, None] + word
    behind = tl.load(at, mask=word < n_words, other=0)
    before = tl.load(at - 1, mask=(word > 0) & (word < n_words), other=0).to(tl.uint32)
    shifted = (behind << head[:, None]) | ((before >> 1) >> (31 - head)[:, None]).to(tl.int32)
    tl.debug_barrier()  # and all of them before any is replaced
    tl.store(at, shifted | tl.where(word == 0, edge_flags[:, None] & 0xFF, 0), mask=word < n_words)


@triton.jit(do_not_specialize=["rows", "units_x_R", "units_values_R", "units", "K"])
def kwta_fwd_packed(
    x_ptr,  # (R, N) elements; every row starts as many behind a multiple of eight as those of y and mask
    values_ptr,  # (R, N) likewise
    y_ptr,  # (R, N) contiguous
    bits_ptr,  # (R, 4 ceil(N / 32)) 8 bits each
    mask_ptr,  # (R, N) contiguous, 8 bits each
    rows,
    units_x_R,  # strides and N in units, so that the compiler knows by how much they divide
    units_values_R,
    units,
    K,
    quantile,
    UNIT: tl.constexpr,  # 8 elements, or 1 where rows may have edges
    TIES: tl.constexpr,
    STORE_Y: tl.constexpr,
    STORE_BITS: tl.constexpr,
    STORE_MASK: tl.constexpr,
    OTHERS: tl.constexpr,  # values are not x
    INF: tl.constexpr,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
    TRIALS: tl.constexpr,
    ORDERED: tl.constexpr,  # rows always become integers: the interpreter knows no inline assembly
):
    EDGES: tl.constexpr = UNIT == 1
    PAIR: tl.constexpr = tl.pointer_type(tl.int32)
    N = units * UNIT
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), rows - 1).to(tl.int64)[None, :, None]
    chunk = tl.arange(0, CHUNKS)[:, None, None]
    lane = tl.arange(0, LANES)[None, None, :]
    place = tl.arange(0, 4)[None, None, None, :]
    group = chunk * LANES + lane  # of eight elements: a lane's
    word = group[:, :, :, None] * 4 + place
    x_row, y_row, values_row = row * units_x_R * UNIT, row * N, row * units_values_R * UNIT
    # Of every row: elements before and behind its middle, and groups in it.
    head = (8 - (row & 7).to(tl.int32) * (N & 7)) & 7 if EDGES else tl.zeros((1, ROWS, 1), tl.int32)
    head = tl.minimum(head, N)
    whole = (N - head) >> 3
    tail_at = head + whole * 8
    tail = N - tail_at
    inside = word < (whole * 4)[:, :, :, None]
    # From the first multiple of eight elements on, in words.
    x_words = x_ptr.to(PAIR, bitcast=True) + (((x_row + 7) >> 3) * 4)[:, :, :, None]
    SAMPLE: tl.constexpr = CHUNKS // 4 if CHUNKS > 4 else 1
    sampled = (tl.arange(0, SAMPLE)[:, None, None] * (CHUNKS // SAMPLE) * LANES + lane)[:, :, :, None] * 4 + place
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
        ordered = _ordering(pairs, edge)
    if ordered:
        pairs = _ordered(pairs, INF)
        edge = _ordered(edge, INF)
    outside = tl.where(ordered, 0, -1)  # reaches no threshold
    if EDGES or N < LANES * CHUNKS * 8:
        pairs = tl.where(inside, pairs, outside)
    kept = tl.where(slot < head, 0xFFFF, 0) | tl.where(slot < tail, -0x10000, 0)
    edge = (edge & kept) | (outside & ~kept)
    least, ties, tied = _threshold(pairs, edge, guess, step, ordered, N, K, INF, FORMAT, TRIALS)
    if TIES == 2:
        least -= (ties > 0).to(tl.int32)
    pattern = _pattern(least, ordered)[None, :, None] + tl.zeros((CHUNKS, 1, LANES), tl.int32)
    edge_wins = _reaching(edge, _pattern(least, ordered)[None, :, None], ordered)
    partly = tl.zeros((ROWS, LANES), tl.int32)
    split = tl.zeros((CHUNKS, ROWS), tl.int32) > 0
    if TIES == 0:
        if _any(ties > 0):
            if EDGES:
                edge_wins, ties = _settle_edge_ties(edge, edge_wins, least, ties, tied, ordered)
            pattern, partly, split = _settle_ties(pairs, least, ties, ordered)
    wins = _reaching(pairs, pattern[:, :, :, None], ordered)
    if TIES == 0:
        if _any(tl.max(partly != 0, 1)):
            two = (tl.where(split[:, :, None], partly[None, :, :], 0)[:, :, :, None] >> (8 * place)) & 0x11
            wins = wins | _halves((two | (two << 12)) & ONES)
    at = (((y_row + 7) >> 3) * 4)[:, :, :, None] + word
    if STORE_Y:
        values = pairs
        edge_values = edge
        if OTHERS or ordered:
            values_words = values_ptr.to(PAIR, bitcast=True) + (((values_row + 7) >> 3) * 4)[:, :, :, None]
            values = tl.load(values_words + word, mask=inside, other=0)
            if EDGES:
                edge_values = _load_edge(values_ptr + values_row, slot, head, tail_at, tail)
        tl.store(y_ptr.to(PAIR, bitcast=True) + at, values & wins, mask=inside)
        if EDGES:
            _store_edge(y_ptr + y_row, edge_values & edge_wins, slot, head, tail_at, tail)
    if STORE_MASK:
        flags = wins & ONES
        tl.store(
            mask_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + at, (flags | (flags >> 8)).to(tl.int16), mask=inside
        )
        if EDGES:
            _store_edge(mask_ptr + y_row, edge_wins & ONES, slot, head, tail_at, tail)
    if STORE_BITS:
        flags = tl.sum(wins & (0x00020001 << (2 * place)), axis=3)
        n_groups = (N + 31) // 32 * 4
        stored = group < n_groups
        if EDGES:
            stored = stored & (group != whole)  # which is the tail's
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
