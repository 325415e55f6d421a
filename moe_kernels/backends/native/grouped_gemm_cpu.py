"""The grouped GEMM on CPU tensors: small experts in csrc/cpu/grouped_gemm.cpp, large ones by torch's matrix library.

A call of that library costs as much as a million multiplications, and its threads share one product; a small expert is
done by then, and threads do better with an expert each. The loop over large ones is torch's own grouped_mm where that
takes them. Either way bias, activation and what follows them are fused in C++. Offsets are at hand on the CPU, so
reading them is no wait.
"""

from __future__ import annotations

from itertools import pairwise, repeat
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.backends import _native
from moe_kernels.backends.native.activation import ACTIVATIONS
from moe_kernels.library import GATED, wide
from moe_kernels.library.grouped_gemm import refuse_bad_rows

# Of csrc/cpu/grouped_gemm.cpp: rows that share a packed weight, columns of a panel at most, and the weight gradient's
# rows at a time and rows of a block.
SPAN, PANEL, DEPTH, BLOCK = 192, 32, 256, 132

# Multiplications of an expert with its rows, on average, up to which the weight gradient is as fast in C++ as by torch:
# 0.98 to 1.05 times there, 0.9 to 1.0 at twice as many (one thread, AVX-512, float32). A product stands so at twice as
# many, 1.07 to 1.1 and 0.95, and one by a transposed weight, which torch's library packs slowly, at four times, 1.01 to
# 1.12. With more threads sharing one product costs more: on two, C++ is 1.05 to 1.28 times as fast at 2**25.
SMALL, PRODUCT, TRANSPOSED = 2**23, 2, 4


