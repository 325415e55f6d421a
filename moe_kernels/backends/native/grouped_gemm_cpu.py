"""The grouped GEMM on CPU tensors, the expert MLP and the expert norms.

C++ multiplies if in_cpp returns True, else torch does. In both cases C++ applies the activation and adds the bias, but
torch adds it to bfloat16 products that torch computes with AMX, the matrix unit of some processors.
"""

from __future__ import annotations

from itertools import pairwise, repeat
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_kernels.backends.native.activation import ACTIVATIONS
from moe_kernels.sizes import GATED, compute_dtype, is_fixed, refuse_bad_groups, refuse_bad_plan, refuse_outside

# C++ always multiplies if the experts have up to SMALL multiply-adds on average.
SMALL = 2**21
# Fewest rows per thread for which C++ multiplies larger experts, if there are fewer experts than threads.
LEAST = 24
AT_ONCE = 2**20  # most bytes of hidden units and output rows for which the expert MLP is one C++ call


def in_cpp(dtype: torch.dtype, size: tuple[int, ...], num_rows: int) -> bool:
    """Whether C++ multiplies num_rows rows by a weight of `size` (E, Din, Dout).

    C++ multiplies experts of up to SMALL multiply-adds on average. It multiplies larger ones if there are at
    least as many experts, or portions of LEAST rows, as threads, but not in bfloat16 with AMX, which only torch uses.
    In the mode batch_invariant it multiplies all.
    """
    if is_fixed():
        return True
    num_experts, din, dout = size
    enough = max(num_experts, num_rows // LEAST) >= torch.get_num_threads()
    return num_rows * din * dout <= SMALL * max(num_experts, 1) or (enough and not _in_tiles(dtype))


def grouped_gemm_fwd(
    native, x, weight, expert_offsets, row_token, bias, activation, keep_pre, training=False
) -> tuple[Tensor, Tensor]:
    dtype, dout = x.dtype, weight.shape[2]
    num_rows = (x if row_token is None else row_token).shape[0]
    by_torch = None
    if not in_cpp(dtype, weight.shape, num_rows):
        refuse_bad_groups(expert_offsets, x, row_token)
        by_torch, bias = _with_bias(x, weight, expert_offsets, row_token, bias)
    pre = _reuse_or_allocate(by_torch, dtype, num_rows, dout) if keep_pre else None
    width = dout // 2 if activation in GATED else dout
    out = _reuse_or_allocate(None if keep_pre or width != dout else by_torch, dtype, num_rows, width)
    out_of_range = native.call(
        "grouped_gemm_fwd", _work(num_rows, weight.shape),
        *_operands(x, weight, expert_offsets, row_token, by_torch), (bias, dtype), ACTIVATIONS[activation],
        (out, dtype), (pre, dtype), num_rows, x.shape[0],
    )  # fmt: skip
    if out_of_range:
        refuse_bad_groups(expert_offsets, x, row_token)
    return out, x.new_empty(0, dout) if pre is None else pre


def grouped_gemm_bwd_weight(
    native, x, grad, expert_offsets, x_token, grad_token, with_bias, row_weight=None
) -> tuple[Tensor, Tensor]:
    size = expert_offsets.shape[0] - 1, x.shape[1], grad.shape[1]
    dtype, (num_experts, din, dout) = x.dtype, size
    num_rows = (x if x_token is None else x_token).shape[0]
    small = in_cpp(dtype, size, num_rows)
    if not small:
        refuse_bad_groups(expert_offsets, x, x_token)
        refuse_bad_groups(expert_offsets, grad, grad_token)
    if small:
        dweight = x.new_empty(size)
    else:
        dweight = _large_weight_gradient(_gathered(x, x_token), _gathered(grad, grad_token), expert_offsets)
    dbias = x.new_empty(num_experts if with_bias else 0, dout)
    if small or with_bias:
        out_of_range = native.call(
            "grouped_gemm_bwd_weight", _work(num_rows, size), dtype, (x, dtype), x.stride(0),
            (x_token, torch.int32), x.shape[0], (grad, dtype), grad.stride(0), (grad_token, torch.int32),
            grad.shape[0], (expert_offsets, torch.int32), num_experts, (row_weight, compute_dtype(dtype)),
            (dweight, dtype), (dbias if with_bias else None, dtype), din if small else 0, dout,
            num_rows,  # din 0: only dbias
        )  # fmt: skip
        if out_of_range:
            refuse_bad_groups(expert_offsets, x, x_token)
            refuse_bad_groups(expert_offsets, grad, grad_token)
    return dweight, dbias


def grouped_gemm_sum_rows(native: ModuleType, rows: Tensor, row_token: Tensor, num_tokens: int) -> Tensor:
    out = rows.new_empty(num_tokens, rows.shape[1])
    out_of_range = native.call(
        "grouped_gemm_sum_rows", rows, rows.dtype, (rows, rows.dtype), (row_token, torch.int32),
        (out, rows.dtype), rows.shape[0], *out.shape,
    )  # fmt: skip
    if out_of_range:
        refuse_outside("grouped_gemm: row_token", row_token, -1, num_tokens, "zeros")
    return out


def expert_mlp_bwd_hidden(
    native, grad, w_out, expert_offsets, row_token, row_weight, pre, activation, b_out=None
) -> tuple[Tensor, Tensor, Tensor]:
    dpre, drow_weight = pre.new_empty(pre.shape), row_weight.new_empty(row_weight.shape)
    weight = w_out.transpose(1, 2)
    large = not in_cpp(grad.dtype, weight.shape, pre.shape[0])
    if large:
        refuse_bad_groups(expert_offsets, grad, row_token)
    by_torch = _multiply_in_torch(grad, weight, expert_offsets, row_token, None) if large else None
    weighted = _reuse_or_allocate(by_torch, pre.dtype, pre.shape[0], w_out.shape[1])
    out_of_range = native.call(
        "expert_mlp_bwd_hidden", _work(pre.shape[0], weight.shape),
        *_operands(grad, weight, expert_offsets, row_token, by_torch), (row_weight, compute_dtype(pre.dtype)),
        (b_out, pre.dtype), (pre, pre.dtype), ACTIVATIONS[activation], (dpre, pre.dtype),
        (weighted, pre.dtype), (drow_weight, row_weight.dtype), pre.shape[0],
        grad.shape[0],
    )  # fmt: skip
    if out_of_range:
        refuse_bad_groups(expert_offsets, grad, row_token)
    return dpre, weighted, drow_weight


def expert_mlp_fwd(
    native, x, weights, w_in, w_out, b_in, b_out, activation, plan, experts, keep_pre
) -> tuple[Tensor, Tensor] | None:
    """y and pre of the expert MLP from one C++ call. None if AT_ONCE or in_cpp forbids it, or an index is out of range.

    plan: expert_offsets, row_token, slot_row. If None, C++ makes the plan from experts (T, K), in which -1 and ids from
    E on are no choices.
    """
    dtype, (num_experts, din, width), (_, hidden, dout) = x.dtype, w_in.shape, w_out.shape
    num_tokens, k = (plan[2] if experts is None else experts).shape
    num_rows = plan[1].shape[0] if experts is None else num_tokens * k
    if num_rows * (hidden + dout) * x.itemsize > AT_ONCE:
        return None
    if not all(in_cpp(dtype, each.shape, num_rows) for each in (w_in, w_out)):
        return None
    scratch = None
    if experts is not None:
        scratch = experts.new_empty(4 * num_rows + (k + 3) * num_experts + 2, dtype=torch.int32)
    pre = x.new_empty(num_rows if keep_pre else 0, width)
    activated, rows, y = x.new_empty(num_rows, hidden), x.new_empty(num_rows, dout), x.new_empty(num_tokens, dout)
    out_of_range = native.call(
        "expert_mlp_fwd", _work(num_rows, w_in.shape), dtype, (x, dtype), x.stride(0),
        (weights, compute_dtype(dtype)), *_weight(w_in), (b_in, dtype), *_weight(w_out),
        (b_out, dtype), ACTIVATIONS[activation], *((each, torch.int32) for each in plan or ()),
        *([] if plan else [0, 0, 0]), *((0, 0) if experts is None else (experts.itemsize, (experts, experts.dtype))),
        (scratch, torch.int32),
        (pre if keep_pre else None, dtype), (activated, dtype), (rows, dtype), (y, dtype), num_tokens, k,
        num_rows, num_experts, din, width, hidden, dout, not is_fixed(),
    )  # fmt: skip
    return None if out_of_range else (y, pre)


def grouped_gemm_norms(
    native: ModuleType,
    rows: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    bias: Tensor | None,
    kept: Tensor | None = None,
) -> Tensor:
    """(R,): the sums of squares of the results, in float32 (float64 stays). kept: (R, Dout) to write the results to."""
    out = rows.new_empty(rows.shape[0], dtype=compute_dtype(rows.dtype))
    large = not in_cpp(rows.dtype, weight.shape, rows.shape[0])
    if large:
        refuse_bad_groups(expert_offsets, rows, None)
    by_torch, bias = _with_bias(rows, weight, expert_offsets, None, bias) if large else (None, bias)
    out_of_range = native.call(
        "grouped_gemm_norms", _work(rows.shape[0], weight.shape),
        *_operands(rows, weight, expert_offsets, None, by_torch), (bias, rows.dtype), (out, out.dtype),
        (kept, rows.dtype), rows.shape[0],
    )  # fmt: skip
    if out_of_range:
        refuse_bad_groups(expert_offsets, rows, None)
    return out


def refuse_disagreement(native, op, expert_offsets, row_token, row_choice, slot_row) -> None:
    """As sizes.refuse_bad_plan."""
    if native.call(
        "check_plan", slot_row, *((each, torch.int32) for each in (expert_offsets, row_token, row_choice, slot_row)),
        *slot_row.shape, row_token.shape[0], expert_offsets.shape[0] - 1,
    ):  # fmt: skip
        refuse_bad_plan(op, expert_offsets, row_token, row_choice, slot_row)


def _work(num_rows: int, size: tuple[int, ...]) -> int:
    """`work` of native.call for num_rows rows times a weight of `size`: 64 multiply-adds count as one element."""
    return num_rows * size[1] * size[2] // 64


def _operands(x, weight, expert_offsets, row_token, by_torch) -> tuple[Any, ...]:
    """MOE_GROUPED_GEMM_ARGS of csrc/cpu/ops.h. by_torch: torch's products, which C++ may overwrite, or None."""
    dtype, torch_dtype = x.dtype, x.dtype if by_torch is None else by_torch.dtype
    return (
        dtype,
        (x, dtype),
        x.stride(0),
        (row_token, torch.int32),
        *_weight(weight),
        (by_torch, torch_dtype),
        torch_dtype,
        (expert_offsets, torch.int32),
        *weight.shape,
        not is_fixed(),
    )


def _weight(weight: Tensor) -> tuple[Any, ...]:
    """Arguments of native.call for a weight (E, Din, Dout), whose last or middle dimension is contiguous: tensor,
    dtype, and the strides along E, Din and Dout."""
    strides = weight.stride()
    by_column = strides[2] != 1 and weight.shape[2] > 1
    array = weight.transpose(1, 2) if by_column else weight, weight.dtype
    return array, *strides[:2], strides[2] if by_column else 1


def _reuse_or_allocate(by_torch: Tensor | None, dtype: torch.dtype, num_rows: int, width: int) -> Tensor:
    if by_torch is not None and by_torch.dtype == dtype:
        return by_torch
    return torch.empty(num_rows, width, dtype=dtype, device="cpu")


def _with_bias(x, weight, expert_offsets, row_token, bias) -> tuple[Tensor, Tensor | None]:
    """(torch's products, the bias that C++ must still add or None). Products computed with AMX are rounded to bfloat16,
    so torch adds the bias before that: added later, it could cancel most of a product and leave the rounding error."""
    added = bias if _in_tiles(x.dtype) else None
    return _multiply_in_torch(x, weight, expert_offsets, row_token, added), bias if added is None else None


def _multiply_in_torch(x, weight, expert_offsets, row_token, bias) -> Tensor:
    """(R, Dout): the rows of each expert times its weight, plus its bias if given, by torch; zeros in unused rows."""
    rows, dtype = _gathered(x, row_token), _torch_dtype(x.dtype)
    out = x.new_empty((rows.shape[0], weight.shape[2]), dtype=dtype)
    sizes = _sizes(expert_offsets, rows.shape[0])
    *results, unused = out.split(sizes)
    unused.zero_()
    biases = repeat(None) if bias is None else bias.unbind()
    for out_e, w_e, bias_e, x_e in zip(results, weight.unbind(), biases, rows.split(sizes), strict=False):
        if bias_e is None:
            torch.mm(x_e.to(dtype), w_e.to(dtype), out=out_e)
        else:
            torch.addmm(bias_e, x_e, w_e, out=out_e)
    return out


def _large_weight_gradient(x: Tensor, grad: Tensor, expert_offsets: Tensor) -> Tensor:
    """(E, Din, Dout): x^T grad over the rows of each expert, by torch."""
    dtype, sizes = _torch_dtype(x.dtype), _sizes(expert_offsets, x.shape[0])
    out = x.new_empty((len(sizes) - 1, x.shape[1], grad.shape[1]))
    with torch.autocast("cpu", enabled=False):  # a backward pass within autocast would round the operands
        for x_e, grad_e, out_e in zip(x.split(sizes), grad.split(sizes), out.unbind(), strict=False):
            out_e.copy_(x_e.to(dtype).t() @ grad_e.to(dtype))
    return out


def _in_tiles(dtype: torch.dtype) -> bool:
    """Whether torch multiplies this dtype with AMX: bfloat16 on a processor that has it."""
    return dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported()


def _torch_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch multiplies. Without AMX its products in 16 bits would be slow."""
    return torch.float32 if dtype.itemsize == 2 and not _in_tiles(dtype) else dtype


def _sizes(expert_offsets: Tensor, num_rows: int) -> list[int]:
    """Number of rows per expert; the last entry counts unused rows."""
    bounds = [*expert_offsets.tolist(), num_rows]
    return [last - first for first, last in pairwise(bounds)]


def _gathered(x: Tensor, token: Tensor | None) -> Tensor:
    """x, or x[token] with zeros where token is -1."""
    if token is None:
        return x
    if token.numel() == 0 or token.min() >= 0:
        return x.index_select(0, token)
    return x.index_select(0, token.clamp(min=0)).masked_fill_((token < 0)[:, None], 0)
