"""The grouped GEMM on CPU tensors: small experts in csrc/cpu/grouped_gemm.cpp, large ones by torch's matrix library.

A call of that library costs as much as a million multiplications, and its threads share one product; a small expert is
done by then, and threads do better with rows of their own. The loop over large ones is torch's own grouped_mm where it
takes them. Either way bias, activation and what follows them are fused in C++. Offsets are at hand on the CPU, so
reading them is no wait.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from itertools import pairwise, repeat
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.backends import _native
from moe_kernels.backends.native.activation import ACTIVATIONS
from moe_kernels.library import GATED, wide
from moe_kernels.library.grouped_gemm import refuse_bad_rows

# Multiplications of an expert with its rows, on average, in which limits are given.
SMALL = 2**23

# Multiplications that take as long as an element of other work, and rows of a result that a thread takes at least.
AS_ELEMENT, LEAST = 64, 24


class Limit(NamedTuple):
    """Up to which C++ multiplies, in units of SMALL.

    `narrow` where both sides of the weight are at most `widest`, and `wide` elsewhere, as torch's library blocks large
    weights better; always, if all experts together have no more than `least`. But not for fewer than `fewest` rows an
    expert, on average, by weights of more than 128 x 128.
    """

    narrow: float
    widest: int
    wide: float
    least: float = 0
    fewest: int = 0


# C++ against torch, one thread, an Intel processor, AVX-512, float32, with what asking takes. Sides of 128 and 256: 1.1
# to 1.3 at 2**22 to 2**27; of 352: 1.03 to 1.06 at 2**25; of 512: 1.1 to 1.2 up to 2**23, at 2**24 1.05 to 1.1 for up
# to 4 experts and 0.90 to 1.0 for 8 and 16; 0.8 at 2**28 with sides of 1024.
PRODUCT = Limit(16, 384, 1, 8)
# By a transposed weight, which torch's library packs slowly: 1.05 to 1.3 at 2**22 to 2**27 up to 256 wide, 1.15 to 1.25
# with sides of 512 at 2**24 and 2**25, 0.99 at 2**26. But it packs none for few rows: 0.6 to 0.9 for 8 and less.
TRANSPOSED = Limit(16, 384, 4, 8, 12)
# 0.96 to 1.2 up to 2**25, with sides of 512 up to 2**24 (that library as on an Intel processor, on a Zen 4).
GRADIENT = Limit(4, 384, 2)
# For all three in bfloat16 where torch multiplies that and C++ does not: 1.2 to 2 at 2**20, 0.6 to 1.2 at 2**22, 0.5 to
# 0.6 at 2**26 (Zen 4). Where both do on an Intel processor, for which torch may have more, nobody has measured.
BFLOAT16 = 1 / 4


def fwd(native: ModuleType, *args) -> tuple[Tensor, Tensor]:
    return fwd_ready(native, *args)(*args)


def fwd_ready(
    native: ModuleType,
    x: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None,
    bias: Tensor | None,
    activation: str,
    keep_pre: bool,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """fwd for tensors that look like these: 5 us of Python a call, where finding all this again takes 10 more."""
    dtype, num_tokens, dout = x.dtype, x.shape[0], weight.shape[2]
    num_rows = num_tokens if row_token is None else row_token.shape[0]
    if _is_large(native, dtype, weight.shape, weight.stride(), num_rows):
        product_alone = not activation and not keep_pre and row_token is None and bias is None
        return partial(_grouped_mm if product_alone and _takes_grouped_mm(x, weight) else _large_fwd, native)
    native.pointer("grouped_gemm", bias, dtype, 2)
    code, _, x_stride, _, _, *of_weight, _, _, _, _ = _product(native, x, weight, expert_offsets, row_token, None)
    size, shape = weight.shape, (num_rows, dout // 2 if activation in GATED else dout)
    nothing, act = _nothing(dtype, dout), ACTIVATIONS[activation]
    kernel, isa, threads = native.module.grouped_gemm_fwd, native.isa, _threads(native, num_rows, size)

    def run(x, weight, expert_offsets, row_token, bias, *_):
        out = x.new_empty(*shape)
        pre = x.new_empty(num_rows, dout) if keep_pre else None
        product = isa, code, x, x_stride, row_token, weight, *of_weight, expert_offsets, *size
        if kernel(*product, bias, act, out, pre, num_rows, num_tokens, threads):
            refuse_bad_rows(expert_offsets, x, row_token)
        return out, nothing if pre is None else pre

    return run


def _grouped_mm(native: ModuleType, x: Tensor, weight: Tensor, expert_offsets: Tensor, *rest) -> tuple[Tensor, Tensor]:
    """_large_fwd where it is one call of torch: what that asks besides takes 20 to 40 us."""
    if not (_native.aligned(x, 16) and _native.aligned(weight, 16)):
        return _large_fwd(native, x, weight, expert_offsets, *rest)
    used = refuse_bad_rows(expert_offsets, x, None)
    out = F.grouped_mm(x, weight, offs=expert_offsets[1:])
    if used != x.shape[0]:
        out[used:].zero_()
    return out, _nothing(x.dtype, weight.shape[2])


def _large_fwd(
    native: ModuleType,
    x: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None,
    bias: Tensor | None,
    activation: str,
    keep_pre: bool,
    *_,
) -> tuple[Tensor, Tensor]:
    dtype, dout = x.dtype, weight.shape[2]
    refuse_bad_rows(expert_offsets, x, row_token)
    if not activation and not keep_pre and _product_dtype(dtype) is dtype:
        return _large_product(x, weight, expert_offsets, row_token, bias), _nothing(dtype, dout)
    product, bias = _with_bias(x, weight, expert_offsets, row_token, bias)
    num_rows = product.shape[0]
    pre = _place(product, dtype, num_rows, dout) if keep_pre else None
    if keep_pre or activation in GATED:
        out = x.new_empty(num_rows, dout // 2 if activation in GATED else dout)
    else:
        out = _place(product, dtype, num_rows, dout)
    native.launch(
        "grouped_gemm_fwd",
        out,
        *_product(native, x, weight, expert_offsets, row_token, product),
        native.pointer("grouped_gemm", bias, dtype, 2),
        ACTIVATIONS[activation],
        native.pointer("grouped_gemm", out, dtype, 2),
        native.pointer("grouped_gemm", pre, dtype, 2),
        num_rows,
        x.shape[0],
    )
    return out, _nothing(dtype, dout) if pre is None else pre


def bwd_weight(native: ModuleType, *args) -> tuple[Tensor, Tensor]:
    return bwd_weight_ready(native, *args)(*args)


def bwd_weight_ready(
    native: ModuleType,
    x: Tensor,
    grad: Tensor,
    expert_offsets: Tensor,
    x_token: Tensor | None,
    grad_token: Tensor | None,
    with_bias: bool,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """bwd_weight for tensors that look like these."""
    dtype, num_experts, din, dout = x.dtype, expert_offsets.shape[0] - 1, x.shape[1], grad.shape[1]
    small = _is_small(native, dtype, (num_experts, din, dout), (x if x_token is None else x_token).shape[0], GRADIENT)
    for rows in (x, grad):
        native.pointer("grouped_gemm", rows, dtype, 2)
    for indices in (x_token, grad_token, expert_offsets):
        native.pointer("grouped_gemm", indices, torch.int32, 1)
    code, x_stride, grad_stride, nothing = _native.DTYPES[dtype], x.stride(0), grad.stride(0), _nothing(dtype, dout)
    kernel, isa = native.module.grouped_gemm_bwd_weight, native.isa
    threads = _threads(native, grad.shape[0] if grad_token is None else grad_token.shape[0], (num_experts, din, dout))
    size = din if small else 0, dout, threads  # no din: column sums alone

    def run(x, grad, expert_offsets, x_token, grad_token, *_):
        if small:
            dweight = x.new_empty(num_experts, din, dout)
        else:
            dweight = _large_weight_gradient(_gathered(x, x_token), _gathered(grad, grad_token), expert_offsets)
            if not with_bias:
                return dweight, nothing
        dbias = x.new_empty(num_experts, dout) if with_bias else None
        rows = x, x_stride, x_token, grad, grad_stride, grad_token, expert_offsets
        kernel(isa, code, *rows, num_experts, dweight, dbias, *size)
        return dweight, nothing if dbias is None else dbias

    return run


def sum_rows(native: ModuleType, rows: Tensor, row_token: Tensor, num_tokens: int) -> Tensor:
    out = rows.new_empty(num_tokens, rows.shape[1])
    native.launch(
        "grouped_gemm_sum_rows",
        rows,
        _native.DTYPES[rows.dtype],
        native.pointer("grouped_gemm", rows, rows.dtype, 2),
        native.pointer("grouped_gemm", row_token, torch.int32, 1),
        native.pointer("grouped_gemm", out, rows.dtype, 2),
        rows.shape[0],
        *out.shape,
    )
    return out


def hidden_bwd(
    native: ModuleType,
    grad: Tensor,
    w_out: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor,
    row_weight: Tensor,
    pre: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dpre, drow_weight = pre.new_empty(pre.shape), row_weight.new_empty(row_weight.shape)
    weight = w_out.transpose(1, 2)
    large = _is_large(native, grad.dtype, weight.shape, weight.stride(), row_token.shape[0])
    product = _large_product(grad, weight, expert_offsets, row_token, None) if large else None
    weighted = _place(product, pre.dtype, pre.shape[0], w_out.shape[1])
    native.module.expert_mlp_bwd_hidden(
        native.isa,
        *_product(native, grad, weight, expert_offsets, row_token, product),
        native.pointer("expert_mlp", row_weight, wide(pre.dtype), 1),
        native.pointer("expert_mlp", pre, pre.dtype, 2),
        ACTIVATIONS[activation],
        native.pointer("expert_mlp", dpre, pre.dtype, 2),
        native.pointer("expert_mlp", weighted, pre.dtype, 2),
        native.pointer("expert_mlp", drow_weight, row_weight.dtype, 1),
        pre.shape[0],
        _threads(native, pre.shape[0], weight.shape),
    )
    return dpre, weighted, drow_weight


def norms(native: ModuleType, rows: Tensor, weight: Tensor, expert_offsets: Tensor, bias: Tensor | None) -> Tensor:
    out = rows.new_empty(rows.shape[0], dtype=wide(rows.dtype))
    large = _is_large(native, rows.dtype, weight.shape, weight.stride(), rows.shape[0])
    product, bias = _with_bias(rows, weight, expert_offsets, None, bias) if large else (None, bias)
    native.module.grouped_gemm_norms(
        native.isa,
        *_product(native, rows, weight, expert_offsets, None, product),
        native.pointer("expert_norms", bias, rows.dtype, 2),
        native.pointer("expert_norms", out, out.dtype, 1),
        rows.shape[0],
        _threads(native, rows.shape[0], weight.shape),
    )
    return out


def _threads(native: ModuleType, num_rows: int, size: tuple[int, ...]) -> int:
    """Threads that share products in C++ of num_rows rows with a weight of `size` (E, Din, Dout)."""
    return native.chunks(num_rows * size[1] * size[2] // AS_ELEMENT)


def _is_small(native: ModuleType, dtype: torch.dtype, size: tuple[int, ...], num_rows: int, limit: Limit) -> bool:
    """Whether products of num_rows rows with a weight of `size` (E, Din, Dout) are for C++.

    All are on AMD's processors, where torch's library, which is Intel's, takes a generic path: in the median 1.2 times
    as fast, from 2**20 to 2**30 with sides of 128 to 4096, and slower in 3 of 624 cases (0.92 to 0.96; Zen 4, float32,
    one thread). In bfloat16 too, where C++ multiplies that: 1.2
    times in the median, 0.98 to 5.8 from 16 to 1024 rows with sides of 128 to 1024.

    A quarter of the limit in float64, where the weight gradient in C++ is 0.85 times as fast at twice SMALL and 0.96 at
    half of it. Up to SMALL in all where neither experts nor rows suffice for all threads, which in C++ share no
    columns; not by weights of more than 128 x 128 where torch's library knows the processor (0.6 to 0.9 on two).
    """
    num_experts, din, dout = size
    threads, shared = torch.get_num_threads(), num_experts * din if limit is GRADIENT else num_rows
    if threads > 1 and max(num_experts, shared // LEAST) < threads:
        return num_rows * din * dout <= SMALL and (native.on_amd or din * dout <= 128 * 128)
    if dtype is torch.bfloat16 and _product_dtype(dtype) is dtype and not (native.on_amd and native.multiplies_pairs):
        most = BFLOAT16 * num_experts
    elif native.on_amd:
        return SMALL > 0
    elif num_rows < limit.fewest * num_experts and din * dout > 128 * 128:
        return False
    else:
        most = max((limit.narrow if max(din, dout) <= limit.widest else limit.wide) * num_experts, limit.least)
    return num_rows * din * dout <= most * SMALL / (4 if dtype is torch.float64 else 1)


def _is_large(
    native: ModuleType, dtype: torch.dtype, size: tuple[int, ...], strides: tuple[int, ...], num_rows: int
) -> bool:
    """Whether a product with a weight of that size and those strides is for torch's library."""
    return not _is_small(native, dtype, size, num_rows, PRODUCT if strides[2] == 1 else TRANSPOSED)


