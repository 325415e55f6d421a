"""The grouped GEMM on CPU tensors: small experts in csrc/cpu/grouped_gemm.cpp, large ones by torch's matrix library.

A call of that library costs as much as a million multiplications, and its threads share one product; a small expert is
done by then, and threads do better with an expert each. Either way bias, activation and what follows them are fused in
C++. Offsets are at hand on the CPU, so reading them is no wait.
"""

from __future__ import annotations

from itertools import pairwise, repeat
from types import ModuleType

import torch
from torch import Tensor

from moe_kernels.backends import _native
from moe_kernels.library import GATED, wide

ACTIVATIONS = {name: code for code, name in enumerate(("", "relu", "gelu", "silu", "tanh", *GATED))}

# Of csrc/cpu/grouped_gemm.cpp: rows that share a packed weight, columns of a panel at most, and the weight gradient's
# rows at a time and rows of a block.
SPAN, PANEL, DEPTH, BLOCK = 192, 32, 256, 132

# Multiplications of an expert with its rows, on average, up to which C++ is faster on one thread. Sharing one product
# costs more the more threads there are.
SMALL = 2**20


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
    out = x.new_empty((num_rows, dout // 2 if activation in GATED else dout))
    pre = x.new_empty((num_rows if keep_pre else 0, dout))
    if not activation and not _is_small(weight, num_rows) and _product_dtype(x) == x.dtype:
        return _large_product(x, weight, expert_offsets, row_token, bias, out), pre
    place = pre if keep_pre else None if activation else out
    args, _held = _product(native, out, x, weight, expert_offsets, row_token, place)
    native.launch(
        "grouped_gemm_fwd",
        out,
        *args,
        native.pointer("grouped_gemm", bias, x.dtype, 2),
        ACTIVATIONS[activation],
        native.pointer("grouped_gemm", out, x.dtype, 2),
        native.pointer("grouped_gemm", pre if keep_pre else None, x.dtype, 2),
        num_rows,
    )
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
    dweight = x.new_empty((num_experts, din, dout))
    dbias = x.new_empty((num_experts if with_bias else 0, dout))
    num_rows = (x if x_token is None else x_token).shape[0]
    if not _is_small(dweight, num_rows):
        dtype = _product_dtype(x)
        sizes = _sizes(expert_offsets, num_rows)
        for rows, columns, place in zip(
            _split(x, x_token, sizes), _split(grad, grad_token, sizes), dweight.unbind(), strict=False
        ):
            if dtype == x.dtype:
                torch.mm(rows.t(), columns, out=place)
            else:
                place.copy_(rows.to(dtype).t() @ columns.to(dtype))
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


def activation_bwd(native: ModuleType, grad: Tensor, pre: Tensor, activation: str) -> Tensor:
    dpre = pre.new_empty(pre.shape)
    native.launch(
        "activation_bwd",
        pre,
        _native.DTYPES[pre.dtype],
        native.pointer("grouped_gemm", grad, pre.dtype, 2),
        grad.stride(0),
        native.pointer("grouped_gemm", pre, pre.dtype, 2),
        ACTIVATIONS[activation],
        native.pointer("grouped_gemm", dpre, pre.dtype, 2),
        *grad.shape,
    )
    return dpre


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
    dpre, weighted = pre.new_empty(pre.shape), pre.new_empty((pre.shape[0], w_out.shape[1]))
    drow_weight = row_weight.new_empty(row_weight.shape)
    args, _held = _product(native, pre, grad, w_out.transpose(1, 2), expert_offsets, row_token, weighted)
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
    args, _held = _product(native, rows, rows, weight, expert_offsets, None, None)
    native.launch(
        "grouped_gemm_norms",
        rows,
        *args,
        native.pointer("expert_norms", bias, rows.dtype, 2),
        native.pointer("expert_norms", out, out.dtype, 1),
        rows.shape[0],
    )
    return out


def _is_small(weight: Tensor, num_rows: int) -> bool:
    """Whether the products of num_rows rows with weight (E, Din, Dout) are for csrc/cpu/grouped_gemm.cpp."""
    num_experts, din, dout = weight.shape
    return num_rows * din * dout <= SMALL * num_experts * min(num_experts, torch.get_num_threads())


def _product(
    native: ModuleType,
    work: Tensor,
    x: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None,
    place: Tensor | None,
) -> tuple[tuple[int, ...], tuple[Tensor | None, Tensor]]:
    """The arguments of MOE_PRODUCT_ARGS, for a launch on `work`, and the tensors made for it, to be held until then.

    A product of large experts is made here, in `place` where that has its dtype.
    """
    num_rows, (num_experts, din, dout) = (x if row_token is None else row_token).shape[0], weight.shape
    product = None
    if _is_small(weight, num_rows):
        scratch = _scratch(native, work, SPAN * (din + dout) + PANEL * din)
    else:
        if place is None or place.dtype != _product_dtype(x):
            place = x.new_empty((num_rows, dout), dtype=_product_dtype(x))
        product = _large_product(x, weight, expert_offsets, row_token, None, place)
        scratch = _scratch(native, work, dout)
    by_column = weight.stride(2) != 1 and dout > 1  # then the middle dimension is the contiguous one
    args = (
        _native.DTYPES[x.dtype],
        native.pointer("grouped_gemm", x, x.dtype, 2),
        x.stride(0),
        native.pointer("grouped_gemm", row_token, torch.int32, 1),
        native.pointer("grouped_gemm", weight.transpose(1, 2) if by_column else weight, x.dtype, 3),
        weight.stride(0),
        weight.stride(1),
        weight.stride(2) if by_column else 1,
        native.pointer("grouped_gemm", product, x.dtype if product is None else product.dtype, 2),
        _native.DTYPES[x.dtype if product is None else product.dtype],
        native.pointer("grouped_gemm", expert_offsets, torch.int32, 1),
        num_experts,
        din,
        dout,
        native.pointer("grouped_gemm", scratch, scratch.dtype, 2),
        scratch.shape[1],
    )
    return args, (product, scratch)


def _large_product(
    x: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
) -> Tensor:
    """out (R, Dout): torch's product of every expert with its rows, and zeros."""
    sizes = _sizes(expert_offsets, out.shape[0])
    *places, unused = out.split(sizes)
    unused.zero_()
    shifts = repeat(None) if bias is None else bias.unbind()
    for place, columns, shift, rows in zip(places, weight.unbind(), shifts, _split(x, row_token, sizes), strict=False):
        if rows.dtype != out.dtype:
            rows, columns = rows.to(out.dtype), columns.to(out.dtype)
        if shift is None:
            torch.mm(rows, columns, out=place)
        else:
            torch.addmm(shift, rows, columns, out=place)
    return out


def _product_dtype(x: Tensor) -> torch.dtype:
    """What torch multiplies x in: float16 is a hundred times slower than float32, bfloat16 four times where the CPU has
    no instruction for it."""
    native_bfloat16 = torch.cpu._is_avx512_bf16_supported()
    return x.dtype if x.dtype != torch.float16 and (x.dtype != torch.bfloat16 or native_bfloat16) else torch.float32


def _scratch(native: ModuleType, work: Tensor, size: int) -> Tensor:
    """Memory for each thread of a launch on `work`, in whole vectors."""
    return work.new_empty((native.chunks(work), -(-size // 16) * 16), dtype=wide(work.dtype))


def _sizes(expert_offsets: Tensor, num_rows: int) -> list[int]:
    """Rows of every expert, and those that are nobody's."""
    bounds = [*expert_offsets.tolist(), num_rows]
    return [last - first for first, last in pairwise(bounds)]


def _split(x: Tensor, token: Tensor | None, sizes: list[int]) -> tuple[Tensor, ...]:
    """The rows of every expert: of x, or the tokens that stand there, zeros for -1.

    Gathered all at once: a call of torch for every expert would cost a tenth of the product of 32 rows of 256.
    """
    if token is None:
        return x.split(sizes)
    if token.numel() == 0 or token.min() >= 0:
        return x.index_select(0, token).split(sizes)
    return x.index_select(0, token.clamp(min=0)).masked_fill_((token < 0)[:, None], 0).split(sizes)
