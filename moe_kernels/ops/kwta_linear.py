"""A linear layer that computes only the outputs that a mask keeps, as COMET's masks are known before the product.

    y_tn = sum_d x_td W_nd + b_n    if bit n of row t is set, else +0     (COMET fixed routing, eqs. 7 and 8, f = 1)

x (T, D), W (N, D), b (N), y (T, N). With k bits in a row, 2 T k D FLOPs instead of 2 T N D. The mask is a constant to
autograd; with G = mask * dL/dy the gradients are G W, G^T x and the column sums of G, computed as dense products.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

import python_ref.kwta_linear as reference
from moe_kernels import backends
from moe_kernels.ops import _checks
from moe_kernels.ops._autocast import without_autocast
from moe_kernels.ops._checks import FLOATING, check_fits, check_int, check_tensor
from moe_kernels.ops._define import define, operators
from moe_kernels.ops.kwta import check_bits
from moe_kernels.sizes import contiguous_rows, words


def _check_fwd(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, bits: Tensor, k: int, backend: str) -> None:
    tokens, dim = _checks.floating(op, "x", x, 2)
    width, _ = _checks.shape_of(op, "weight", weight, 2)
    _checks.expect(op, "weight", weight, (width, dim), x.dtype, x)
    _checks.expect(op, "bias", bias, (width,), x.dtype, x)
    _checks.expect(op, "bits", bits, (tokens, words(width)), torch.int32, x)
    _checks.integer(op, "k", k, 0, width)


def kwta_linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, bits: Tensor, k: int, backend: str) -> Tensor:
    rows = contiguous_rows(x), contiguous_rows(weight)
    bias = None if bias is None else bias.contiguous()
    return backends.load(backend, "kwta_linear").kwta_linear_fwd(*rows, bias, bits.contiguous(), k)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, bits, _, ctx.backend = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, bits)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bits = ctx.saved_tensors
    kept = operators.kwta_bwd(grad, bits, ctx.backend)
    with without_autocast(x.device.type):
        dx = kept @ weight if ctx.needs_input_grad[0] else None
        dweight = kept.t() @ x if ctx.needs_input_grad[1] else None
    dbias = kept.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
    return dx, dweight, dbias, None, None, None


def _flops(x_shape, weight_shape, bias_shape, bits_shape, k, *args, out_shape=None, **kwargs) -> int:
    return 2 * x_shape[0] * k * x_shape[1]


define(
    "kwta_linear_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor bits, SymInt k, str backend) -> Tensor",
    kwta_linear_fwd,
    lambda x, weight, *rest: x.new_empty((x.shape[0], weight.shape[0])),
    _flops,
    check=_check_fwd,
    save=_save,
    backward=_backward,
    batched=(0, 3),
)


def kwta_linear(
    x: Tensor,
    weight: Tensor,
    bits: Tensor,
    bias: Tensor | None = None,
    *,
    k: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """x W^T + b where bits are set, +0 elsewhere: kwta_apply(F.linear(x, weight, bias), bits), computing nothing else.

    Args:
        x: (..., D), float32, bfloat16 or float16 (float64 on "reference" and "cpu").
        weight: W (N, D), bias: b (N), like x in dtype and device. Tensors whose last dimension is not contiguous are
            copied.
        bits: int32 (..., ceil(N / 32)) from `kwta_bits`, with the leading dimensions and device of x. Bits past N are
            ignored.
        k: winners of a row, 0 to N, for torch's FLOP counter and the grid of the Triton kernel; the result does not
            depend on it. None: N.
        backend: "reference", "cpu" or "triton"; None: automatic choice (see moe_kernels.explain).

    Kernels sum in float32 (float64 stays), in an order that depends on D and in Triton on whether all rows start at a
    multiple of 16 bytes, and round once. So an output differs from the dense product's by rounding, and inside
    batch_invariant(), on a CPU always, it has the same bits whatever other rows are in the call.

    Gradient: to x, weight and bias, as of the dense product with the masked gradient. Differentiable any number of
    times. Autocast: runs in the dtype of its inputs. torch.vmap is supported over x and bits. FLOPs of kernels (torch's
    counter): 2 T k D forward; backward those of its two dense products and one for each element of the masked gradient.

    Raises:
        TypeError: a tensor or number has another type, dtype or layout, or forward-mode AD or a torch.func transform
            other than vmap is used.
        ValueError: a tensor of another shape or device, or k outside [0, N].
        RuntimeError: a gradient is needed inside batch_invariant(), where its bits would depend on the batch.
        BackendError: the named backend cannot run this.

    Source: COMET fixed routing, eqs. 7 and 8.

    Example:
        >>> x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> _, bits = mk.kwta_bits(torch.tensor([[3.0, 1.0, 2.0]]), 2)
        >>> mk.kwta_linear(x, weight, bits)  # outputs 0 and 2 win
        tensor([[1., 0., 3.]])
    """
    op = "kwta_linear"
    check_tensor(op, "x", x, FLOATING, batched=True)
    check_tensor(op, "weight", weight, FLOATING)
    if x.dim() == 0 or weight.dim() != 2:
        raise ValueError(
            f"{op}: x must be (..., D) and weight (N, D), got shapes {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    width, dim = weight.shape[0], x.shape[-1]
    check_fits(op, "weight", weight, (width, dim), "(N, D)", "x", x)
    if bias is not None:
        check_fits(op, "bias", bias, (width,), "(N)", "x", x)
    check_bits(op, bits, (*x.shape[:-1], width), x.device)
    k = width if k is None else check_int(op, "k", k, 0, width, "winners among the N outputs of a row")
    chosen = backends.choose(op, backend, x)
    if chosen == "reference":
        with without_autocast(x.device.type):
            return reference.kwta_linear(x, weight, bits, bias)
    differentiated = torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in (x, weight, bias)
    )
    if differentiated and backends.is_batch_invariant():
        raise RuntimeError(
            f"{op}: its gradients are dense products, whose bits depend on the batch; inside batch_invariant() "
            "expected no_grad(), or kwta_apply of a product of grouped_gemm"
        )
    rows = prod(x.shape[:-1])
    flat = x.reshape(rows, dim)
    if backends.is_batch_invariant():
        flat = flat.contiguous()  # one row has no stride by which Triton would know its neighbours' alignment
    y = operators.kwta_linear_fwd(flat, weight, bias, bits.reshape(rows, bits.shape[-1]), k, chosen)
    return y.view(*x.shape[:-1], width)
