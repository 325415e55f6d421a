"""k-winner-take-all in Triton: a program per row, the row in registers, its threshold by compare-and-count.

16-bit inputs travel as int16 bit patterns and are ordered as integers, so that no kernel here does 16-bit arithmetic.
"""

from __future__ import annotations

from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.backends._seed import normal_quantile
from moe_kernels.backends.triton import Configuration, launch, on_device, patterns, unsupported
from moe_kernels.library import words

TIES = {"index": 0, "strict": 1, "all": 2}

# Pattern of +inf and how the bits become a float32: the same, shifted up (bfloat16), or converted (float16).
FORMATS = {torch.float32: (0x7F800000, 0), torch.bfloat16: (0x7F80, 1), torch.float16: (0x7C00, 2)}

RESIDENT = 16384  # elements of a row that stay in registers; a longer row is read again for every count
CHUNK = 4096  # elements written at a time: masks, ranks and bits of a longer row would spill beside its keys
BLOCK_BWD = 4096
TRIALS = 8  # guesses from the shape of the row before bisection: normal rows need 3 to 5


def configurations() -> list[Configuration]:
    """Every block size, dtype and output of the forward, and the backward."""
    rows = {"x_ptr": "", "values_ptr": "", "y_ptr": "", "bits_ptr": "*i32", "mask_ptr": "*i8"}
    sizes = {"stride_x_R": "i64", "stride_values_R": "i64", "N": "i32", "K": "i32", "quantile": "fp32"}
    found = []
    for (dtype, (inf, form)), block in product(FORMATS.items(), (128, 1024, 4096, RESIDENT)):
        short = str(dtype).removeprefix("torch.")
        pattern = "*i32" if form == 0 else "*i16"
        types = {name: kind or pattern for name, kind in rows.items()} | sizes
        constants = {"TIES": 0, "STORE_Y": True, "STORE_BITS": True, "STORE_MASK": False, "INF": inf, "FORMAT": form}
        constants |= {"RESIDENT": True, "BLOCK": block, "CHUNK": min(block, CHUNK), "TRIALS": TRIALS}
        found.append(Configuration(f"kwta_fwd {short} {block}", _kwta_fwd, types, constants, warps(block)))
        if block == CHUNK:  # rows at multiples of 16 bytes
            name, divisible = f"kwta_fwd {short} {block} even", ("stride_x_R", "stride_values_R", "N")
            found.append(Configuration(name, _kwta_fwd, types, constants, warps(block), 2, divisible))
        if block == RESIDENT:
            longer = constants | {"RESIDENT": False}
            found.append(Configuration(f"kwta_fwd {short} longer", _kwta_fwd, types, longer, warps(block)))
    for pattern in ("*i16", "*i32"):
        types = {"grad_ptr": pattern, "bits_ptr": "*i32", "dx_ptr": pattern, "stride_grad_R": "i64", "N": "i32"}
        found.append(Configuration(f"kwta_bwd {pattern[1:]}", _kwta_bwd, types, {"BLOCK": BLOCK_BWD}, 4))
        name, each = f"kwta_bwd {pattern[1:]} even", {"BLOCK": BLOCK_BWD}
        found.append(Configuration(name, _kwta_bwd, types, each, 4, 2, ("stride_grad_R", "N")))
    return found


