"""k-winner-take-all of 16-bit rows, two elements in each 32-bit word.

One instruction compares both halves of a word as float16 numbers. bfloat16 compares so too, bit pattern by bit pattern,
up to 2^121. Rows with greater elements or NaN become ordered integers first, and take five instructions a comparison.
Short rows share a warp: a lane holds up to 32 elements, so that what a round of the search costs beside them is paid by
few lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.backends.triton._kwta_values import key_near, value_of

SIGNS = tl.constexpr(-0x7FFF8000)  # 0x80008000
ONES = tl.constexpr(0x00010001)
REST = tl.constexpr(0x7FFF7FFF)


@triton.jit
def _inside(word, N, UNIT: tl.constexpr):
    """Whether a row has these words; in a form from which the compiler sees that neighbours agree."""
    if UNIT > 1:
        inside = word < N // UNIT * (UNIT // 2)
    else:
        inside = word * 2 < N
    return inside


@triton.jit
def _load_pairs(row_ptr, word, N, UNIT: tl.constexpr):
    """Elements 2 * word and 2 * word + 1 of a row as one integer; zeros past its end."""
    if UNIT > 1:
        pairs = tl.load(row_ptr + word, mask=_inside(word, N, UNIT), other=0)
    else:
        low = tl.load(row_ptr + word * 2, mask=word * 2 < N, other=0).to(tl.int32)
        high = tl.load(row_ptr + word * 2 + 1, mask=word * 2 + 1 < N, other=0).to(tl.int32)
        pairs = (low & 0xFFFF) | (high << 16)
    return pairs


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
    """All bits of the halves that reach those of `least`."""
    if ordered:
        low = (pairs | SIGNS) - (least & REST)
        reaching = _halves((((pairs & ~least) | (~(pairs ^ least) & low)) >> 15) & ONES)
    else:
        reaching = tl.inline_asm_elementwise(
            "set.ge.u32.f16x2 $0, $1, $2;", "=r,r,r", [pairs, least], dtype=tl.int32, is_pure=True, pack=1
        )
    return reaching


@triton.jit
def _sum_of_halves(a, b):
    return tl.inline_asm_elementwise("add.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _sums(x):
    """Of each row: (C, R, L, 4) to (R)."""
    return tl.sum(tl.sum(tl.sum(x, 0), 2), 1)


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
    mean = _sums(low + high) / seen
    squares = _sums(tl.fma(low, low, high * high)) / seen
    deviation = tl.sqrt(tl.maximum(squares - mean * mean, 0.0))
    step = deviation * 2.5066283 * tl.exp(0.5 * quantile * quantile) / N
    return mean + quantile * deviation, step


@triton.jit
def _pattern(key, ordered):
    """(R): what the elements of a row are compared with, in both halves of a word."""
    return tl.where(ordered | (key < 0), 0x8000 + tl.where(ordered, key, -key), key) * ONES


@triton.jit
def _threshold(
    pairs, guess, step, ordered, N, K, INF: tl.constexpr, FORMAT: tl.constexpr, TRIALS: tl.constexpr
):  # fmt: skip
    """(R): (least, ties): keys from `least` on win, and of those one below it the first `ties` ones."""
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
        halves = -_sums(_reaching(pairs, least[None, :, None, None], ordered))
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
    return high, K - at_high


@triton.jit
def _settle_ties(pairs, least, ties, ordered):
    """(C, R, L): from which patterns on elements win; and, of ties that lanes win in part, flags at bits 4 i of eight
    elements: (R, L), and the chunk that they are in, (C, R)."""
    above = _pattern(least, ordered)[None, :, None]
    tied = _pattern(least - 1, ordered)[None, :, None]
    equal = _reaching(pairs, tied[:, :, :, None], ordered) & ~_reaching(pairs, above[:, :, :, None], ordered)
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
    place = tl.arange(0, 4)[None, None, None, :]
    flags = tl.sum(((equal & 0x1) | ((equal >> 12) & 0x10)) << (8 * place), axis=3)
    flags = tl.sum(tl.where(split[:, :, None], flags, 0), axis=0)
    first = (-0x77777778 + own * 0x11111111 - flags * 0x11111111) >> 3
    partly = tl.where(lane_whole | (own <= 0), 0, first & flags)
    least = tl.where(whole[:, :, None] | (split[:, :, None] & lane_whole[None, :, :]), tied, above)
    return least, partly, split


@triton.jit(do_not_specialize=["rows", "units_x_R", "units_values_R", "units", "K"])
def kwta_fwd_packed(
    x_ptr,  # (R, N) words of two elements, or elements if UNIT is 1
    values_ptr,  # (R, N) likewise
    y_ptr,  # (R, N) contiguous, likewise
    bits_ptr,  # (R, 4 ceil(N / 32)) 8 bits each
    mask_ptr,  # (R, N) contiguous: 8 bits each, or 16 of two elements
    rows,
    units_x_R,  # strides and N in units, so that the compiler knows by how much they divide
    units_values_R,
    units,
    K,
    quantile,
    UNIT: tl.constexpr,  # 8, 2 or 1 elements
    TIES: tl.constexpr,
    STORE_Y: tl.constexpr,
    STORE_BITS: tl.constexpr,
    STORE_MASK: tl.constexpr,
    INF: tl.constexpr,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
    TRIALS: tl.constexpr,
    ORDERED: tl.constexpr,  # rows always become integers: the interpreter knows no inline assembly
):
    WORD: tl.constexpr = 2 if UNIT > 1 else 1  # elements that a pointer counts
    N = units * UNIT
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), rows - 1).to(tl.int64)[None, :, None]
    chunk = tl.arange(0, CHUNKS)[:, None, None]
    lane = tl.arange(0, LANES)[None, None, :]
    place = tl.arange(0, 4)[None, None, None, :]
    group = chunk * LANES + lane  # of eight elements: a lane's
    word = group[:, :, :, None] * 4 + place
    x_row = (x_ptr + row * units_x_R * (UNIT // WORD))[:, :, :, None]
    SAMPLE: tl.constexpr = CHUNKS // 4 if CHUNKS > 4 else 1
    sampled = tl.arange(0, SAMPLE)[:, None, None] * (CHUNKS // SAMPLE) * LANES + lane
    sample = _load_pairs(x_row, sampled[:, :, :, None] * 4 + place, N, UNIT)
    guess, step = _first_guess(sample, N, quantile, INF, FORMAT)
    pairs = _load_pairs(x_row, word, N, UNIT)
    ordered = True
    if not ORDERED:
        sums = tl.reduce(tl.reduce(tl.reduce(pairs, 0, _sum_of_halves), 2, _sum_of_halves), 1, _sum_of_halves)
        ordered = _any(_reaching(sums, sums, False) != -1)
    if ordered:
        pairs = _ordered(pairs, INF)
    if N < LANES * CHUNKS * 8:
        outside = tl.where(ordered, 0, -1)  # reaches no threshold
        pairs = tl.where(_inside(word, N, UNIT), pairs, outside)
        if UNIT == 1:
            pairs = tl.where(word * 2 + 1 < N, pairs, (pairs & 0xFFFF) | (outside << 16))
    least, ties = _threshold(pairs, guess, step, ordered, N, K, INF, FORMAT, TRIALS)
    if TIES == 2:
        least -= (ties > 0).to(tl.int32)
    pattern = _pattern(least, ordered)[None, :, None] + tl.zeros((CHUNKS, 1, LANES), tl.int32)
    partly = tl.zeros((ROWS, LANES), tl.int32)
    split = tl.zeros((CHUNKS, ROWS), tl.int32) > 0
    if TIES == 0:
        if _any(ties > 0):
            pattern, partly, split = _settle_ties(pairs, least, ties, ordered)
    wins = _reaching(pairs, pattern[:, :, :, None], ordered)
    if TIES == 0:
        if _any(tl.max(partly != 0, 1)):
            two = (tl.where(split[:, :, None], partly[None, :, :], 0)[:, :, :, None] >> (8 * place)) & 0x11
            wins = wins | _halves((two | (two << 12)) & ONES)
    if STORE_BITS:
        flags = tl.sum(wins & (0x00020001 << (2 * place)), axis=3)
        n_groups = (N + 31) // 32 * 4
        tl.store(bits_ptr + row * n_groups + group, (flags | (flags >> 16)).to(tl.int8), mask=group < n_groups)
    inside = _inside(word, N, UNIT)
    at = (row * units * (UNIT // WORD))[:, :, :, None]
    if STORE_Y:
        values_row = (values_ptr + row * units_values_R * (UNIT // WORD))[:, :, :, None]
        values = _load_pairs(values_row, word, N, UNIT) & wins
        if UNIT > 1:
            tl.store(y_ptr + at + word, values, mask=inside)
        else:
            tl.store(y_ptr + at + word * 2, values.to(tl.int16), mask=inside)
            tl.store(y_ptr + at + word * 2 + 1, (values >> 16).to(tl.int16), mask=word * 2 + 1 < N)
    if STORE_MASK:
        flags = wins & ONES
        if UNIT > 1:
            tl.store(mask_ptr + at + word, (flags | (flags >> 8)).to(tl.int16), mask=inside)
        else:
            tl.store(mask_ptr + at + word * 2, flags.to(tl.int8), mask=inside)
            tl.store(mask_ptr + at + word * 2 + 1, (flags >> 16).to(tl.int8), mask=word * 2 + 1 < N)
