"""A linear layer that computes the winners of each row alone, in Triton.

A program takes BLOCK_N winners of one token, by their rank among the token's set bits, and reads only their rows of the
weight. So it pays where few tokens leave much of the weight unread, as in decoding; many tokens read it from L2 again
and again, and a dense product on tensor cores is faster.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.backends.triton import FORMATS, common_unit, launch, on_device, unsupported

BLOCK_N = 8
BLOCK_D = 256
MOST = 65535  # programs in the second dimension of a grid
WORDS = 128  # words of bits that a program counts at a time


@triton.jit
def _ones(word):
    """The number of bits of an int32 that are 1."""
    word = word.to(tl.uint32, bitcast=True)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _find(bits_row, N, rank, WORDS: tl.constexpr):
    """(word, before, total): for each rank the word of bits that has it and the number of bits before that word; the
    number of bits of the row. Ranks from `total` on have no word."""
    word = tl.zeros_like(rank)
    before = tl.zeros_like(rank)
    total = 0
    n_words = (N + 31) // 32
    start = 0
    while start < n_words:
        index = start + tl.arange(0, WORDS)
        ones = _ones(_load_words(bits_row, index, N))
        ends = total + tl.cumsum(ones)
        passed = ends[None, :] <= rank[:, None]
        word += tl.sum((passed & (index < n_words)[None, :]).to(tl.int32), axis=1)
        before = tl.maximum(before, tl.max(tl.where(passed, ends[None, :], 0), axis=1))
        total += tl.sum(ones)
        start += WORDS
    return word, before, total


@triton.jit
def _load_words(bits_row, index, N):
    """Words of a row's bits, without bits past N."""
    left = N - 32 * index
    kept = tl.where(left >= 32, -1, (1 << (left & 31)) - 1)
    return tl.load(bits_row + index, mask=left > 0, other=0) & kept


@triton.jit
def _select(word, rank):
    """The place of the bit of this rank, 0 for the lowest bit that is 1, in words that have it."""
    place = tl.zeros_like(rank)
    for step in tl.static_range(5):
        half = 16 >> step
        low = word & ((1 << half) - 1)
        ones = _ones(low)
        above = rank >= ones
        rank = tl.where(above, rank - ones, rank)
        word = tl.where(above, word >> half, low)
        place += tl.where(above, half, 0)
    return place


@triton.jit(do_not_specialize=["units_x_T", "units_w_N", "units", "N"])
def _kwta_linear_fwd(
    x_ptr,  # (T, D)
    weight_ptr,  # (N, D)
    bias_ptr,  # (N), or any if not HAS_BIAS
    bits_ptr,  # (T, ceil(N / 32)) int32
    y_ptr,  # (T, N) contiguous zeros
    units_x_T,  # row strides and D in units of UNIT elements, so that the compiler knows a divisor
    units_w_N,
    units,
    N,
    UNIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WORDS: tl.constexpr,
):
    D = units * UNIT
    token = tl.program_id(0).to(tl.int64)
    bits_row = bits_ptr + token * ((N + 31) // 32)
    x_row = x_ptr + token * units_x_T * UNIT
    first = tl.program_id(1) * BLOCK_N
    total = N
    while first < total:
        rank = first + tl.arange(0, BLOCK_N)
        index, before, total = _find(bits_row, N, rank, WORDS)
        wins = rank < total
        index = tl.where(wins, index, 0)
        n = 32 * index + _select(_load_words(bits_row, index, N), rank - before)
        row = weight_ptr + n.to(tl.int64)[:, None] * units_w_N * UNIT
        sums = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        start = 0
        while start < D:
            d = start + tl.arange(0, BLOCK_D)
            x = tl.load(x_row + d, mask=d < D, other=0).to(tl.float32)
            weight = tl.load(row + d[None, :], mask=wins[:, None] & (d < D)[None, :], other=0).to(tl.float32)
            sums = tl.fma(weight, tl.broadcast_to(x[None, :], (BLOCK_N, BLOCK_D)), sums)
            start += BLOCK_D
        y = tl.sum(sums, axis=1)
        if HAS_BIAS:
            y += tl.load(bias_ptr + n, mask=wins, other=0).to(tl.float32)
        tl.store(y_ptr + token * N + n, y.to(y_ptr.dtype.element_ty), mask=wins)
        first += tl.num_programs(1) * BLOCK_N


def kwta_linear_supports(device: str, dtype: torch.dtype) -> str | None:
    return unsupported(device, dtype, tuple(FORMATS))


@on_device
def kwta_linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, bits: Tensor, k: int) -> Tensor:
    (tokens, dim), width = x.shape, weight.shape[0]
    y = x.new_zeros((tokens, width))
    if y.numel() == 0:
        return y
    unit = common_unit((x, weight), dim)
    launch(
        _kwta_linear_fwd, (tokens, min(max(triton.cdiv(k, BLOCK_N), 1), MOST)),
        x, weight, x if bias is None else bias, bits, y, x.stride(0) // unit, weight.stride(0) // unit, dim // unit,
        width, UNIT=unit, HAS_BIAS=bias is not None, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, WORDS=WORDS, num_warps=4,
    )  # fmt: skip
    return y
