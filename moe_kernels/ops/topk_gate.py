"""The top-k gate: chooses the k experts with the largest keys for every token, and weighs them by softmax or sigmoid.

    z = logits + noise,  S = the choices,  u = the weights before `renormalise` and `scale`
    "topk_softmax"   u_i = exp(z_i) / sum over j in S of exp(z_j)         dz_i = u_i (du_i - <u, du>)            i in S
    "softmax_topk"   u_i = exp(z_i) / sum over all j of exp(z_j)          dz_i = p_i ([i in S] du_i - <u, du>)   all i
    "sigmoid"        u_i = 1 / (1 + exp(-z_i))                            dz_i = u_i (1 - u_i) du_i              i in S

    w = scale u                             du = scale dw
    w = scale u / (sum of u + 1e-20)        du = scale (dw - <u, dw> / (sum of u + 1e-20)) / (sum of u + 1e-20)

logits (T, E) -> weights (T, K), experts (T, K); p is the softmax of z. Operators take "sigmoid" as a third order. The
keys of the choice are z, or, with a bias or groups, scores + bias.

Saved for backward: weights and experts; where w is not u or p is needed, also z. Where the choice is by z and w = u,
backward of "softmax_topk" computes p_j as w_0 exp(z_j - z_0), with z_0 the largest z of the token and w_0 its
weight. The rounding error of exp(z_j - logsumexp(z)) with a saved logsumexp would grow with the size of z.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import python_ref.topk_gate as reference
from moe_kernels import backends
from moe_kernels.ops import _checks
from moe_kernels.ops._checks import (
    FLOAT32_MAX,
    FLOATING,
    check_choice,
    check_int,
    check_like,
    check_number,
    check_rank,
    check_tensor,
)
from moe_kernels.ops._define import define, define_check, no_flops, no_second_derivative, operators
from moe_kernels.sizes import compute_dtype, contiguous_rows, refuse_bad_choices, refuse_bad_forced

ORDERS = ("topk_softmax", "softmax_topk")
SCORES = ("softmax", "sigmoid")
RULES = (*ORDERS, "sigmoid")  # `order` of the operators
RECORDED = (torch.int16, torch.int32, torch.int64)  # dtypes of `forced`


def _check_fwd(
    op: str, logits: Tensor, k: int, order: str, backend: str, bias=None, num_groups=0, kept_groups=0,
    renormalise=False, scale=1.0, forced=None,
) -> None:  # fmt: skip
    num_tokens, num_experts = _checks.floating(op, "logits", logits, 2)
    _checks.integer(op, "k", k, 0, num_experts)
    _checks.one_of(op, "order", order, RULES)
    if bias is not None:
        wide = torch.float64 if logits.dtype == bias.dtype == torch.float64 else torch.float32
        _checks.expect(op, "bias", bias, (num_experts,), wide, logits)
    _checks.integer(op, "num_groups", num_groups, 0, max(num_experts, 1))
    _checks.integer(op, "kept_groups", kept_groups, 0, num_groups)
    if num_groups and (num_experts % num_groups or k > kept_groups * (num_experts // num_groups)):
        raise ValueError(
            f"{op}: num_groups and kept_groups must divide E = {num_experts} experts and keep at least k = {k} of "
            f"them; got {num_groups} and {kept_groups}"
        )
    _checks.finite(op, "scale", scale)
    if forced is not None:
        if forced.dtype not in RECORDED:
            raise TypeError(f"{op}: forced must be int16, int32 or int64; got {forced.dtype}")
        _checks.expect(op, "forced", forced, (num_tokens, k), forced.dtype, logits)


def topk_gate_fwd(
    logits: Tensor, k: int, order: str, backend: str, bias=None, num_groups=0, kept_groups=0, renormalise=False,
    scale=1.0, forced=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if forced is not None:
        if backend != "cpu":  # the C++ kernel checks while it reads
            refuse_bad_forced(forced, logits.shape[1])
        forced = forced.contiguous()
    return backends.load(backend, "topk_gate").topk_gate_fwd(
        contiguous_rows(logits), k, order, None if bias is None else bias.contiguous(), num_groups, kept_groups,
        renormalise, scale, forced,
    )  # fmt: skip


def _fwd_fake(logits: Tensor, k: int, order: str, backend: str, *more: Any) -> tuple[Tensor, Tensor]:
    weights = logits.new_empty((logits.shape[0], k), dtype=compute_dtype(logits.dtype))
    return weights, weights.new_empty(weights.shape, dtype=torch.int32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, order, ctx.backend, bias, num_groups, _, ctx.renormalise, ctx.scale, forced = inputs
    by_logits = bias is None and forced is None and num_groups == 0
    unscaled = not ctx.renormalise and ctx.scale == 1 and order in ORDERS
    ctx.order = "" if unscaled and (by_logits or order == "topk_softmax") else order
    ctx.save_for_backward(*output, None if ctx.order == "" and order == "topk_softmax" else logits)
    ctx.num_experts, ctx.dtype = logits.shape[1], logits.dtype


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    weights, experts, logits = ctx.saved_tensors
    dlogits = operators.topk_gate_bwd(
        grad, weights, experts, logits, ctx.num_experts, ctx.dtype, ctx.backend, ctx.order, ctx.renormalise, ctx.scale
    )
    return dlogits, *[None] * 9


def _check_bwd(
    op, grad, weights, experts, logits, num_experts, dtype, backend, order="", renormalise=False, scale=1.0
) -> None:
    if dtype not in FLOATING:
        raise TypeError(f"{op}: dtype must be float32, bfloat16, float16 or float64; got {dtype}")
    shape = _checks.shape_of(op, "grad", grad, 2)
    _checks.expect(op, "grad", grad, shape, compute_dtype(dtype), grad)
    _checks.integer(op, "num_experts", num_experts, shape[1])
    _checks.expect(op, "weights", weights, shape, grad.dtype, grad)
    _checks.expect(op, "experts", experts, shape, torch.int32, grad)
    _checks.expect(op, "logits", logits, (shape[0], num_experts), dtype, grad)
    _checks.one_of(op, "order", order, ("", *RULES))
    _checks.finite(op, "scale", scale)
    if order != "" and logits is None:
        raise TypeError(f"{op}: logits must be given for order {order!r}, got None")


def topk_gate_bwd(
    grad, weights, experts, logits, num_experts, dtype, backend, order="", renormalise=False, scale=1.0
) -> Tensor:
    """order: "" if the weights are those of "topk_softmax" (logits None) or "softmax_topk", unscaled, chosen by logits.
    Otherwise backward computes them again from the logits, and does not read `weights`."""
    if grad.shape[1] == 0 and logits is not None:
        if order in ("", "softmax_topk"):  # zeros, but NaN where the softmax is NaN
            return logits.to(compute_dtype(dtype)).softmax(1).mul(0).to(dtype)
        return torch.zeros_like(logits)
    if backend != "cpu":  # the C++ kernel checks while it reads
        refuse_bad_choices("topk_gate_bwd", experts, num_experts)
    grad, weights, experts = grad.contiguous(), weights.contiguous(), experts.contiguous()
    logits = None if logits is None else contiguous_rows(logits)
    return backends.load(backend, "topk_gate").topk_gate_bwd(
        grad, weights, experts, logits, num_experts, dtype, order, renormalise, scale
    )


def _check_forced(op: str, forced: Tensor, num_experts: int) -> None:
    if forced.dtype not in RECORDED:
        raise TypeError(f"{op}: forced must be int16, int32 or int64; got {forced.dtype}")
    _checks.shape_of(op, "forced", forced, 2)


define(
    "topk_gate_fwd(Tensor logits, SymInt k, str order, str backend, Tensor? bias=None, SymInt num_groups=0, "
    "SymInt kept_groups=0, bool renormalise=False, float scale=1.0, Tensor? forced=None) -> (Tensor, Tensor)",
    topk_gate_fwd,
    _fwd_fake,
    no_flops,
    check=_check_fwd,
    save=_save,
    backward=_backward,
    batched=(0, 9),
)
define(
    "topk_gate_bwd(Tensor grad, Tensor weights, Tensor experts, Tensor? logits, SymInt num_experts, "
    'ScalarType dtype, str backend, str order="", bool renormalise=False, float scale=1.0) -> Tensor',
    topk_gate_bwd,
    lambda grad, weights, experts, logits, num_experts, dtype, backend, *more: grad.new_empty(
        (grad.shape[0], num_experts), dtype=dtype
    ),
    no_flops,
    check=_check_bwd,
    backward=no_second_derivative("topk_gate"),
    batched=(0, 1, 2, 3),
)
define_check("refuse_bad_forced(Tensor forced, SymInt num_experts)", refuse_bad_forced, _check_forced)


def topk_gate(
    logits: Tensor,
    k: int,
    *,
    order: str = "topk_softmax",
    noise: Tensor | None = None,
    scores: str = "softmax",
    bias: Tensor | None = None,
    groups: tuple[int, int] | None = None,
    renormalise: bool = False,
    scale: float = 1.0,
    forced: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Every token's k experts and their weights.

        z = logits + noise
        scores="softmax"   s = softmax(z);      order="topk_softmax"   weights = softmax(z restricted to the choices)
                                                order="softmax_topk"   weights = s at the choices
        scores="sigmoid"   s = sigmoid(z);                             weights = s at the choices
        renormalise        weights = weights / (their sum + 1e-20)
        scale              weights = scale weights

    The choices are the k largest keys: z, or s + bias if a bias or groups are given.

    Args:
        logits: (T, E), float32, bfloat16 or float16 (float64 on "reference" and "cpu").
        k: choices per token, from 0 to E.
        order: "topk_softmax" or "softmax_topk" (V-MoE's). For k = 1 only "softmax_topk" has a gradient that is not 0.
            With scores="sigmoid" it has no meaning and must be left at its default.
        noise: like logits in shape, dtype and device, added to logits in that dtype. V-MoE trains with normal noise of
            standard deviation 1 / E and evaluates without.
        scores: "softmax" or "sigmoid".
        bias: (E,) float32 (also float64 if logits are), added to the scores for the choice alone (balance without a
            loss).
        groups: (n, g): the E experts form n groups of E / n neighbours. The score of a group is the sum of its two
            largest keys, or its only key; experts outside the g groups with the best scores (of equal ones the lower
            group) are not chosen. k is at most g E / n.
        renormalise: whether the weights of a token's choices sum to `scale`, up to the 1e-20.
        scale: a number, finite in float32.
        forced: (T, K) int16, int32 or int64, recorded experts. An entry from 0 to E - 1 is the expert of its position,
            whatever keys and groups say. Entries of -1 are filled, from left to right, with the best choices among the
            experts that are not forced in the row.
        backend: "reference", "cpu", "triton" or "cuda"; None: automatic choice (see moe_kernels.explain).

    Returns:
        weights (T, K) in the dtype of logits, computed in float32 (float64 stays), and experts (T, K) int32. Choices
        are in descending order of keys; of equal keys the lower expert index comes first.

    Order of values: -0.0 equals 0.0; NaN ranks above +inf and equals every NaN. A NaN among the logits of a softmax
    makes all of its weights NaN, as in torch.softmax; the experts are still defined. Choices by z are the same on all
    backends. Scores are rounded by each backend's own exponentials, so of keys s + bias that nearly tie another may
    be chosen.

    Gradient: to logits and noise through the weights; the choice itself is a constant, and bias has no gradient.
    Kernels are once differentiable. FLOPs (torch's counter): 0; comparisons and exponentials are not counted.

    Raises:
        TypeError: a tensor or number has another type, dtype or layout, or forward-mode AD or a torch.func transform
            other than vmap is used.
        ValueError: k outside [0, E], logits that are not (T, E), another tensor of another shape or device, unknown
            order or scores, groups that do not divide E or hold fewer than k experts. On the CPU, and on GPUs if
            MOE_KERNELS_CHECK=1, also forced experts below -1, from E on, or twice in a row; without the check their
            weights on a GPU are undefined.
        BackendError: the named backend cannot run this.

    Source: "topk_softmax": CompeteSMoE, eq. 2; "softmax_topk": V-MoE, eq. 3; sigmoid, bias and groups: DeepSeek-V3
    (arXiv:2412.19437), eqs. 12 to 16, and its public code.

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
    plain = scores == "softmax" and bias is None and groups is None and not renormalise and forced is None
    if not plain:
        _check_options(logits, k, order, scores, bias, groups, renormalise, forced)
    if scale != 1.0:
        scale = check_scale("topk_gate", scale)
    chosen = backends.choose("topk_gate", backend, logits)
    if chosen == "reference":
        if forced is not None:
            operators.refuse_bad_forced(forced, logits.shape[1])
        return reference.topk_gate(
            logits, k, order=order, noise=noise, scores=scores, bias=bias, groups=groups, renormalise=renormalise,
            scale=scale, forced=forced,
        )  # fmt: skip
    noisy = logits if noise is None else logits + noise
    if plain and scale == 1.0:
        weights, experts = operators.topk_gate_fwd(noisy, k, order, chosen)
    else:
        rule = "sigmoid" if scores == "sigmoid" else order
        # The softmax of the choices already sums to one.
        renormalise = renormalise and rule != "topk_softmax"
        bias = None if bias is None else bias.detach()
        weights, experts = operators.topk_gate_fwd(
            noisy, k, rule, chosen, bias, *(groups or (0, 0)), renormalise, scale, forced
        )
    return weights.to(logits.dtype), experts


def _check_options(logits: Tensor, k: int, order, scores, bias, groups, renormalise, forced) -> None:
    num_tokens, num_experts = logits.shape
    check_scores("topk_gate", order, scores, renormalise)
    if bias is not None:
        check_tensor("topk_gate", "bias", bias, (torch.float32, torch.float64)[: 1 + (logits.dtype == torch.float64)])
        if bias.shape != (num_experts,) or bias.device != logits.device:
            raise ValueError(
                f"topk_gate: bias must be (E,) = ({num_experts},) on {logits.device}; got {tuple(bias.shape)} on "
                f"{bias.device}"
            )
    check_groups("topk_gate", groups, num_experts, k)
    if forced is not None:
        check_tensor("topk_gate", "forced", forced, RECORDED, batched=True)
        if forced.shape != (num_tokens, k) or forced.device != logits.device:
            raise ValueError(
                f"topk_gate: forced must be (T, K) = {(num_tokens, k)} on {logits.device}; got {tuple(forced.shape)} "
                f"on {forced.device}"
            )


def check_scores(op: str, order: object, scores: object, renormalise: object) -> None:
    check_choice(op, "order", order, ORDERS)
    check_choice(op, "scores", scores, SCORES)
    if scores == "sigmoid" and order != ORDERS[0]:
        raise ValueError(f"{op}: order has no meaning with scores='sigmoid'; leave it out, got {order!r}")
    if not isinstance(renormalise, bool):
        raise TypeError(f"{op}: renormalise must be a bool, got {type(renormalise).__name__}")


def check_scale(op: str, scale: object) -> float:
    return check_number(op, "scale", scale, -FLOAT32_MAX, FLOAT32_MAX, "finite in float32")


def check_groups(op: str, groups: object, num_experts: int, k: int) -> None:
    """Raises unless `groups` is None or (n, g) with n a divisor of E and k experts in g groups."""
    if groups is None:
        return
    if not isinstance(groups, tuple | list) or len(groups) != 2:
        raise TypeError(f"{op}: groups must be a pair (groups, groups that stay), got {groups!r}")
    count = check_int(op, "groups[0]", groups[0], 1, max(num_experts, 1), "groups of experts")
    kept = check_int(op, "groups[1]", groups[1], 1, count, "groups that stay")
    if num_experts % count:
        raise ValueError(f"{op}: groups[0] must divide the {num_experts} experts, got {count}")
    if k > kept * (num_experts // count):
        raise ValueError(f"{op}: k = {k} experts must fit into {kept} groups of {num_experts // count}")