def _product(
    native: ModuleType,
    x: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None,
    product: Tensor | None,
) -> tuple[int, ...]:
    """The arguments of MOE_PRODUCT_ARGS. product: of large experts, whose rows the launch may write over once it has
    read them."""
    dtype, strides = x.dtype, weight.stride()
    by_column = strides[2] != 1 and weight.shape[2] > 1  # then the middle dimension is the contiguous one
    return (
        _native.DTYPES[dtype],
        native.pointer("grouped_gemm", x, dtype, 2),
        x.stride(0),
        native.pointer("grouped_gemm", row_token, torch.int32, 1),
        native.pointer("grouped_gemm", weight.transpose(1, 2) if by_column else weight, dtype, 3),
        *strides[:2],
        strides[2] if by_column else 1,
        0 if product is None else native.pointer("grouped_gemm", product, product.dtype, 2),
        _native.DTYPES[dtype if product is None else product.dtype],
        native.pointer("grouped_gemm", expert_offsets, torch.int32, 1),
        *weight.shape,
    )


def _place(product: Tensor | None, dtype: torch.dtype, num_rows: int, width: int) -> Tensor:
    """Where to write what has a row for every row of the product: in its place, if it has that dtype."""
    return product if product is not None and product.dtype == dtype else torch.empty(num_rows, width, dtype=dtype)


