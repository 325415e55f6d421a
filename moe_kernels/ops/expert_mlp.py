"""The expert MLP: dispatch, two grouped GEMMs with an activation between them, combine, as one function.

    pre_r = x_t W_in_e + b_in_e,   h_r = act(pre_r)
    y_t = sum of w_tk (h_r W_out_e + b_out_e)
    a_r = dy_t W_out_e^T,   dw_tk = <h_r, a_r> + <b_out_e, dy_t>,   dpre_r = w_tk a_r act'(pre_r)
    dW_out_e = sum of w_tk h_r^T dy_t,   db_out_e = sum of w_tk dy_t
    dx_t = sum of dpre_r W_in_e^T,   dW_in_e = sum of x_t^T dpre_r,   db_in_e = sum of dpre_r

Row r is choice k of token t, at expert e. y_t and dx_t are sums over the rows of t, gradients of parameters over those
of e. Saved for backward: x, the gate weights w, plan arrays, pre (R, H or 2 H) and the parameters. dw is computed
from h and a, so h_r W_out_e is not saved. Backward computes h again from pre. "swiglu_clamped" is composed of separate
operations instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

import python_ref.expert_mlp as reference
from moe_kernels import backends
from moe_kernels.backends import mark
from moe_kernels.ops import _checks
from moe_kernels.ops._autocast import without_autocast
from moe_kernels.ops._checks import FLOATING, INDEX, check_first, check_fits, check_plan, check_rank, check_tensor
from moe_kernels.ops._define import define, gradient_like, no_second_derivative, operators
from moe_kernels.ops._swiglu_clamped import swiglu_clamped
from moe_kernels.ops.combine import combine, combine_fwd
from moe_kernels.ops.grouped_gemm import (
    HALVING,
    check_activation,
    check_width,
    contiguous_matrices,
    grouped_gemm,
    grouped_gemm_fwd,
    kernels,
    rows_gradient,
    weight_gradient,
    weight_like,
)
from moe_kernels.ops.plan import check_choices, make_plan, make_plan_fwd
from moe_kernels.plan import RoutingPlan
from moe_kernels.sizes import (
    CLAMPED,
    compute_dtype,
    contiguous,
    contiguous_rows,
    is_checked,
    refuse_bad_plan,
    refuse_outside,
)


def _check_weights(weights: Tensor, choices: Tensor, x: Tensor) -> None:
    check_tensor("expert_mlp", "weights", weights, FLOATING)
    if weights.shape != choices.shape or weights.device != x.device:
        raise ValueError(
            f"expert_mlp: weights must be (T, K) like the choices, {tuple(choices.shape)} on {x.device}; "
            f"got {tuple(weights.shape)} on {weights.device}"
        )


def check_parameters(
    op: str,
    x: Tensor,
    num_experts: int | None,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
    activation: str | None,
    alpha: float = 1.0,
    limit: float = 1.0,
) -> None:
    """Raises unless the parameters of two-layer experts fit x (T, D), each other and, unless None, `num_experts`."""
    check_rank(op, "w_in", w_in, "(E, D, H)")
    check_rank(op, "w_out", w_out, "(E, H, Dout)")
    experts = w_in.shape[0] if num_experts is None else num_experts
    width, dout = w_in.shape[2], w_out.shape[2]
    check_activation(op, activation, width, alpha, limit)
    hidden, letter = (width // 2, "2 H") if activation in HALVING else (width, "H")
    check_fits(op, "w_in", w_in, (experts, x.shape[1], width), f"(E, D, {letter})", "x", x)
    check_fits(op, "w_out", w_out, (experts, hidden, dout), "(E, H, Dout)", "x", x)
    if b_in is not None:
        check_fits(op, "b_in", b_in, (experts, width), f"(E, {letter})", "x", x)
    if b_out is not None:
        check_fits(op, "b_out", b_out, (experts, dout), "(E, Dout)", "x", x)


def check_layers(op: str, x, num_experts, w_in, w_out, b_in, b_out, activation) -> None:
    """check_parameters for an operator; `x` was checked."""
    width, dout = (_checks.shape_of(op, name, each, 3)[2] for name, each in (("w_in", w_in), ("w_out", w_out)))
    _checks.expect(op, "w_in", w_in, (num_experts, x.shape[1], width), x.dtype, x)
    hidden = check_width(op, "w_in", activation, width)
    _checks.expect(op, "w_out", w_out, (num_experts, hidden, dout), x.dtype, x)
    _checks.expect(op, "b_in", b_in, (num_experts, width), x.dtype, x)
    _checks.expect(op, "b_out", b_out, (num_experts, dout), x.dtype, x)


def _check_fwd(
    op, x, weights, w_in, w_out, b_in, b_out, expert_offsets, row_token, row_choice, slot_row, activation, *rest
) -> None:
    tokens, _ = _checks.floating(op, "x", x, 2)
    (num_rows,) = _checks.shape_of(op, "row_token", row_token, 1)
    _checks.check_arrays(op, x, slot_row, num_rows, row_token)
    num_experts = _checks.check_offsets(op, expert_offsets, x)
    _checks.expect(op, "row_choice", row_choice, (num_rows,), torch.int32, x)
    _checks.expect(op, "slot_row", slot_row, (tokens, slot_row.shape[1]), torch.int32, x)
    _checks.expect(op, "weights", weights, slot_row.shape, compute_dtype(x.dtype), x)
    check_layers(op, x, num_experts, w_in, w_out, b_in, b_out, activation)


def _check_bwd(op, grad, x, weights, w_in, w_out, *rest) -> None:
    *others, pre, activation, wanted, _ = rest
    _check_fwd(op, x, weights, w_in, w_out, *others, activation)
    _checks.expect(op, "grad", grad, (x.shape[0], w_out.shape[2]), x.dtype, x)
    _checks.expect(op, "pre", pre, (others[3].shape[0], w_in.shape[2]), x.dtype, x)  # others[3]: row_token
    _checks.flags(op, "wanted", wanted, 6)


def _check_of_choices(op, x, weights, w_in, w_out, b_in, b_out, experts, activation, backend) -> None:
    tokens, _ = _checks.floating(op, "x", x, 2)
    check_tensor(op, "experts", experts, INDEX)
    k = _checks.shape_of(op, "experts", experts, 2)[1]
    _checks.expect(op, "experts", experts, (tokens, k), experts.dtype, x)
    _checks.expect(op, "weights", weights, experts.shape, compute_dtype(x.dtype), x)
    num_experts = _checks.shape_of(op, "w_in", w_in, 3)[0]
    if num_experts < 1:
        raise ValueError(f"{op}: w_in must have at least one expert, got shape {tuple(w_in.shape)}")
    check_layers(op, x, num_experts, w_in, w_out, b_in, b_out, activation)


def expert_mlp_fwd(
    x, weights, w_in, w_out, b_in, b_out, expert_offsets, row_token, row_choice, slot_row, activation, keep_pre, backend
) -> tuple[Tensor, Tensor]:
    plan = contiguous(expert_offsets, row_token, slot_row)
    found = _single_launch(x, weights, w_in, w_out, b_in, b_out, activation, plan, None, keep_pre, backend)
    if found is not None:
        return found
    _refuse_disagreement((plan[0], plan[1], None, plan[2]), backend)  # forward does not read row_choice
    hidden, pre = grouped_gemm_fwd(x, w_in, expert_offsets, row_token, b_in, activation, keep_pre, backend)
    result, _ = grouped_gemm_fwd(hidden, w_out, expert_offsets, None, b_out, "", False, backend, keep_pre)
    del hidden  # combine can reuse its memory
    return combine_fwd(result, weights, slot_row, backend), pre


def _refuse_disagreement(plan: tuple[Any, ...], backend: str) -> None:
    if backend == "cpu":
        kernels(backend).refuse_disagreement("expert_mlp", *plan)
    else:
        refuse_bad_plan("expert_mlp", *plan)


def _single_launch(x, weights, w_in, w_out, b_in, b_out, activation, plan, experts, keep_pre, backend):
    """y and pre from one C++ call (native/grouped_gemm_cpu.py). None if it returns None or the backend is not "cpu"."""
    if backend != "cpu":
        return None
    given = contiguous_rows(x), *contiguous(weights), *map(contiguous_matrices, (w_in, w_out)), *contiguous(b_in, b_out)
    return kernels(backend).expert_mlp_fwd(*given, activation, plan, experts, keep_pre)


def _of_choices(x, weights, w_in, w_out, b_in, b_out, experts, activation, backend) -> Tensor:
    given = x, weights, w_in, w_out, b_in, b_out
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in given):
        raise RuntimeError("expert_mlp_of_choices: it has no gradient; expert_mlp_fwd has one")
    found = _single_launch(*given, activation, None, experts.contiguous(), False, backend)
    if found is None:
        choices = torch.where(experts < w_in.shape[0], experts, -1)
        if is_checked(choices):
            refuse_outside("expert_mlp_of_choices: experts", choices, -1, w_in.shape[0], "none")
        plan = make_plan_fwd(choices, w_in.shape[0], None, None, "choice", backend)
        found = expert_mlp_fwd(*given, plan[0], plan[1], plan[2], plan[3], activation, False, backend)
    return found[0]


def _fwd_fake(x, weights, w_in, w_out, b_in, b_out, expert_offsets, row_token, *rest):
    pre = x.new_empty((row_token.shape[0] if rest[-2] else 0, w_in.shape[2]))
    return x.new_empty((x.shape[0], w_out.shape[2])), pre


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.activation, keep_pre, ctx.backend = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, output[1] if keep_pre else None)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:6])
    found = operators.expert_mlp_bwd(grad, *ctx.saved_tensors, ctx.activation, wanted, ctx.backend)
    return *(each if needed else None for each, needed in zip(found, wanted, strict=True)), *[None] * 7


def expert_mlp_bwd(grad, x, weights, w_in, w_out, b_in, b_out, *plan_and_options) -> tuple[Tensor, ...]:
    *plan, pre, activation, wanted, backend = plan_and_options
    expert_offsets, row_token, row_choice, slot_row = arrays = contiguous(*plan)
    _refuse_disagreement(arrays, backend)
    to_x, to_weights, to_w_in, to_w_out, to_b_in, to_b_out = wanted
    if pre is None:
        pre, _ = grouped_gemm_fwd(x, w_in, expert_offsets, row_token, b_in, "", False, backend)
    dx = dweights = dw_in = dw_out = db_in = db_out = None
    grad, row_weight = contiguous_rows(grad), row_weights(weights, row_token, row_choice, compute_dtype(x.dtype))
    given = grad, contiguous_matrices(w_out), expert_offsets, row_token, row_weight, pre.contiguous()
    biased = b_out.contiguous() if to_weights and b_out is not None else None
    dpre, weighted, drow_weight = kernels(backend).expert_mlp_bwd_hidden(*given, activation, biased)
    if to_w_out or to_b_out:
        arrays = expert_offsets, None, row_token
        found = weight_gradient(weighted, grad, *arrays, to_b_out, backend, w_out, row_weight)
        dw_out, db_out = found[0] if to_w_out else None, found[1] if to_b_out else None
    del weighted  # the next tensors can reuse its memory
    if to_x:
        dx = combine_fwd(rows_gradient(dpre, w_in, expert_offsets, backend), None, slot_row, backend)
    if to_w_in or to_b_in:
        found = weight_gradient(x, dpre, expert_offsets, row_token, None, to_b_in, backend, w_in)
        dw_in, db_in = found[0] if to_w_in else None, found[1] if to_b_in else None
    if weights is not None and to_weights:
        dweights = _weights_gradient(weights, drow_weight, slot_row)
    return tuple(x.new_empty(0) if each is None else each for each in (dx, dweights, dw_in, dw_out, db_in, db_out))


def row_weights(weights: Tensor | None, row_token: Tensor, row_choice: Tensor, dtype: torch.dtype) -> Tensor:
    """(R,): the gate weight of every row, or ones without weights. Elements of rows not in use are arbitrary."""
    if weights is None or weights.numel() == 0:
        return row_token.new_ones(row_token.shape, dtype=dtype)
    index = torch.add(row_choice, row_token, alpha=weights.shape[1]).clamp_(min=0)
    return weights.reshape(-1).index_select(0, index)


def _weights_gradient(weights, drow_weight, slot_row) -> Tensor:
    if drow_weight.numel() == 0:
        return torch.zeros_like(weights, memory_format=torch.contiguous_format)
    found = drow_weight.index_select(0, slot_row.clamp(min=0).view(-1)).view(slot_row.shape)
    return found.masked_fill_(slot_row < 0, 0)


def _bwd_fake(grad, x, weights, w_in, w_out, b_in, b_out, *rest):
    given = (x, weights, w_in, w_out, b_in, b_out)
    return tuple(
        x.new_empty(0) if each is None else (weight_like if each.dim() == 3 else gradient_like)(each, wanted)
        for each, wanted in zip(given, rest[-2], strict=True)
    )


def _products_flops(w_in, w_out, row_token) -> tuple[int, int]:
    return 2 * row_token[0] * w_in[1] * w_in[2], 2 * row_token[0] * w_out[1] * w_out[2]


def _fwd_flops(x, weights, w_in, w_out, b_in, b_out, offsets, row_token, *rest, **kwargs) -> int:
    return sum(_products_flops(w_in, w_out, row_token)) + (1 if weights is None else 2) * row_token[0] * w_out[2]


def _of_choices_flops(x, weights, w_in, w_out, b_in, b_out, experts, *rest, **kwargs) -> int:
    return _fwd_flops(x, weights, w_in, w_out, b_in, b_out, None, (experts[0] * experts[1],))


def _bwd_flops(grad, x, weights, w_in, w_out, b_in, b_out, offsets, row_token, *rest, **kwargs) -> int:
    to_x, to_weights, to_w_in, to_w_out, to_b_in, to_b_out = rest[-2]
    first, second = _products_flops(w_in, w_out, row_token)
    bias_share = 2 * row_token[0] * w_out[2] if to_weights and b_out is not None else 0
    to_bias = 2 * row_token[0] * w_out[2] * to_b_out
    to_input = (first + row_token[0] * w_in[1]) * to_x
    return second * (1 + (to_w_out or to_b_out)) + first * (to_w_in or to_b_in) + to_input + to_bias + bias_share


_TENSORS = (
    "Tensor x, Tensor? weights, Tensor w_in, Tensor w_out, Tensor? b_in, Tensor? b_out, Tensor expert_offsets, "
    "Tensor row_token, Tensor row_choice, Tensor slot_row"
)

define(
    f"expert_mlp_fwd({_TENSORS}, str activation, bool keep_pre, str backend) -> (Tensor, Tensor)",
    expert_mlp_fwd,
    _fwd_fake,
    _fwd_flops,
    check=_check_fwd,
    save=_save,
    backward=_backward,
)
define(
    f"expert_mlp_bwd(Tensor grad, {_TENSORS}, Tensor? pre, str activation, bool[] wanted, str backend) -> "
    f"({', '.join(['Tensor'] * 6)})",
    expert_mlp_bwd,
    _bwd_fake,
    _bwd_flops,
    check=_check_bwd,
    backward=no_second_derivative("expert_mlp"),
)

# This operator has no autograd formula: registering one would slow a call without gradients.
define(
    "expert_mlp_of_choices(Tensor x, Tensor? weights, Tensor w_in, Tensor w_out, Tensor? b_in, Tensor? b_out, "
    "Tensor experts, str activation, str backend) -> Tensor",
    _of_choices,
    lambda x, weights, w_in, w_out, *rest: x.new_empty((x.shape[0], w_out.shape[2])),
    _of_choices_flops,
    check=_check_of_choices,
)


def expert_mlp(
    x: Tensor,
    plan: RoutingPlan,
    w_in: Tensor,
    w_out: Tensor,
    *,
    weights: Tensor | None,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    activation: str | None = "gelu",
    alpha: float = 1.702,
    limit: float = 7.0,
    backend: str | None = None,
) -> Tensor:
    """The outputs of every token's experts, summed with the gate weights: (T, D) -> (T, Dout).

    Args:
        x: (T, D), float32, bfloat16 or float16 (float64 on "reference" and "cpu"). Rows may have any stride.
        plan: a plan of T tokens and E experts, on the device of x.
        w_in: (E, D, H), or (E, D, 2 H) for an activation that halves the columns, in the dtype of x; any strides.
        w_out: (E, H, Dout) in the dtype of x.
        weights: (T, K) gate weights, float32, bfloat16, float16 or float64, read as float32 (as float64 with a float64
            x). None: all 1.
        b_in, b_out: (E, H or 2 H) and (E, Dout) in the dtype of x, or None.
        activation, alpha, limit: as in grouped_gemm. "swiglu_clamped" takes more memory: the hidden layer and, with
            weights, its product with w_out are saved for backward too.
        backend: "reference", "cpu", "triton" or "cuda"; None: automatic choice (see moe_kernels.explain).

    Returns:
        y (T, Dout) in the dtype of x, equal within rounding to dispatch, grouped_gemm, grouped_gemm and combine. A
        token without a kept choice is zero; a dropped choice adds nothing, even if its weight is NaN.

    Gradient: to x, w_in, w_out, weights, b_in and b_out; zero for dropped choices and for experts without rows. Kernels
    are once differentiable. The inputs are not cast for autocast; nn.ExpertMLP casts them.

    Cost of kernels with W = H or 2 H columns of w_in, except for "swiglu_clamped". FLOPs (torch's counter) forward:
    2 R (D W + H Dout) for the products, and 2 R Dout (without weights R Dout) for combine. FLOPs backward, if all
    gradients are needed: twice those of the products, R D for dx, and with b_out 2 R Dout each for db_out and dw.

    Raises:
        TypeError: a tensor or number has another type, dtype or layout, or torch.func or forward-mode AD is used.
        ValueError: shapes or devices that do not fit, an unknown activation, an odd W with one that halves the columns,
            or values of the plan out of range, where they are checked (see combine).
        BackendError: the named backend cannot run this.

    Source: the experts of the sparse ViT, V-MoE and CompeteSMoE; rows grouped by expert without
    padding as in MegaBlocks; the gradient of the gate weights from the hidden layer as in SonicMoE (arXiv 2512.14080).

    Example:
        >>> x = torch.randn(6, 8)  # (T, D)
        >>> weights, experts = mk.topk_gate(torch.randn(6, 4), 2)
        >>> plan = mk.make_plan(experts, num_experts=4)
        >>> w_in, w_out = torch.randn(4, 8, 16), torch.randn(4, 16, 8)
        >>> mk.expert_mlp(x, plan, w_in, w_out, weights=weights).shape
        torch.Size([6, 8])
    """
    check_tensor("expert_mlp", "x", x, FLOATING)
    check_rank("expert_mlp", "x", x, "(T, D)")
    check_plan("expert_mlp", plan)
    check_first("expert_mlp", "x", x, plan.num_tokens, "tokens of the plan", plan.row_token.device)
    check_parameters("expert_mlp", x, plan.num_experts, w_in, w_out, b_in, b_out, activation, alpha, limit)
    if weights is not None:
        _check_weights(weights, plan.slot_row, x)
    chosen = backends.choose_shapes("expert_mlp", backend, x, w_in, w_out)
    if chosen == "reference":
        operators.refuse_bad_rows("expert_mlp", plan.slot_row, plan.num_rows, plan.row_token, plan.expert_offsets)
        named = {"weights": weights, "b_in": b_in, "b_out": b_out}
        with without_autocast(x.device.type):
            return reference.expert_mlp(x, plan, w_in, w_out, **named, activation=activation, alpha=alpha, limit=limit)
    if activation == CLAMPED:
        offsets = plan.expert_offsets
        pre = grouped_gemm(x, w_in, offsets, bias=b_in, row_token=plan.row_token, backend=chosen)
        hidden = swiglu_clamped(pre, alpha, limit)
        return combine(grouped_gemm(hidden, w_out, offsets, bias=b_out, backend=chosen), plan, weights, backend=chosen)
    if weights is not None:
        weights = weights.to(compute_dtype(x.dtype))
    given = (x, weights, w_in, w_out, b_in, b_out)
    arrays = (plan.expert_offsets, plan.row_token, plan.row_choice, plan.slot_row)
    keep_pre = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in given)
    return operators.expert_mlp_fwd(*given, *arrays, activation or "", keep_pre, mark(chosen))[0]


def expert_mlp_of_choices(
    x: Tensor,
    experts: Tensor,
    num_experts: int,
    w_in: Tensor,
    w_out: Tensor,
    *,
    weights: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
    activation: str,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """expert_mlp with the plan of `experts` (T, K), in which an id of num_experts or more is no choice.

    If no gradient is needed and no graph is recorded, backend "cpu" runs one operator, except for "swiglu_clamped".
    """
    given = x, weights, w_in, w_out, b_in, b_out
    differentiated = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in given)
    chosen = backends.choose_shapes("expert_mlp", None, x, w_in, w_out)
    recorded = is_compiling() or torch.jit.is_tracing()  # a recorded graph may be differentiated later
    if chosen != "cpu" or activation == CLAMPED or differentiated or recorded:
        plan = make_plan(torch.where(experts < num_experts, experts, -1), num_experts)
        options: dict[str, Any] = {"activation": activation, "alpha": alpha, "limit": limit}
        return expert_mlp(x, plan, w_in, w_out, weights=weights, b_in=b_in, b_out=b_out, **options)
    num_tokens = check_choices("make_plan", experts)
    check_tensor("expert_mlp", "x", x, FLOATING)
    check_rank("expert_mlp", "x", x, "(T, D)")
    check_first("expert_mlp", "x", x, num_tokens, "tokens of the plan", experts.device)
    check_parameters("expert_mlp", x, num_experts, w_in, w_out, b_in, b_out, activation)
    _check_weights(weights, experts, x)
    given = x, weights.to(compute_dtype(x.dtype)), w_in, w_out, b_in, b_out
    return operators.expert_mlp_of_choices(*given, experts, activation, mark(chosen))