def warps(block: int) -> int:
    """16 elements a thread, 32 in the longest rows."""
    return min(max(block // 512, 1), 16)


@triton.jit
def _keys(bits, INF: tl.constexpr):
    """Integers that order as the values do: negatives mirrored, so that -0 == +0, and every NaN just above +inf."""
    SIGN: tl.constexpr = -0x80000000 if INF > 0xFFFF else -0x8000
    magnitude = bits & ~SIGN
    mirrored = tl.where(bits < 0, -magnitude, magnitude)
    return tl.where(magnitude > INF, INF + 1, mirrored)


@triton.jit
def _value(key, INF: tl.constexpr, FORMAT: tl.constexpr):
    """A key's value in float32."""
    magnitude = tl.where(key < 0, -key, key)
    if FORMAT == 0:
        value = magnitude.to(tl.float32, bitcast=True)
    elif FORMAT == 1:
        value = (magnitude << 16).to(tl.float32, bitcast=True)
    else:
        # Exponents are 112 apart; the product is exact for subnormals too, and puts inf at 65536: far enough out.
        value = (magnitude << 13).to(tl.float32, bitcast=True) * 5192296858534827628530496329220096.0
    return tl.where(key < 0, -value, value)


@triton.jit
def _key_near(value, INF: tl.constexpr, FORMAT: tl.constexpr):
    """A key close to a float32 value; any key for a NaN."""
    magnitude = tl.abs(value)
    if FORMAT == 0:
        key = magnitude.to(tl.int32, bitcast=True)
    elif FORMAT == 1:
        key = magnitude.to(tl.int32, bitcast=True) >> 16
    else:
        scaled = tl.minimum(magnitude, 65536.0) * 1.925929944387236e-34
        key = scaled.to(tl.int32, bitcast=True) >> 13
    return tl.where(value < 0, -key, key)


@triton.jit
def _load_keys(x_row, start, N, BLOCK: tl.constexpr, INF: tl.constexpr):
    """BLOCK keys from element `start` on; beyond the row a key that never wins."""
    offsets = start + tl.arange(0, BLOCK)
    bits = tl.load(x_row + offsets, mask=offsets < N, other=0).to(tl.int32)
    return tl.where(offsets < N, _keys(bits, INF), -INF - 2)


@triton.jit
def _count(x_row, keys, trial, N, BLOCK: tl.constexpr, INF: tl.constexpr, RESIDENT: tl.constexpr):
    """Keys of the row at or above a trial."""
    if RESIDENT:
        return tl.sum((keys >= trial).to(tl.int32))
    else:
        count = 0
        start = 0
        while start < N:
            count += tl.sum((_load_keys(x_row, start, N, BLOCK, INF) >= trial).to(tl.int32))
            start += BLOCK
        return count


@triton.jit
def _threshold(
    x_row, keys, N, K, quantile,
    TIES: tl.constexpr, BLOCK: tl.constexpr, INF: tl.constexpr, FORMAT: tl.constexpr, RESIDENT: tl.constexpr,
    TRIALS: tl.constexpr,
):  # fmt: skip
    """(above, ties): keys greater than `above` win, and of the keys equal to it the first `ties` ones."""
    # More than K keys are at or above low, fewer than K at or above high.
    low = -INF - 1
    high = INF + 2
    at_low = N
    at_high = 0
    finite = (keys > -INF) & (keys < INF)
    values = tl.where(finite, _value(keys, INF, FORMAT), 0.0)
    seen = tl.maximum(tl.sum(finite.to(tl.int32)), 1).to(tl.float32)
    mean = tl.sum(values) / seen
    deviation = tl.sqrt(tl.maximum(tl.sum(values * values) / seen - mean * mean, 0.0))
    # By how much one key too many moves the threshold of a normal row.
    step = deviation * 2.5066283 * tl.exp(0.5 * quantile * quantile) / N
    guess = mean + quantile * deviation
    above = low
    ties = 0
    if K == 0:
        above = INF + 1
    searching = (K > 0) & (K < N)
    round = 0
    while searching:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # high - low does not fit 32 bits
        near = tl.minimum(tl.maximum(_key_near(guess, INF, FORMAT), low + 1), high - 1)
        trial = tl.where((round < TRIALS) & (tl.abs(guess) < 3.0e38), near, middle)
        count = _count(x_row, keys, trial, N, BLOCK, INF, RESIDENT)
        if count == K:
            above = trial - 1
            searching = False
        else:
            here = _value(trial, INF, FORMAT)
            # Late rounds move to the nearest key that the row has: this ends the search where many keys are equal.
            snap = RESIDENT and round >= TRIALS
            if count > K:
                low = trial
                if snap:
                    low = tl.min(tl.where(keys >= trial, keys, INF + 2))
                at_low = count
            else:
                high = trial
                if snap:
                    high = tl.max(tl.where(keys < trial, keys, -INF - 2)) + 1
                at_high = count
            if (at_low < N) & (at_high > 0):
                bottom = _value(low, INF, FORMAT)
                top = _value(high, INF, FORMAT)
                guess = bottom + (top - bottom) * ((at_low - K).to(tl.float32) / (at_low - at_high).to(tl.float32))
            else:
                guess = here + (count - K).to(tl.float32) * step
            if high - low == 1:
                above = low
                if TIES == 0:
                    ties = K - at_high
                if TIES == 2:
                    above = low - 1
                searching = False
        round += 1
    return above, ties


@triton.jit
def _kwta_fwd(
    x_ptr,  # (R, N) bit patterns
    values_ptr,  # (R, N) bit patterns
    y_ptr,  # (R, N) contiguous
    bits_ptr,  # (R, ceil(N / 32))
    mask_ptr,  # (R, N) contiguous
    stride_x_R,
    stride_values_R,
    N,
    K,
    quantile,
    TIES: tl.constexpr,
    STORE_Y: tl.constexpr,
    STORE_BITS: tl.constexpr,
    STORE_MASK: tl.constexpr,
    INF: tl.constexpr,
    FORMAT: tl.constexpr,
    RESIDENT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    TRIALS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * stride_x_R
    keys = _load_keys(x_row, 0, N, BLOCK, INF)
    above, ties = _threshold(x_row, keys, N, K, quantile, TIES, BLOCK, INF, FORMAT, RESIDENT, TRIALS)
    start = 0
    while start < N:
        offsets = start + tl.arange(0, CHUNK)
        if CHUNK < BLOCK or not RESIDENT:
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
            # All of them: a mask that differs between neighbours would make 16 loads of two or four.
            values = tl.load(values_ptr + row * stride_values_R + offsets, mask=offsets < N, other=0)
            tl.store(y_ptr + row * N + offsets, tl.where(wins, values, 0), mask=offsets < N)
        if STORE_BITS:
            lanes = tl.reshape(wins.to(tl.int32), (CHUNK // 32, 32)) << tl.arange(0, 32)[None, :]
            word = start // 32 + tl.arange(0, CHUNK // 32)
            n_words = (N + 31) // 32
            tl.store(bits_ptr + row * n_words + word, tl.sum(lanes, axis=1), mask=word < n_words)
        if STORE_MASK:
            tl.store(mask_ptr + row * N + offsets, wins.to(tl.int8), mask=offsets < N)
        start += CHUNK


@triton.jit
def _kwta_bwd(
    grad_ptr,  # (R, N) bit patterns
    bits_ptr,  # (R, ceil(N / 32))
    dx_ptr,  # (R, N) contiguous
    stride_grad_R,
    N,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n_words = (N + 31) // 32
    word = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    lane = tl.arange(0, 32)[None, :]
    offsets = word[:, None] * 32 + lane
    # A thread reads a word once for its 16 bytes of a row, and all of these at once, whoever won.
    bits = tl.load(bits_ptr + row * n_words + word, mask=word < n_words, other=0)
    wins = ((bits[:, None] >> lane) & 1) != 0
    grad = tl.load(grad_ptr + row * stride_grad_R + offsets, mask=offsets < N, other=0)
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
    rows, n = grad.shape
    if dx.numel():
        block = max(min(triton.next_power_of_2(n), BLOCK_BWD), 32)
        grid = (rows, triton.cdiv(n, block))
        launch(_kwta_bwd, grid, patterns(grad), bits, patterns(dx), grad.stride(0), n, BLOCK=block)
    return dx


def _launch(x: Tensor, values: Tensor | None, k: int, ties: str, y=None, bits=None, mask=None) -> None:
    rows, n = x.shape
    if x.numel() == 0:
        return
    block = max(min(triton.next_power_of_2(n), RESIDENT), 32)
    source = x if values is None else values
    inf, form = FORMATS[x.dtype]
    launch(
        _kwta_fwd, (rows,),
        patterns(x), patterns(source), patterns(x if y is None else y), x if bits is None else bits,
        x if mask is None else mask.view(torch.int8),
        x.stride(0), source.stride(0), n, k, normal_quantile(k, n),
        TIES=TIES[ties], STORE_Y=y is not None, STORE_BITS=bits is not None, STORE_MASK=mask is not None,
        INF=inf, FORMAT=form, RESIDENT=n <= RESIDENT, BLOCK=block, CHUNK=min(block, CHUNK), TRIALS=TRIALS,
        num_warps=warps(block),
    )  # fmt: skip