@cache
def _nothing(dtype: torch.dtype, width: int) -> Tensor:
    """(0, width), for a result that nobody asked for: always the same, as making one takes a microsecond.

    No tensor of inference mode, in whichever it is first asked for: those cannot be saved for a backward pass.
    """
    with torch.inference_mode(False):
        return torch.empty(0, width, dtype=dtype, device="cpu")


def _with_bias(
    x: Tensor, weight: Tensor, expert_offsets: Tensor, row_token: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """_large_product, and the bias that is still to be added.

    None where torch gives 16 bits: a product that is rounded before its bias is off by what cancels.
    """
    added = bias if x.itemsize == 2 and _product_dtype(x.dtype) is x.dtype else None
    return _large_product(x, weight, expert_offsets, row_token, added), bias if added is None else None


def _large_product(
    x: Tensor, weight: Tensor, expert_offsets: Tensor, row_token: Tensor | None, bias: Tensor | None
) -> Tensor:
    """(R, Dout): torch's product of every expert with its rows, and zeros."""
    rows, dtype = _gathered(x, row_token), _product_dtype(x.dtype)
    sizes = _sizes(expert_offsets, rows.shape[0])
    if bias is None and _takes_grouped_mm(rows, weight):
        out = F.grouped_mm(rows, weight, offs=expert_offsets[1:])
        if sizes[-1]:
            out[-sizes[-1] :].zero_()
        return out
    out = x.new_empty((rows.shape[0], weight.shape[2]), dtype=dtype)
    *places, unused = out.split(sizes)
    unused.zero_()
    shifts = repeat(None) if bias is None else bias.unbind()
    for place, columns, shift, part in zip(places, weight.unbind(), shifts, rows.split(sizes), strict=False):
        if shift is None:
            torch.mm(part.to(dtype), columns.to(dtype), out=place)
        else:
            torch.addmm(shift, part, columns, out=place)
    return out


def _large_weight_gradient(x: Tensor, grad: Tensor, expert_offsets: Tensor) -> Tensor:
    """(E, Din, Dout): torch's product of every expert's rows of x, transposed, and of grad."""
    if _takes_grouped_mm(x, grad):
        return F.grouped_mm(x.t(), grad, offs=expert_offsets[1:])
    dtype, sizes = _product_dtype(x.dtype), _sizes(expert_offsets, x.shape[0])
    out = x.new_empty((len(sizes) - 1, x.shape[1], grad.shape[1]))
    for rows, columns, place in zip(x.split(sizes), grad.split(sizes), out.unbind(), strict=False):
        if dtype == x.dtype:
            torch.mm(rows.t(), columns, out=place)
        else:
            place.copy_(rows.to(dtype).t() @ columns.to(dtype))
    return out


def _takes_grouped_mm(rows: Tensor, columns: Tensor) -> bool:
    """Whether torch has grouped_mm, which loops over experts without Python, and these are as it wants them.

    It pads rows of the result to 16 bytes, and whoever reads it here takes them for contiguous.
    """
    return columns.shape[-1] * columns.itemsize % 16 == 0 and all(
        _in_vectors(each.dtype, each.shape, each.stride()) and _native.aligned(each, 16) for each in (rows, columns)
    )


@lru_cache(4096)
def _in_vectors(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Not float64, not empty, and matrices of either layout whose rows begin at multiples of 16 bytes."""
    if not hasattr(F, "grouped_mm") or dtype != _product_dtype(dtype) or dtype == torch.float64 or 0 in shape:
        return False
    *batch, row, column = strides
    width = shape[-1]
    if column != 1:
        row, column, width = column, row, shape[-2]
    return column == 1 and row >= width and all(stride * dtype.itemsize % 16 == 0 for stride in (*batch, row))


@cache
def _product_dtype(dtype: torch.dtype) -> torch.dtype:
    """What torch multiplies `dtype` in: float16 is a hundred times slower than float32, bfloat16 four times where the
    CPU has no instruction for it."""
    slow = dtype == torch.float16 or (dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported())
    return torch.float32 if slow else dtype


def _sizes(expert_offsets: Tensor, num_rows: int) -> list[int]:
    """Rows of every expert, and those that are nobody's."""
    bounds = [*expert_offsets.tolist(), num_rows]
    return [last - first for first, last in pairwise(bounds)]


def _gathered(x: Tensor, token: Tensor | None) -> Tensor:
    """The rows of x, or the tokens that stand there, zeros for -1.

    All at once: a call of torch for every expert would cost a tenth of the product of 32 rows of 256.
    """
    if token is None:
        return x
    if token.numel() == 0 or token.min() >= 0:
        return x.index_select(0, token)
    return x.index_select(0, token.clamp(min=0)).masked_fill_((token < 0)[:, None], 0)
