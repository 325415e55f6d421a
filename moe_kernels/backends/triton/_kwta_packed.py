"""k-winner-take-all of 16-bit rows, two elements in each 32-bit word.

A key has 15 bits and a guard bit above them. One subtraction compares both halves of a word: the guard bit stays where
the key is at or above the trial. 15 bits order 16-bit values because the threshold has one sign: where it is positive,
all negative elements share the lowest key; where it is negative or zero, all positive ones share the highest. Ties are
resolved on the flags of winners, 16 elements at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_kernels.backends.triton._kwta_values import key_near, value_of

GUARD = tl.constexpr(-0x7FFF8000)  # 0x80008000, the bit above each key
ONES = tl.constexpr(0x00010001)
KEYS = tl.constexpr(0x7FFF7FFF)
ZERO = tl.constexpr(0x7FFE)  # the key of zero where the threshold is not positive


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
def _keys(pairs, word, N, negative, hostile, UNIT: tl.constexpr, INF: tl.constexpr):
    """The keys of a row for a threshold above zero, or below or at it (`negative`), each with its guard bit."""
    if hostile:
        # Every NaN becomes the number after +inf.
        nan = _halves((((pairs & KEYS) + ONES * (0x7FFF - INF)) >> 15) & ONES)
        pairs = (pairs & ~nan) | (nan & (ONES * (INF + 1)))
    sign = (pairs >> 15) & ONES
    if negative:
        magnitude = pairs & KEYS
        positive = _halves(((magnitude + KEYS) >> 15) & ONES) & ~_halves(sign)
        keys = (positive & KEYS) | (~positive & (ONES * ZERO - magnitude)) | GUARD
        # Past the end of the row a zero would count.
        keys = tl.where(_inside(word, N, UNIT), keys, GUARD)
        if UNIT == 1:
            keys = tl.where(word * 2 + 1 < N, keys, (keys & 0xFFFF) | (GUARD & ~0xFFFF))
    else:
        keys = (pairs | GUARD) - (pairs & (sign * 0x7FFF))
    return keys


@triton.jit
def _first_guess(pairs, N, quantile, FORMAT: tl.constexpr):
    """The threshold of a normal row with this mean and deviation, by how much one element too many moves it, and
    whether the row holds NaN or infinities (or sums that overflow). Deviations are of every other element."""
    if FORMAT == 1:
        low = (pairs << 16).to(tl.float32, bitcast=True)
        high = pairs.to(tl.float32, bitcast=True)  # near enough with the other element as its last digits
    else:
        low = pairs.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    mean = tl.sum(low + high) / N
    squares = tl.sum(low * low) / ((N + 1) // 2)
    deviation = tl.sqrt(tl.maximum(squares - mean * mean, 0.0))
    step = deviation * 2.5066283 * tl.exp(0.5 * quantile * quantile) / N
    return mean + quantile * deviation, step, (tl.abs(mean) < float("inf")) == 0


@triton.jit
def _threshold(
    x_row, word, N, K, quantile,
    UNIT: tl.constexpr, TIES: tl.constexpr, INF: tl.constexpr, FORMAT: tl.constexpr, TRIALS: tl.constexpr,
):  # fmt: skip
    """(keys, least, ties): keys at or above `least` win, and of the keys one below it the first `ties` ones."""
    pairs = _load_pairs(x_row, word, N, UNIT)
    guess, step, hostile = _first_guess(pairs, N, quantile, FORMAT)
    negative = ((guess < 0) & (K > 0)) | (K >= N)
    keys = _keys(pairs, word, N, negative, hostile, UNIT, INF)
    least = tl.where(K == 0, 0x7FFF, 1)
    ties = 0
    # More than K keys are at or above low, fewer than K at or above high.
    low = 0
    high = 0x8000
    at_low = N
    at_high = 0
    searching = (K > 0) & (K < N)
    round = 0
    while searching:
        zero = tl.where(negative, ZERO, 0)
        near = tl.minimum(tl.maximum(key_near(guess, INF, FORMAT) + zero, low + 1), high - 1)
        trial = tl.where((round < TRIALS) & (tl.abs(guess) < 3.0e38), near, (low + high) >> 1)
        halves = tl.sum(((keys - trial * ONES) >> 15) & ONES)
        count = (halves & 0xFFFF) + (halves >> 16)
        if count == K:
            least = trial
            searching = False
        else:
            low = tl.where(count > K, trial, low)
            at_low = tl.where(count > K, count, at_low)
            high = tl.where(count > K, high, trial)
            at_high = tl.where(count > K, at_high, count)
            bottom = value_of(low - zero, INF, FORMAT)
            top = value_of(high - zero, INF, FORMAT)
            if (at_low < N) & (at_high > 0):
                guess = bottom + (top - bottom) * ((at_low - K).to(tl.float32) / (at_low - at_high).to(tl.float32))
            else:
                guess = tl.where(count > K, bottom, top) + (count - K).to(tl.float32) * step
            if high - low == 1:
                if low == tl.where(negative, 0x7FFF, 0):
                    # The threshold is on the other side of zero.
                    negative = negative == 0
                    again = _load_pairs(x_row, word, N, UNIT)  # kept, it would cost registers
                    keys = _keys(again, word, N, negative, hostile, UNIT, INF)
                    low = 0
                    high = 0x8000
                    at_low = N
                    at_high = 0
                else:
                    least = high
                    if TIES == 0:
                        ties = K - at_high
                    if TIES == 2:
                        least = low
                    searching = False
        round += 1
    return keys, least, ties


@triton.jit
def _at_least(keys, trial, place):
    """(G): flags of the 16 elements whose key is at or above the trial, from (G, 8) words: element 2 i is bit 2 i, and
    element 2 i + 1 is bit 16 + 2 i."""
    guards = keys - trial * ONES
    return tl.sum((guards >> (15 - 2 * place)) & (ONES << (2 * place)), axis=1)


@triton.jit
def _in_order(flags):
    """The flags of 16 elements as bits 0 to 15."""
    return (flags | (flags >> 15)) & 0xFFFF


@triton.jit
def _population(flags):
    """How many of 16 flags are set."""
    x = (flags & 0xFFFF) + (flags >> 16)
    x = (x & 0x3333) + ((x >> 2) & 0x3333)
    x = (x + (x >> 4)) & 0x0F0F
    return (x + (x >> 8)) & 0x1F


@triton.jit
def _first_ties(equal, ties):
    """(G): the first `ties` flags that are set."""
    here = _population(equal)
    through = tl.cumsum(here, axis=0)
    before = through - here
    # One group at most is split: its first elements stay.
    split = (before < ties) & (through > ties)
    both = tl.sum(tl.where(split, _in_order(equal) | ((ties - before) << 16), 0), axis=0)
    rest = both & 0xFFFF
    left = both >> 16
    while left > 0:
        rest = rest & (rest - 1)
        left -= 1
    others = (rest & 0x5555) | ((rest & 0xAAAA) << 15)
    return tl.where(through <= ties, equal, tl.where(split, equal & ~others, 0))


@triton.jit(do_not_specialize=["units_x_R", "units_values_R", "units", "K"])
def kwta_fwd_packed(
    x_ptr,  # (R, N) words of two elements, or elements if UNIT is 1
    values_ptr,  # (R, N) likewise
    y_ptr,  # (R, N) contiguous, likewise
    bits_ptr,  # (R, 2 ceil(N / 32)) 16 bits each
    mask_ptr,  # (R, N) contiguous: 8 bits each, or 16 of two elements
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
    BLOCK: tl.constexpr,
    TRIALS: tl.constexpr,
):
    WORD: tl.constexpr = 2 if UNIT > 1 else 1  # elements that a pointer counts
    N = units * UNIT
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK // 16)
    place = tl.arange(0, 8)[None, :]
    word = group[:, None] * 8 + place
    x_row = x_ptr + row * units_x_R * (UNIT // WORD)
    keys, least, ties = _threshold(x_row, word, N, K, quantile, UNIT, TIES, INF, FORMAT, TRIALS)
    wins = _at_least(keys, least, place)
    if TIES == 0:
        if ties > 0:
            wins = wins | _first_ties(_at_least(keys, least - 1, place) & ~wins, ties)
    if STORE_BITS:
        n_groups = (N + 31) // 32 * 2
        tl.store(bits_ptr + row * n_groups + group, _in_order(wins).to(tl.int16), mask=group < n_groups)
    flags = (wins[:, None] >> (2 * place)) & ONES
    inside = _inside(word, N, UNIT)
    at = row * units * (UNIT // WORD)
    if STORE_Y:
        values_row = values_ptr + row * units_values_R * (UNIT // WORD)
        if UNIT > 1:
            values = tl.load(values_row + word, mask=inside)
            tl.store(y_ptr + at + word, values & _halves(flags), mask=inside)
        else:
            values = _load_pairs(values_row, word, N, UNIT) & _halves(flags)
            tl.store(y_ptr + at + word * 2, values.to(tl.int16), mask=inside)
            tl.store(y_ptr + at + word * 2 + 1, (values >> 16).to(tl.int16), mask=word * 2 + 1 < N)
    if STORE_MASK:
        if UNIT > 1:
            tl.store(mask_ptr + at + word, (flags | (flags >> 8)).to(tl.int16), mask=inside)
        else:
            tl.store(mask_ptr + at + word * 2, flags.to(tl.int8), mask=inside)
            tl.store(mask_ptr + at + word * 2 + 1, (flags >> 16).to(tl.int8), mask=word * 2 + 1 < N)
