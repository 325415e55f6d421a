"""The top-k gate: chooses the k largest logits of every token, with a softmax before or after the choice.

    z = logits + noise,  S = the k largest of z
    "topk_softmax"   w_i = exp(z_i) / sum over j in S of exp(z_j)         dz_i = w_i (dw_i - <w, dw>)            i in S
    "softmax_topk"   w_i = exp(z_i) / sum over all j of exp(z_j)          dz_i = p_i ([i in S] dw_i - <w, dw>)   all i

logits (T, E) -> weights (T, K), experts (T, K); p is the softmax of z. Saved for backward: weights and experts; for
"softmax_topk" also z. Backward computes p_j as w_0 exp(z_j - z_0), with z_0 the largest z of the token and w_0 its
weight. The rounding error of exp(z_j - logsumexp(z)) with a saved logsumexp would grow with the size of z.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import python_ref.topk_gate as reference
from moe_kernels import backends
from moe_kernels.ops import _checks
from moe_kernels.ops._checks import FLOATING, check_choice, check_int, check_like, check_rank, check_tensor
from moe_kernels.ops._define import define, no_flops, no_second_derivative, operators
from moe_kernels.sizes import compute_dtype, contiguous_rows, refuse_bad_choices

ORDERS = ("topk_softmax", "softmax_topk")


def _check_fwd(op: str, logits: Tensor, k: int, order: str, backend: str) -> None:
    _, num_experts = _checks.floating(op, "logits", logits, 2)
    _checks.integer(op, "k", k, 0, num_experts)
    _checks.one_of(op, "order", order, ORDERS)


def topk_gate_fwd(logits: Tensor, k: int, order: str, backend: str) -> tuple[Tensor, Tensor]:
    return backends.load(backend, "topk_gate").topk_gate_fwd(contiguous_rows(logits), k, order)


def _fwd_fake(logits: Tensor, k: int, order: str, backend: str) -> tuple[Tensor, Tensor]:
    weights = logits.new_empty((logits.shape[0], k), dtype=compute_dtype(logits.dtype))
    return weights, weights.new_empty(weights.shape, dtype=torch.int32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, ctx.order, ctx.backend = inputs
    # For "softmax_topk" backward computes all probabilities from the logits and weights[:, 0], the largest weights.
    ctx.save_for_backward(*output, logits if ctx.order == "softmax_topk" else None)
    ctx.num_experts, ctx.dtype = logits.shape[1], logits.dtype


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    weights, experts, logits = ctx.saved_tensors
    dlogits = operators.topk_gate_bwd(grad, weights, experts, logits, ctx.num_experts, ctx.dtype, ctx.backend)
    return dlogits, None, None, None


def _check_bwd(op, grad, weights, experts, logits, num_experts, dtype, backend) -> None:
    if dtype not in FLOATING:
        raise TypeError(f"{op}: dtype must be float32, bfloat16, float16 or float64; got {dtype}")
    shape = _checks.shape_of(op, "grad", grad, 2)
    _checks.expect(op, "grad", grad, shape, compute_dtype(dtype), grad)
    _checks.integer(op, "num_experts", num_experts, shape[1])
    _checks.expect(op, "weights", weights, shape, grad.dtype, grad)
    _checks.expect(op, "experts", experts, shape, torch.int32, grad)
    _checks.expect(op, "logits", logits, (shape[0], num_experts), dtype, grad)


def topk_gate_bwd(grad, weights, experts, logits, num_experts, dtype, backend) -> Tensor:
    if grad.shape[1] == 0 and logits is not None:  # zeros, but NaN where the softmax is NaN
        return logits.to(compute_dtype(dtype)).softmax(1).mul(0).to(dtype)
    if backend != "cpu":  # the C++ kernel checks while it reads
        refuse_bad_choices("topk_gate_bwd", experts, num_experts)
    grad, weights, experts = grad.contiguous(), weights.contiguous(), experts.contiguous()
    logits = None if logits is None else contiguous_rows(logits)
    return backends.load(backend, "topk_gate").topk_gate_bwd(grad, weights, experts, logits, num_experts, dtype)


define(
    "topk_gate_fwd(Tensor logits, SymInt k, str order, str backend) -> (Tensor, Tensor)",
    topk_gate_fwd,
    _fwd_fake,
    no_flops,
    check=_check_fwd,
    save=_save,
    backward=_backward,
    batched=(0,),
)
define(
    "topk_gate_bwd(Tensor grad, Tensor weights, Tensor experts, Tensor? logits, SymInt num_experts, "
    "ScalarType dtype, str backend) -> Tensor",
    topk_gate_bwd,
    lambda grad, weights, experts, logits, num_experts, dtype, backend: grad.new_empty(
        (grad.shape[0], num_experts), dtype=dtype
    ),
    no_flops,
    check=_check_bwd,
    backward=no_second_derivative("topk_gate"),
    batched=(0, 1, 2, 3),
)


def topk_gate(
    logits: Tensor,
    k: int,
    *,
    order: str = "topk_softmax",
    noise: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Every token's k experts and their weights.

        z = logits + noise
        "topk_softmax"   weights = softmax(z restricted to its k largest)
        "softmax_topk"   weights = softmax(z) at its k largest, which sum to at most one

    Args:
        logits: (T, E), float32, bfloat16 or float16 (float64 on "reference" and "cpu").
        k: choices per token, from 0 to E.
        order: "topk_softmax" or "softmax_topk" (V-MoE's). For k = 1 only "softmax_topk" has a gradient that is not 0.
        noise: like logits in shape, dtype and device, added to logits in that dtype. V-MoE trains with normal noise of
            standard deviation 1 / E and evaluates without.
        backend: "reference", "cpu", "triton" or "cuda"; None: automatic choice (see moe_kernels.explain).

    Returns:
        weights (T, K) in the dtype of logits, computed in float32 (float64 stays), and experts (T, K) int32. Choices
        are in descending order of z; of equal z the lower expert index comes first.

    Order of values: -0.0 equals 0.0; NaN ranks above +inf and equals every NaN. A NaN among the logits of a softmax
    makes all of its weights NaN, as in torch.softmax; the experts are still defined.

    Gradient: to logits and noise through the softmax; the choice itself is a constant. Kernels are once differentiable.
    FLOPs (torch's counter): 0; comparisons and exponentials are not counted.

    Raises:
        TypeError: a tensor or number has another type, dtype or layout, or forward-mode AD or a torch.func transform
            other than vmap is used.
        ValueError: k outside [0, E], logits that are not (T, E), noise of another shape or device, unknown order.
        BackendError: the named backend cannot run this.

    Source: "topk_softmax": CompeteSMoE, eq. 2; "softmax_topk": V-MoE, eq. 3.

    Example:
        >>> weights, experts = mk.topk_gate(torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, 0.0]]), 2)
        >>> weights
        tensor([[0.7311, 0.2689],
                [0.5000, 0.5000]])
        >>> experts
        tensor([[1, 2],
                [0, 1]], dtype=torch.int32)
    """
    check_tensor("topk_gate", "logits", logits, FLOATING, batched=True)
    check_rank("topk_gate", "logits", logits, "(T, E)")
    k = check_int("topk_gate", "k", k, 0, logits.shape[1], "choices among E experts")
    check_choice("topk_gate", "order", order, ORDERS)
    if noise is not None:
        check_tensor("topk_gate", "noise", noise, FLOATING, batched=True)
        check_like("topk_gate", "noise", noise, "logits", logits)
    chosen = backends.choose("topk_gate", backend, logits)
    if chosen == "reference":
        return reference.topk_gate(logits, k, order=order, noise=noise)
    noisy = logits if noise is None else logits + noise
    weights, experts = operators.topk_gate_fwd(noisy, k, order, chosen)
    return weights.to(logits.dtype), experts
