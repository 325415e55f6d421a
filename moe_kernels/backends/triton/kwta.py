"""k-winner-take-all in Triton. 16-bit rows of up to RESIDENT elements run the kernel of _kwta_packed.py.

A program of _kwta_fwd computes one row. It searches for the threshold among keys, integers in the order of the elements
(_kwta_values.py): each round counts the row's keys that are at least a trial key.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.backends._seed import normal_quantile
from moe_kernels.backends.triton import FORMATS, common_unit, keys_of, launch, on_device, patterns, unsupported
from moe_kernels.backends.triton._kwta_packed import kwta_fwd_packed
from moe_kernels.backends.triton._kwta_values import key_near, value_of
from moe_kernels.sizes import aligned, words

# Which elements win if too many equal the k-th largest: the first of them, none of them, all of them.
TIES = {"index": 0, "strict": 1, "all": 2}

LONGEST = 16384  # most keys in a program's first tile; rows up to RESIDENT have their other keys in a second tile
RESIDENT = 2 * LONGEST  # longest row whose keys stay in registers; a longer row is read again for each count
CHUNK = 4096  # most elements that a program of _kwta_fwd writes at a time
BLOCK_BWD = 4096  # most elements that a program of _kwta_bwd computes
TRIALS = 8  # rounds with interpolated trials before bisection


def warps(block: int) -> int:
    """Warps for a tile of `block` elements: 32 elements for each thread, in tiles of at least 1024."""
    return max(block // 1024, 1)


@triton.jit
def _load_bits(x_row, start, N, BLOCK: tl.constexpr):
    offsets = start + tl.arange(0, BLOCK)
    return tl.load(x_row + offsets, mask=offsets < N, other=0).to(tl.int32)


@triton.jit
def _load_keys(x_row, start, N, BLOCK: tl.constexpr, INF: tl.constexpr):
    """BLOCK keys from element `start` on; beyond the end of the row -INF - 2, which never wins."""
    bits = _load_bits(x_row, start, N, BLOCK)
    return tl.where(start + tl.arange(0, BLOCK) < N, keys_of(bits, INF), -INF - 2)


@triton.jit
def _first_guess(bits, N, quantile, INF: tl.constexpr, FORMAT: tl.constexpr):
    """(threshold, step) for a row of normal elements with the mean and deviation of `bits`, the start of the row.
    step: the increase of the threshold that makes one element fewer win. Both may be NaN or infinite."""
    magnitude = bits & (0x7FFFFFFF if FORMAT == 0 else 0x7FFF)
    values = (
        bits.to(tl.float32, bitcast=True)
        if FORMAT == 0
        else value_of(tl.where(bits < 0, -magnitude, magnitude), INF, FORMAT)
    )
    count = tl.minimum(N, bits.shape[0])
    mean = tl.sum(values) / count
    deviation = tl.sqrt(tl.maximum(tl.sum(values * values) / count - mean * mean, 0.0))
    step = deviation * 2.5066283 * tl.exp(0.5 * quantile * quantile) / N
    return mean + quantile * deviation, step


@triton.jit
def _count(
    x_row, keys, rest, trial, N, BLOCK: tl.constexpr, INF: tl.constexpr, RESIDENT: tl.constexpr, REST: tl.constexpr
):
    """Number of keys of the row at or above `trial`."""
    if RESIDENT:
        count = tl.sum((keys >= trial).to(tl.int32))
        if REST > 0:
            count += tl.sum((rest >= trial).to(tl.int32))
        return count
    else:
        count = 0
        start = 0
        while start < N:
            count += tl.sum((_load_keys(x_row, start, N, BLOCK, INF) >= trial).to(tl.int32))
            start += BLOCK
        return count


@triton.jit
def _threshold(
    x_row, keys, rest, N, K, guess, step,
    TIES: tl.constexpr, BLOCK: tl.constexpr, INF: tl.constexpr, FORMAT: tl.constexpr, RESIDENT: tl.constexpr,
    REST: tl.constexpr, TRIALS: tl.constexpr,
):  # fmt: skip
    """(above, ties): keys greater than `above` win, and the first `ties` keys equal to `above` win."""
    # While searching, more than K keys are >= low and fewer than K are >= high.
    low = -INF - 1
    high = INF + 2
    at_low = N
    at_high = 0
    above = low
    ties = 0
    if K == 0:
        above = INF + 1
    searching = (K > 0) & (K < N)
    round = 0
    while searching:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # (low + high) >> 1, in 32 bits without overflow
        interpolated = tl.minimum(tl.maximum(key_near(guess, INF, FORMAT), low + 1), high - 1)
        trial = tl.where((round < TRIALS) & (tl.abs(guess) < 3.0e38), interpolated, middle)
        count = _count(x_row, keys, rest, trial, N, BLOCK, INF, RESIDENT, REST)
        if count == K:
            above = trial - 1
            searching = False
        else:
            value = value_of(trial, INF, FORMAT)
            # Bisection of a RESIDENT row skips numbers between its keys, so it takes few rounds if many keys are equal.
            snap = RESIDENT and round >= TRIALS
            if count > K:
                low = trial
                if snap:
                    low = tl.min(tl.where(keys >= trial, keys, INF + 2))
                    if REST > 0:
                        low = tl.minimum(low, tl.min(tl.where(rest >= trial, rest, INF + 2)))
                at_low = count
            else:
                high = trial
                if snap:
                    high = tl.max(tl.where(keys < trial, keys, -INF - 2)) + 1
                    if REST > 0:
                        high = tl.maximum(high, tl.max(tl.where(rest < trial, rest, -INF - 2)) + 1)
                at_high = count
            if (at_low < N) & (at_high > 0):
                bottom = value_of(low, INF, FORMAT)
                top = value_of(high, INF, FORMAT)
                guess = bottom + (top - bottom) * ((at_low - K).to(tl.float32) / (at_low - at_high).to(tl.float32))
            else:
                guess = value + (count - K).to(tl.float32) * step
            if high - low == 1:
                above = low
                if TIES == 0:
                    ties = K - at_high
                if TIES == 2:
                    above = low - 1
                searching = False
        round += 1
    return above, ties


@triton.jit(do_not_specialize=["units_x_R", "units_values_R", "units", "K"])
def _kwta_fwd(
    x_ptr,  # (R, N) bit patterns
    values_ptr,  # (R, N) bit patterns
    y_ptr,  # (R, N) contiguous
    bits_ptr,  # (R, ceil(N / 32)) int32, one bit for each element: 1 if it wins
    mask_ptr,  # (R, N) contiguous int8: 1 if the element wins
    units_x_R,  # row strides and N in units of UNIT elements, so that the compiler knows a divisor
    units_values_R,
    units,
    K,
    quantile,  # the threshold if the elements are normal, in deviations above their mean
    UNIT: tl.constexpr,  # number of elements in 16 bytes, or 1
    TIES: tl.constexpr,
    STORE_Y: tl.constexpr,
    STORE_BITS: tl.constexpr,
    STORE_MASK: tl.constexpr,
    INF: tl.constexpr,
    FORMAT: tl.constexpr,
    RESIDENT: tl.constexpr,  # the keys of the row stay in registers
    BLOCK: tl.constexpr,
    REST: tl.constexpr,  # size of a second tile of keys, after the first BLOCK; 0: none
    CHUNK: tl.constexpr,
    TRIALS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    N = units * UNIT
    x_row = x_ptr + row * units_x_R * UNIT
    bits = _load_bits(x_row, 0, N, BLOCK)
    guess, step = _first_guess(bits, N, quantile, INF, FORMAT)
    keys = tl.where(tl.arange(0, BLOCK) < N, keys_of(bits, INF), -INF - 2)
    rest = keys
    if REST > 0:
        rest = _load_keys(x_row, BLOCK, N, REST, INF)
    above, ties = _threshold(x_row, keys, rest, N, K, guess, step, TIES, BLOCK, INF, FORMAT, RESIDENT, REST, TRIALS)
    start = 0
    while start < N:
        offsets = start + tl.arange(0, CHUNK)
        if CHUNK < BLOCK or not RESIDENT or REST > 0:
            part = _load_keys(x_row, start, N, CHUNK, INF)
        else:
            part = keys
        wins = part > above
        if TIES == 0:
            if ties > 0:
                equal = (part == above).to(tl.int32)
                wins = wins | ((equal > 0) & (tl.cumsum(equal) <= ties))
                ties -= tl.sum(equal)
        wins = wins & (offsets < N)
        if STORE_Y:
            values = tl.load(values_ptr + row * units_values_R * UNIT + offsets, mask=offsets < N, other=0)
            tl.store(y_ptr + row * N + offsets, tl.where(wins, values, 0), mask=offsets < N)
        if STORE_BITS:
            lanes = tl.reshape(wins.to(tl.int32), (CHUNK // 32, 32)) << tl.arange(0, 32)[None, :]
            word = start // 32 + tl.arange(0, CHUNK // 32)
            n_words = (N + 31) // 32
            tl.store(bits_ptr + row * n_words + word, tl.sum(lanes, axis=1), mask=word < n_words)
        if STORE_MASK:
            tl.store(mask_ptr + row * N + offsets, wins.to(tl.int8), mask=offsets < N)
        start += CHUNK


@triton.jit(do_not_specialize=["units_grad_R", "units"])
def _kwta_bwd(
    grad_ptr,  # (R, N) bit patterns
    bits_ptr,  # (R, ceil(N / 32)) int32, one bit for each element: 1 if it wins
    dx_ptr,  # (R, N) contiguous
    units_grad_R,
    units,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    N = units * UNIT
    row = tl.program_id(0).to(tl.int64)
    n_words = (N + 31) // 32
    word = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    lane = tl.arange(0, 32)[None, :]
    offsets = word[:, None] * 32 + lane
    bits = tl.load(bits_ptr + row * n_words + word, mask=word < n_words, other=0)
    wins = ((bits[:, None] >> lane) & 1) != 0
    grad = tl.load(grad_ptr + row * units_grad_R * UNIT + offsets, mask=offsets < N, other=0)
    tl.store(dx_ptr + row * N + offsets, tl.where(wins, grad, 0), mask=offsets < N)


def kwta_supports(device: str, dtype: torch.dtype) -> str | None:
    return unsupported(device, dtype, tuple(FORMATS))


@on_device
def kwta_fwd(x: Tensor, values: Tensor | None, k: int, ties: str, save_bits: bool) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape)
    bits = x.new_empty((x.shape[0], words(x.shape[1]) if save_bits else 0), dtype=torch.int32)
    _launch(x, values, k, ties, y=y, bits=bits if save_bits else None)
    return y, bits


@on_device
def kwta_mask(x: Tensor, k: int, ties: str) -> Tensor:
    mask = x.new_empty(x.shape, dtype=torch.bool)
    _launch(x, None, k, ties, mask=mask)
    return mask


@on_device
def kwta_bwd(grad: Tensor, bits: Tensor) -> Tensor:
    dx = grad.new_empty(grad.shape)
    num_rows, n = grad.shape
    if dx.numel():
        block = max(min(triton.next_power_of_2(n), BLOCK_BWD), 32)
        grid = (num_rows, triton.cdiv(n, block))
        unit = common_unit((grad,), n)
        launch(
            _kwta_bwd, grid, patterns(grad), bits, patterns(dx), grad.stride(0) // unit, n // unit,
            UNIT=unit, BLOCK=block, num_warps=warps(block),
        )  # fmt: skip
    return dx


def _launch(x: Tensor, values: Tensor | None, k: int, ties: str, y=None, bits=None, mask=None) -> None:
    if x.numel() == 0:
        return
    if x.element_size() == 2 and x.shape[1] <= RESIDENT:
        _launch_packed(x, x if values is None else values, k, ties, y, bits, mask)
        return
    num_rows, n = x.shape
    block = max(min(triton.next_power_of_2(n), LONGEST), 32)
    rest = max(triton.next_power_of_2(n - block), 1024) if block < n <= RESIDENT else 0
    source = x if values is None else values
    inf, form = FORMATS[x.dtype]
    unit = common_unit((x, source), n)
    launch(
        _kwta_fwd, (num_rows,),
        patterns(x), patterns(source), patterns(x if y is None else y), x if bits is None else bits,
        x if mask is None else mask.view(torch.int8),
        x.stride(0) // unit, source.stride(0) // unit, n // unit, k, normal_quantile(k, n), UNIT=unit,
        TIES=TIES[ties], STORE_Y=y is not None, STORE_BITS=bits is not None, STORE_MASK=mask is not None,
        INF=inf, FORMAT=form, RESIDENT=n <= RESIDENT, BLOCK=block, REST=rest, CHUNK=min(block, CHUNK), TRIALS=TRIALS,
        num_warps=warps(block),
    )  # fmt: skip


def _launch_packed(x: Tensor, values: Tensor, k: int, ties: str, y, bits, mask) -> None:
    """Launches kwta_fwd_packed on x and values, or on copies (_aligned_like_contiguous)."""
    num_rows, n = x.shape
    others = values is not x
    x = _aligned_like_contiguous(x)
    values = _aligned_like_contiguous(values) if others else x
    unit = common_unit((x, values), n, (8,))
    tile = packed_tile(n)
    inf, form = FORMATS[x.dtype]
    launch(
        kwta_fwd_packed, (triton.cdiv(num_rows, tile["ROWS"]),),
        patterns(x), patterns(values), patterns(x if y is None else y), x if bits is None else bits.view(torch.int8),
        x if mask is None else mask.view(torch.int8),
        num_rows, x.stride(0) // unit, values.stride(0) // unit, n // unit, k, normal_quantile(k, n), UNIT=unit,
        TIES=TIES[ties], STORE_Y=y is not None, STORE_BITS=bits is not None, STORE_MASK=mask is not None, OTHERS=others,
        INF=inf, FORMAT=form, TRIALS=TRIALS, ORDERED=triton.knobs.runtime.interpret, **tile,
    )  # fmt: skip


def _aligned_like_contiguous(x: Tensor) -> Tensor:
    """x (16-bit) if its address and (row stride - row length) are multiples of 16 bytes, else a contiguous copy. Each
    row of the result has the address, modulo 16 bytes, that it would have in a new contiguous tensor."""
    if aligned(x, 16) and (x.stride(0) - x.shape[1]) % 8 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def packed_tile(n: int) -> dict[str, int]:
    """Rows of a program, lanes of a row, chunks of eight elements that a lane holds, and warps."""
    block = max(triton.next_power_of_2(n), 32)
    lanes = 32 if block == 1024 else max(block // 64, 2)
    return {
        "ROWS": max(32 // lanes, 1), "LANES": lanes, "CHUNKS": block // (8 * lanes), "num_warps": max(lanes // 32, 1),
    }  # fmt: skip
