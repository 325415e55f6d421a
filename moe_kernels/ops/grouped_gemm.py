"""The grouped GEMM: rows grouped by expert, each times the weight of its expert, then bias and activation.

    pre_r = x_r W_e + b_e,   out_r = act(pre_r)        in the rows r of expert e;   0 in rows from expert_offsets_E on
    dpre  = act'(pre) grad,   dx_r = dpre_r W_e^T      the same product on the transposed weight, which is not copied
    dW_e  = sum over rows r of e of x_r^T dpre_r,   db_e = sum over rows r of e of dpre_r

x is (R, Din), or (T, Din) read through row_token: only torch's products, of large experts on a CPU, store the gathered
rows. Sums are float32 (float64 for float64) and in a fixed order. Saved for backward: the arguments and, with an
activation, pre. On a GPU the host does not wait for the offsets.
"""

from __future__ import annotations

import torch
from torch import Tensor

import python_ref.grouped_gemm as reference
from moe_kernels import backends, library
from moe_kernels.ops._checks import FLOATING, INDEX, check_fits, check_number, check_positive, check_rank, check_tensor

ACTIVATIONS = ("relu", "gelu", "silu", "tanh", *library.GATED, library.CLAMPED)
HALVING = (*library.GATED, library.CLAMPED)  # activations that return half the columns that they read


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
            row_token the tokens (T, Din) themselves. Rows may have any stride.
        weight: (E, Din, Dout) in the dtype of rows, any strides. Copied only if neither of the last two dimensions is
            contiguous: a transposed weight is read in place.
        expert_offsets: (E + 1,) int32 or int64: rows of expert e are offsets[e] up to offsets[e + 1], as in a
            RoutingPlan. They rise from 0 to at most R.
        bias: (E, Dout) in the dtype of rows, or None.
        activation: None, "relu", "gelu" (with erf), "silu", "tanh", or the gated "swiglu" and "geglu", which halve the
            result: silu (or gelu) of the first Dout / 2 columns times the other ones; or gpt_oss's
            "swiglu_clamped": (u + 1) g sigmoid(alpha g) with g the even columns, at most limit, and u the odd ones,
            within +-limit. It first rounds pre-activations to the dtype of rows, and makes a second pass over them.
        alpha, limit: of "swiglu_clamped"; alpha finite, limit above 0. The defaults are gpt_oss's.
        row_token: (R,) int32 or int64: row r reads rows[row_token[r]]; -1 reads zeros.
        backend: "reference", "cpu", "triton" or "cuda"; None chooses (see moe_kernels.explain).

    Returns:
        (R, Dout), or (R, Dout / 2) if gated, in the dtype of rows. Products, bias and activation are computed in
        float32 (float64 stays). Rows from expert_offsets[E] on are zero, whatever they held. float32 products are IEEE;
        TF32 is used only if torch.backends.cuda.matmul.allow_tf32 is set. The same input gives the same bits, on a CPU
        with the same number of threads.
        CPUs with bfloat16 products: products below 1.2e-38 count as zero, and those that torch.mm computes
        (large experts) are rounded to bfloat16 before the activation. On a CPU with AMX
        torch.mm may read beyond a bfloat16 view, so that a NaN in memory next to the view reaches the result (9 of 300
        shapes); rows.contiguous() avoids that.

    Gradient: to rows, weight and bias; zero for rows not in use and for experts without rows. With row_token a token's
    rows are summed in float32 and in their order, without atomics. Once differentiable. Autocast has no effect here.
    FLOPs (torch's counter): 2 R Din Dout forward, twice that backward.

    Offsets that fall or exceed R, and tokens outside [-1, T), raise ValueError for tensors on the CPU; on a GPU only
    with MOE_KERNELS_CHECK=1, since a check waits for the device.

    Raises:
        TypeError: a tensor of another dtype, or a torch.func transform.
        ValueError: shapes or devices that do not fit, an unknown activation, a gated one with an odd Dout, indices as
            above, or Dout or (for the gradient to rows) Din above 2^22 on "triton".
        BackendError: the named backend cannot run this.

    Source: the dense form is GShard's einsum; ragged groups without padding are MegaBlocks', the gather inside the
    product is ScatterMoE's.

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
    chosen = backends.choose_shapes("grouped_gemm", backend, rows)
    if chosen == "reference":
        library.ops.refuse_bad_groups(expert_offsets, rows, row_token)
        return reference.grouped_gemm(
            rows,
            weight,
            expert_offsets,
            bias=bias,
            activation=activation,
            alpha=alpha,
            limit=limit,
            row_token=row_token,
        )
    if activation == library.CLAMPED:
        pre = library.ops.grouped_gemm_fwd(rows, weight, expert_offsets, row_token, bias, "", False, chosen)[0]
        return library.ops.swiglu_clamped(pre, alpha, limit)
    differentiated = rows.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    keep_pre = activation is not None and differentiated and torch.is_grad_enabled()
    given = rows, weight, expert_offsets, row_token, bias, activation or "", keep_pre, chosen
    return library.ops.grouped_gemm_fwd(*given)[0]


def check_activation(op: str, activation: object, width: int, alpha: float = 1.0, limit: float = 1.0) -> None:
    """`activation` must be None or a known name, and `width` even for one that halves it."""
    if activation is not None and activation not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"{op}: activation must be None or one of {known}; got {activation!r}")
    check_number(op, "alpha", alpha)
    check_positive(op, "limit", limit)
    if activation in HALVING and width % 2:
        raise ValueError(f"{op}: {activation} needs an even number of columns, two halves; got {width}")


def _index(name: str, index: Tensor, shape: str, size: int | None, rows: Tensor) -> Tensor:
    """`index`, which must be (size,) on the device of rows, as int32.

    Values outside int32 become its bounds and stay out of range; a cast would wrap them to some row.
    """
    check_tensor("grouped_gemm", name, index, INDEX)
    if index.dim() != 1 or (size is not None and index.shape[0] != size) or index.device != rows.device:
        expected = f"{shape} on {rows.device}" if size is None else f"{shape} = ({size},) on {rows.device}"
        raise ValueError(f"grouped_gemm: {name} must be {expected}; got {tuple(index.shape)} on {index.device}")
    if index.dtype == torch.int64:
        index = index.clamp(-(2**31), 2**31 - 1)
    return index.to(torch.int32)
