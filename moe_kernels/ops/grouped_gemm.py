"""The grouped GEMM: rows grouped by expert, each times the weight of its expert, then bias and activation.

    pre_r = x_r W_e + b_e,   out_r = act(pre_r)        for rows r of expert e;   0 for rows from expert_offsets_E on
    dpre  = act'(pre) grad,   dx_r = dpre_r W_e^T
    dW_e  = sum over rows r of e of x_r^T dpre_r,   db_e = sum over rows r of e of dpre_r

x is (R, Din), or (T, Din) gathered through row_token. Saved for backward: the arguments and, with an activation, pre.
The host does not wait for offsets on a GPU if a kernel runs and MOE_KERNELS_CHECK is not set.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import python_ref.grouped_gemm as reference
from moe_kernels import backends
from moe_kernels.backends import mark
from moe_kernels.ops import _checks
from moe_kernels.ops._autocast import without_autocast
from moe_kernels.ops._checks import FLOATING, INDEX, check_fits, check_number, check_positive, check_rank, check_tensor
from moe_kernels.ops._define import define, define_check, gradient_like, no_second_derivative, operators
from moe_kernels.ops._swiglu_clamped import swiglu_clamped
from moe_kernels.sizes import (
    CLAMPED,
    GATED,
    all_rows,
    contiguous,
    contiguous_matrices,
    contiguous_rows,
    refuse_bad_groups,
)

ACTIVATIONS = ("relu", "gelu", "silu", "tanh", *GATED, CLAMPED)
HALVING = (*GATED, CLAMPED)  # activations that return half the columns that they read
IN_KERNELS = ("", "relu", "gelu", "silu", "tanh", *GATED)


def check_activation(op: str, activation: object, width: int, alpha: float = 1.0, limit: float = 1.0) -> None:
    """Raises for an unknown activation, an odd `width` that it halves, alpha not finite, or limit not in (0, inf)."""
    if activation is not None and activation not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"{op}: activation must be None or one of {known}; got {activation!r}")
    check_number(op, "alpha", alpha)
    check_positive(op, "limit", limit)
    if activation in HALVING and width % 2:
        raise ValueError(f"{op}: {activation} needs an even number of columns; got {width}")


def _index(name: str, index: Tensor, shape: str, size: int | None, rows: Tensor) -> Tensor:
    """`index`, which must be (size,), or (any,) if size is None, on the device of rows, as int32.

    An int64 value outside int32 is clamped and stays out of range. A plain cast would wrap it, perhaps to a valid row.
    """
    check_tensor("grouped_gemm", name, index, INDEX)
    if index.dim() != 1 or (size is not None and index.shape[0] != size) or index.device != rows.device:
        expected = f"{shape} on {rows.device}" if size is None else f"{shape} = ({size},) on {rows.device}"
        raise ValueError(f"grouped_gemm: {name} must be {expected}; got {tuple(index.shape)} on {index.device}")
    if index.dtype == torch.int64:
        index = index.clamp(-(2**31), 2**31 - 1)
    return index.to(torch.int32)


def _check_groups(op: str, expert_offsets: Tensor, rows: Tensor, row_token: Tensor | None) -> None:
    _checks.check_offsets(op, expert_offsets, rows)
    _checks.shape_of(op, "rows", rows, 2)
    _check_token(op, row_token, rows)


def _check_token(op: str, row_token: Tensor | None, x: Tensor) -> int:
    """R; raises unless row_token is None or (R,) int32, on the device of x."""
    if row_token is None:
        return x.shape[0]
    shape = _checks.shape_of(op, "row_token", row_token, 1)
    _checks.expect(op, "row_token", row_token, shape, torch.int32, x)
    return shape[0]


define_check(
    "refuse_bad_groups(Tensor expert_offsets, Tensor rows, Tensor? row_token)", refuse_bad_groups, _check_groups
)


def check_width(op: str, name: str, activation: str, width: int) -> int:
    """The number of columns after the activation of `width` columns, those of argument `name`."""
    _checks.one_of(op, "activation", activation, IN_KERNELS)
    if activation in GATED and width % 2:
        raise ValueError(f"{op}: {name} must have an even number of columns for {activation}; got {width}")
    return width // 2 if activation in GATED else width


def _check_fwd(op, x, weight, expert_offsets, row_token, bias, activation, *rest) -> tuple[int, int]:
    """R and the number of columns of the result."""
    _, din = _checks.floating(op, "x", x, 2)
    num_experts = _checks.check_offsets(op, expert_offsets, x)
    dout = _checks.shape_of(op, "weight", weight, 3)[2]
    _checks.expect(op, "weight", weight, (num_experts, din, dout), x.dtype, x)
    _checks.expect(op, "bias", bias, (num_experts, dout), x.dtype, x)
    return _check_token(op, row_token, x), check_width(op, "weight", activation, dout)


def _check_bwd(op, grad, x, weight, expert_offsets, row_token, bias, pre, activation, wanted, backend) -> None:
    num_rows, width = _check_fwd(op, x, weight, expert_offsets, row_token, bias, activation)
    _checks.expect(op, "grad", grad, (num_rows, width), x.dtype, x)
    _checks.expect(op, "pre", pre, (num_rows, weight.shape[2]), x.dtype, x)
    _checks.flags(op, "wanted", wanted, 3)


def kernels(backend: str):
    return backends.load(backend, "grouped_gemm")


def grouped_gemm_fwd(
    x, weight, expert_offsets, row_token, bias, activation, keep_pre, backend, training=False
) -> tuple[Tensor, Tensor]:
    """Implements grouped_gemm_fwd: the result, (R, Dout) or (R, Dout / 2) if gated, and pre-activations (R, Dout).

    Without keep_pre the second tensor has no elements. training: whether the call is part of a training step, as any
    call with keep_pre is; Triton chooses tiles by it.
    """
    expert_offsets, row_token, bias = contiguous(expert_offsets, row_token, bias)
    if backend != "cpu":  # the C++ kernel checks while it reads
        refuse_bad_groups(expert_offsets, x, row_token)
    given = contiguous_rows(x), contiguous_matrices(weight), expert_offsets, row_token, bias
    return kernels(backend).grouped_gemm_fwd(*given, activation, keep_pre, keep_pre or training)


def fixed_product(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    """x (T, Din) times weight (1, Din, Dout), plus bias (1, Dout), as the product of one expert. For operators in the
    mode batch_invariant; where `backend` cannot multiply the dtype, as "cuda" float32, Triton does."""
    target = backends.target_of(x.device.type, x.device.index)
    if backends.unsupported(backend, "grouped_gemm", target, x.dtype) is not None:
        backend = backends.choose("grouped_gemm", "triton", x)
    return grouped_gemm_fwd(x, weight, all_rows(x), None, bias, "", False, backend)[0]


def rows_gradient(grad: Tensor, weight: Tensor, expert_offsets: Tensor, backend: str) -> Tensor:
    """grad_r W_e^T (R, Din), with e the expert of row r and grad (R, Dout), by the forward kernel."""
    given = contiguous_rows(grad), contiguous_matrices(weight.transpose(1, 2)), expert_offsets
    return kernels(backend).grouped_gemm_fwd(*given, None, None, "", False, True)[0]


def weight_gradient(
    x, grad, expert_offsets, x_token, grad_token, with_bias, backend, weight=None, row_weight=None
) -> tuple[Tensor, Tensor]:
    """Gradients to weight (E, Din, Dout) and, if with_bias, to bias (E, Dout); else the second has no elements.

    dweight_e = sum of x_r^T grad_r and dbias_e = sum of row_weight_r grad_r, both over the rows r of expert e.

    x_token, grad_token: (R), indices: x_r is x[x_token[r]], zeros for -1, and likewise grad_r. None: x_r is x[r].
    weight: if it is transposed in memory, dweight is too, as autograd would copy a gradient of another layout.
    row_weight: (R) in compute_dtype; None for ones.
    """
    given = contiguous_rows(x), contiguous_rows(grad), expert_offsets, x_token, grad_token
    if weight is None or not is_transposed(weight):
        return kernels(backend).grouped_gemm_bwd_weight(*given, with_bias, row_weight)
    # The transpose of dweight = x^T grad is grad^T x, for which the kernel gets x and grad in each other's place. With
    # bias it would then sum the rows of x, so a second call, without columns of x, computes dbias from grad.
    dweight, dbias = weight_gradient(grad, x, expert_offsets, grad_token, x_token, False, backend)
    if with_bias:
        given = contiguous_rows(x)[:, :0], *given[1:]
        dbias = kernels(backend).grouped_gemm_bwd_weight(*given, True, row_weight)[1]
    return dweight.transpose(1, 2), dbias


def is_transposed(weight: Tensor) -> bool:
    return weight.stride(-2) == 1 and weight.stride(-1) != 1


def weight_like(weight: Tensor, wanted: bool) -> Tensor:
    """An uninitialised tensor for the gradient to a weight, transposed if the weight is; no elements if not wanted."""
    if not (wanted and is_transposed(weight)):
        return gradient_like(weight, wanted)
    num_experts, din, dout = weight.shape
    return weight.new_empty((num_experts, dout, din)).transpose(1, 2)


def _fwd_fake(x, weight, expert_offsets, row_token, bias, activation, keep_pre, backend):
    num_rows, dout = (x if row_token is None else row_token).shape[0], weight.shape[2]
    out = x.new_empty((num_rows, dout // 2 if activation in GATED else dout))
    return out, x.new_empty((num_rows if keep_pre else 0, dout))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.activation, keep_pre, ctx.backend = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, output[1] if keep_pre else None)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, expert_offsets, row_token, bias, pre = ctx.saved_tensors
    to_x, to_weight, _, _, to_bias, *_ = ctx.needs_input_grad
    given = grad, x, weight, expert_offsets, row_token, bias, pre, ctx.activation, [to_x, to_weight, to_bias]
    dx, dweight, dbias = operators.grouped_gemm_bwd(*given, ctx.backend)
    return dx if to_x else None, dweight if to_weight else None, None, None, dbias if to_bias else None, *[None] * 3


def grouped_gemm_bwd(
    grad, x, weight, expert_offsets, row_token, bias, pre, activation, wanted, backend
) -> tuple[Tensor, ...]:
    """The gradients to x, weight and bias, without elements where not wanted. pre: None if it was not saved."""
    to_x, to_weight, to_bias = wanted
    expert_offsets, row_token = contiguous(expert_offsets, row_token)
    if backend != "cpu":  # the C++ kernels check while they read
        refuse_bad_groups(expert_offsets, x, row_token)
    dx = dweight = dbias = None
    if activation:
        if pre is None:
            pre, _ = grouped_gemm_fwd(x, weight, expert_offsets, row_token, bias, "", False, backend)
        grad = kernels(backend).activation_bwd(contiguous_rows(grad), pre.contiguous(), activation)
    if to_weight or to_bias:
        found = weight_gradient(x, grad, expert_offsets, row_token, None, to_bias, backend, weight)
        dweight, dbias = found[0] if to_weight else None, found[1] if to_bias else None
    if to_x:
        dx = rows_gradient(grad, weight, expert_offsets, backend)
        if row_token is not None:
            dx = kernels(backend).grouped_gemm_sum_rows(contiguous_rows(dx), row_token, x.shape[0])
    return tuple(x.new_empty(0) if each is None else each for each in (dx, dweight, dbias))


def _bwd_fake(grad, x, weight, expert_offsets, row_token, bias, pre, activation, wanted, backend):
    to_x, to_weight, to_bias = wanted
    dbias = x.new_empty((weight.shape[0], weight.shape[2]) if to_bias else 0)
    return gradient_like(x, to_x), weight_like(weight, to_weight), dbias


def gemm_flops(x, weight, row_token) -> int:
    return 2 * (x if row_token is None else row_token)[0] * weight[1] * weight[2]


def _bwd_flops(grad, x, weight, offsets, row_token, bias, pre, activation, wanted, *rest, **kwargs) -> int:
    to_x, to_weight, to_bias = wanted
    return gemm_flops(x, weight, row_token) * (to_x + (to_weight or to_bias))


define(
    "grouped_gemm_fwd(Tensor x, Tensor weight, Tensor expert_offsets, Tensor? row_token, Tensor? bias, str activation, "
    "bool keep_pre, str backend) -> (Tensor, Tensor)",
    grouped_gemm_fwd,
    _fwd_fake,
    lambda x, weight, offsets, row_token, *rest, out_shape=None, **kwargs: gemm_flops(x, weight, row_token),
    check=_check_fwd,
    save=_save,
    backward=_backward,
)
define(
    "grouped_gemm_bwd(Tensor grad, Tensor x, Tensor weight, Tensor expert_offsets, Tensor? row_token, Tensor? bias, "
    "Tensor? pre, str activation, bool[] wanted, str backend) -> (Tensor, Tensor, Tensor)",
    grouped_gemm_bwd,
    _bwd_fake,
    _bwd_flops,
    check=_check_bwd,
    backward=no_second_derivative("grouped_gemm"),
)


def grouped_gemm(
    rows: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    row_token: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The rows of every expert times its weight: (R, Din) x (E, Din, Dout) -> (R, Dout).

    Args:
        rows: (R, Din), float32, bfloat16 or float16 (float64 on "reference" and "cpu"), grouped by expert; with
            row_token, tokens (T, Din). Rows may have any stride.
        weight: (E, Din, Dout) in the dtype of rows. It is copied if neither of the last two dimensions is contiguous; a
            transposed weight, such as `stored.mT`, is passed to the kernel as it is.
        expert_offsets: (E + 1,) int32 or int64: rows of expert e are offsets[e] to offsets[e + 1] - 1, as in a
            RoutingPlan. Offsets start at 0, never fall and end at R or below.
        bias: (E, Dout) in the dtype of rows, or None.
        activation: None, "relu", "gelu" (with erf), "silu" or "tanh"; gated: "swiglu" or "geglu", silu or gelu of the
            first Dout / 2 columns times the last Dout / 2; or gpt_oss's "swiglu_clamped", (u + 1) g sigmoid(alpha g)
            with g the even columns, clamped to at most limit, and u the odd columns, clamped to +-limit. For
            "swiglu_clamped" the product is rounded to the dtype of rows, and PyTorch computes the activation.
        alpha, limit: parameters of "swiglu_clamped", by default gpt_oss's: alpha finite, limit finite and above 0.
        row_token: (R,) int32 or int64: row r is rows[row_token[r]], or zeros where row_token[r] is -1.
        backend: "reference", "cpu", "triton" or "cuda"; None: automatic choice (see moe_kernels.explain).

    Returns:
        (R, Dout), or (R, Dout / 2) with an activation that halves the columns, in the dtype of rows. Products, bias and
        activation are computed in float32 (float64 stays); exceptions are "swiglu_clamped", and bfloat16 on a CPU (see
        below). On a GPU a float32 product is three TF32 products, about as exact as IEEE's, or one if
        torch.backends.cuda.matmul.allow_tf32 is set. Rows from expert_offsets[E] on are zero. The same input gives the
        same bits, on a CPU with the same number of threads.

    bfloat16 on a CPU: the bfloat16 instructions of AVX-512 and AMX treat subnormal numbers as zero. With AMX, torch.mm
    multiplies large experts. It rounds to bfloat16 before the activation, and it may read memory beside a view, so that
    a NaN there reaches the result; rows.contiguous() avoids that.

    Gradient: to rows, weight and bias; zero for rows not in use and for experts without rows. With row_token the
    gradient to a token is a sum over its rows, in float32 (float64 stays), in their order, without atomics. Kernels are
    once differentiable. The inputs are not cast for autocast. FLOPs of kernels (torch's counter): 2 R Din Dout forward,
    twice that backward if the gradients to rows and weight are needed.

    Values of expert_offsets and row_token are checked on the CPU; on a GPU only with MOE_KERNELS_CHECK=1, since a check
    waits for the device.

    Raises:
        TypeError: a tensor or number has another type, dtype or layout, or torch.func or forward-mode AD is used.
        ValueError: shapes or devices that do not fit, an unknown activation, an odd Dout with one that halves the
            columns, offsets or tokens out of range, where they are checked, or on "triton" a result or gradient of more
            than 2^22 columns.
        BackendError: the named backend cannot run this.

    Source: GShard's einsum (dense), MegaBlocks (groups of any size without padding), ScatterMoE (the gather inside the
    product).

    Example:
        >>> rows = torch.ones(3, 2)
        >>> weight = torch.tensor([[[1.0], [1.0]], [[10.0], [10.0]]])  # (E, Din, Dout) = (2, 2, 1)
        >>> mk.grouped_gemm(rows, weight, torch.tensor([0, 1, 3])).flatten()  # one row of expert 0, two of expert 1
        tensor([ 2., 20., 20.])
    """
    check_tensor("grouped_gemm", "rows", rows, FLOATING)
    check_rank("grouped_gemm", "rows", rows, "(R, Din)")
    check_rank("grouped_gemm", "weight", weight, "(E, Din, Dout)")
    num_experts, _, dout = weight.shape
    check_fits("grouped_gemm", "weight", weight, (num_experts, rows.shape[1], dout), "(E, Din, Dout)", "rows", rows)
    if bias is not None:
        check_fits("grouped_gemm", "bias", bias, (num_experts, dout), "(E, Dout)", "rows", rows)
    check_activation("grouped_gemm", activation, dout, alpha, limit)
    expert_offsets = _index("expert_offsets", expert_offsets, "(E + 1,)", num_experts + 1, rows)
    if row_token is not None:
        row_token = _index("row_token", row_token, "(R,)", None, rows)
    chosen = backends.choose_shapes("grouped_gemm", backend, rows, weight)
    if chosen == "reference":
        operators.refuse_bad_groups(expert_offsets, rows, row_token)
        named: dict[str, Any] = {"bias": bias, "activation": activation, "alpha": alpha, "limit": limit}
        with without_autocast(rows.device.type):
            return reference.grouped_gemm(rows, weight, expert_offsets, row_token=row_token, **named)
    if activation == CLAMPED:
        pre = operators.grouped_gemm_fwd(rows, weight, expert_offsets, row_token, bias, "", False, mark(chosen))[0]
        return swiglu_clamped(pre, alpha, limit)
    differentiated = rows.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    keep_pre = activation is not None and differentiated and torch.is_grad_enabled()
    given = rows, weight, expert_offsets, row_token, bias, activation or "", keep_pre, mark(chosen)
    return operators.grouped_gemm_fwd(*given)[0]