def fwd(
    native: ModuleType,
    x: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None,
    bias: Tensor | None,
    activation: str,
    keep_pre: bool,
) -> tuple[Tensor, Tensor]:
    num_rows, dout = (x if row_token is None else row_token).shape[0], weight.shape[2]
    large = _is_large(x, weight, num_rows)
    if large:
        refuse_bad_rows(expert_offsets, x, row_token)
        if not activation and not keep_pre and _product_dtype(x) == x.dtype:
            return _large_product(x, weight, expert_offsets, row_token, bias), x.new_empty(0, dout)
    out = torch.empty(num_rows, dout // 2 if activation in GATED else dout, dtype=x.dtype)
    args, product, _held = _product(native, out, x, weight, expert_offsets, row_token, large)
    pre = _place(product, x.dtype, (num_rows, dout)) if keep_pre else x.new_empty(0, dout)
    refused = native.launch(
        "grouped_gemm_fwd",
        out,
        *args,
        0 if bias is None else native.pointer("grouped_gemm", bias, x.dtype, 2),
        ACTIVATIONS[activation],
        native.pointer("grouped_gemm", out, x.dtype, 2),
        native.pointer("grouped_gemm", pre, x.dtype, 2) if keep_pre else 0,
        num_rows,
        x.shape[0],
    )
    if refused:
        refuse_bad_rows(expert_offsets, x, row_token)
    return out, pre


def bwd_weight(
    native: ModuleType,
    x: Tensor,
    grad: Tensor,
    expert_offsets: Tensor,
    x_token: Tensor | None,
    grad_token: Tensor | None,
    with_bias: bool,
) -> tuple[Tensor, Tensor]:
    num_experts, din, dout = expert_offsets.shape[0] - 1, x.shape[1], grad.shape[1]
    dbias = x.new_empty((num_experts if with_bias else 0, dout))
    if _is_small(x, (num_experts, din, dout), (x if x_token is None else x_token).shape[0]):
        dweight = x.new_empty((num_experts, din, dout))
    else:
        dweight = _large_weight_gradient(_gathered(x, x_token), _gathered(grad, grad_token), expert_offsets)
        if not with_bias:
            return dweight, dbias
        din = 0  # column sums alone are left
    scratch = _scratch(native, grad, BLOCK * dout + DEPTH * (BLOCK + PANEL))
    native.launch(
        "grouped_gemm_bwd_weight",
        grad,
        _native.DTYPES[x.dtype],
        native.pointer("grouped_gemm", x, x.dtype, 2),
        x.stride(0),
        native.pointer("grouped_gemm", x_token, torch.int32, 1),
        native.pointer("grouped_gemm", grad, x.dtype, 2),
        grad.stride(0),
        native.pointer("grouped_gemm", grad_token, torch.int32, 1),
        native.pointer("grouped_gemm", expert_offsets, torch.int32, 1),
        num_experts,
        native.pointer("grouped_gemm", dweight, x.dtype, 3),
        native.pointer("grouped_gemm", dbias if with_bias else None, x.dtype, 2),
        native.pointer("grouped_gemm", scratch, scratch.dtype, 2),
        scratch.shape[1],
        din,
        dout,
    )
    return dweight, dbias


def sum_rows(native: ModuleType, rows: Tensor, row_token: Tensor, num_tokens: int) -> Tensor:
    dim, chunks, size = rows.shape[1], native.chunks(rows), -(-num_tokens // 64) * 64
    out = torch.empty(num_tokens, dim, dtype=rows.dtype)
    if wide(rows.dtype) != rows.dtype:
        columns = -(-dim // chunks)
        size += num_tokens * 64 * -(-columns // 16)  # a thread's columns, in float32
    scratch = torch.empty(chunks, size, dtype=torch.uint8)
    native.launch(
        "grouped_gemm_sum_rows",
        rows,
        _native.DTYPES[rows.dtype],
        native.pointer("grouped_gemm", rows, rows.dtype, 2),
        native.pointer("grouped_gemm", row_token, torch.int32, 1),
        native.pointer("grouped_gemm", out, rows.dtype, 2),
        native.pointer("grouped_gemm", scratch, torch.uint8, 2),
        size,
        rows.shape[0],
        num_tokens,
        dim,
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
    large = _is_large(grad, weight, row_token.shape[0])
    args, product, _held = _product(native, pre, grad, weight, expert_offsets, row_token, large)
    weighted = _place(product, pre.dtype, (pre.shape[0], w_out.shape[1]))
    native.launch(
        "expert_mlp_bwd_hidden",
        pre,
        *args,
        native.pointer("expert_mlp", row_weight, wide(pre.dtype), 1),
        native.pointer("expert_mlp", pre, pre.dtype, 2),
        ACTIVATIONS[activation],
        native.pointer("expert_mlp", dpre, pre.dtype, 2),
        native.pointer("expert_mlp", weighted, pre.dtype, 2),
        native.pointer("expert_mlp", drow_weight, row_weight.dtype, 1),
        pre.shape[0],
    )
    return dpre, weighted, drow_weight


def norms(native: ModuleType, rows: Tensor, weight: Tensor, expert_offsets: Tensor, bias: Tensor | None) -> Tensor:
    out = rows.new_empty(rows.shape[0], dtype=wide(rows.dtype))
    large = _is_large(rows, weight, rows.shape[0])
    args, *_held = _product(native, rows, rows, weight, expert_offsets, None, large)
    native.launch(
        "grouped_gemm_norms",
        rows,
        *args,
        native.pointer("expert_norms", bias, rows.dtype, 2),
        native.pointer("expert_norms", out, out.dtype, 1),
        rows.shape[0],
    )
    return out


def _is_small(x: Tensor, size: tuple[int, ...], num_rows: int, times: int = 1) -> bool:
    """Whether products of num_rows rows like x with a weight of `size` (E, Din, Dout) are for C++.

    Up to `times` SMALL; a quarter of it in float64, where the weight gradient in C++ is 0.85 times as fast at twice
    SMALL and 0.96 at half of it; an eighth in bfloat16 where the CPU multiplies that itself, which was not measured.
    """
    num_experts, din, dout = size
    small = SMALL
    if x.dtype == torch.float64:
        small //= 4
    elif x.dtype == torch.bfloat16 == _product_dtype(x):
        small //= 8
    return num_rows * din * dout <= times * small * num_experts * min(num_experts, torch.get_num_threads())


def _is_large(x: Tensor, weight: Tensor, num_rows: int) -> bool:
    return not _is_small(x, weight.shape, num_rows, PRODUCT if weight.stride(2) == 1 else TRANSPOSED)


def _product(
    native: ModuleType,
    work: Tensor,
    x: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None,
    large: bool,
) -> tuple[tuple[int, ...], Tensor | None, Tensor]:
    """The arguments of MOE_PRODUCT_ARGS, for a launch on `work`, and what is to be held until then: the product of
    large experts, made here, whose rows a launch may write over once it has read them, and scratch memory."""
    dtype, (num_experts, din, dout), strides = x.dtype, weight.shape, weight.stride()
    product, size, product_args = None, SPAN * (din + dout) + PANEL * din, (0, _native.DTYPES[dtype])
    if large:
        product, size = _large_product(x, weight, expert_offsets, row_token, None), dout
        product_args = native.pointer("grouped_gemm", product, product.dtype, 2), _native.DTYPES[product.dtype]
    scratch = _scratch(native, work, size)
    by_column = strides[2] != 1 and dout > 1  # then the middle dimension is the contiguous one
    args = (
        _native.DTYPES[dtype],
        native.pointer("grouped_gemm", x, dtype, 2),
        x.stride(0),
        0 if row_token is None else native.pointer("grouped_gemm", row_token, torch.int32, 1),
        native.pointer("grouped_gemm", weight.transpose(1, 2) if by_column else weight, dtype, 3),
        *strides[:2],
        strides[2] if by_column else 1,
        *product_args,
        native.pointer("grouped_gemm", expert_offsets, torch.int32, 1),
        num_experts,
        din,
        dout,
        native.pointer("grouped_gemm", scratch, scratch.dtype, 2),
        scratch.shape[1],
    )
    return args, product, scratch


def _place(product: Tensor | None, dtype: torch.dtype, size: tuple[int, int]) -> Tensor:
    """Where to write what has a row for every row of the product: in its place, if it has that dtype."""
    return product if product is not None and product.dtype == dtype else torch.empty(size, dtype=dtype)


def _large_product(
    x: Tensor, weight: Tensor, expert_offsets: Tensor, row_token: Tensor | None, bias: Tensor | None
) -> Tensor:
    """(R, Dout): torch's product of every expert with its rows, and zeros."""
    rows, dtype = _gathered(x, row_token), _product_dtype(x)
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
    dtype, sizes = _product_dtype(x), _sizes(expert_offsets, x.shape[0])
    out = x.new_empty((len(sizes) - 1, x.shape[1], grad.shape[1]))
    for rows, columns, place in zip(x.split(sizes), grad.split(sizes), out.unbind(), strict=False):
        if dtype == x.dtype:
            torch.mm(rows.t(), columns, out=place)
        else:
            place.copy_(rows.to(dtype).t() @ columns.to(dtype))
    return out


def _takes_grouped_mm(*operands: Tensor) -> bool:
    """Whether torch has grouped_mm, which loops over experts without Python, and these are as it wants them: not
    float64, and matrices of either layout whose rows begin at multiples of 16 bytes."""
    dtype = operands[0].dtype
    return (
        hasattr(F, "grouped_mm")
        and dtype == _product_dtype(operands[0]) != torch.float64
        and all(
            each.numel() > 0
            and matrix.stride(-1) == 1
            and matrix.stride(-2) >= matrix.shape[-1]
            and all(stride * each.element_size() % 16 == 0 for stride in matrix.stride()[:-1])
            and _native.aligned(each, 16)
            for each in operands
            for matrix in [each if each.stride(-1) == 1 else each.transpose(-1, -2)]
        )
    )


def _product_dtype(x: Tensor) -> torch.dtype:
    """What torch multiplies x in: float16 is a hundred times slower than float32, bfloat16 four times where the CPU has
    no instruction for it."""
    slow = x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported())
    return torch.float32 if slow else x.dtype


def _scratch(native: ModuleType, work: Tensor, size: int) -> Tensor:
    """Memory for each thread of a launch on `work`, in whole vectors."""
    return torch.empty(native.chunks(work), -(-size // 16) * 16, dtype=wide(work.dtype))


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
