"""Expert norms: the norm of every expert's output for every token.

    h_te = act(x_t W_in_e + b_in_e),   y_te = h_te W_out_e + b_out_e,   s_te = ||y_te||
    dy_te = ds_te y_te / s_te,   0 where s_te = 0

Kernels compute experts in groups, with a row for each token and each expert of a group. Saved for backward: x, the
norms and the parameters; on a CPU also pre-activations and outputs, if all norms may have a gradient and these are few
(see KEPT). Otherwise backward computes hidden layers and outputs again, but only of the pairs (token, expert) whose
norm has a gradient (see _selected). The gradients are those of an expert MLP with gate weights ds / s and the output
gradient y.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

import python_ref.expert_norms as reference
from moe_kernels import backends
from moe_kernels.backends import mark
from moe_kernels.ops import _checks
from moe_kernels.ops._autocast import without_autocast
from moe_kernels.ops._checks import FLOATING, INT32_MAX, check_int, check_rank, check_tensor
from moe_kernels.ops._define import define, gradient_like, no_second_derivative, operators
from moe_kernels.ops.combine import combine_fwd
from moe_kernels.ops.expert_mlp import check_layers, check_parameters, row_weights
from moe_kernels.ops.grouped_gemm import grouped_gemm_fwd, kernels, rows_gradient, weight_gradient
from moe_kernels.ops.plan import make_plan_fwd
from moe_kernels.sizes import CLAMPED, compute_dtype, contiguous, contiguous_matrices, is_fixed, smaller

# Limit on the elements of a tensor with a row for each token and expert of a group. A group has at least one expert.
ELEMENTS = 2**27

# Most elements of pre-activations and outputs, T E (W + Dout), that a CPU saves for backward: 64 MB in float32. Without
# them backward computes two products again, of eight in a training step.
KEPT = 2**24


def _groups(x: Tensor, w_in: Tensor, w_out: Tensor, backend: str) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yields groups of experts that are computed together, as (experts, offsets, token).

    A group's rows are all tokens for its first expert, then all tokens for its second expert, and so on. offsets: the
    first row of each expert, then the number of rows. token: the token of each row; None if row r is token r. On a CPU
    a group is one expert, so that its tensors are small; in the mode batch_invariant too, since the number of tokens
    must not decide in which order dx is summed.
    """
    num_tokens, num_experts = x.shape[0], w_in.shape[0]
    widest = max(x.shape[1], w_in.shape[2], w_out.shape[2], 1) * max(num_tokens, 1)
    group_size = 1 if backend == "cpu" or is_fixed() else max(ELEMENTS // widest, 1)
    for first in range(0, num_experts, group_size):
        experts = slice(first, min(first + group_size, num_experts))
        yield experts, *_all_tokens(x, experts.stop - first)


def _all_tokens(x: Tensor, num_experts: int) -> tuple[Tensor, Tensor | None]:
    """(offsets, token) of rows that are all tokens for each of num_experts experts."""
    num_tokens = x.shape[0]
    offsets = torch.arange(num_experts + 1, device=x.device, dtype=torch.int32) * num_tokens
    token = torch.arange(num_tokens, device=x.device, dtype=torch.int32)
    return offsets, token.repeat(num_experts) if num_experts != 1 else None


class _Rows(NamedTuple):
    """Rows that backward computes together: rows offsets[e] to offsets[e + 1] - 1 are of expert e of `experts`.

    token: the token of each row, -1 in a row not in use; None if row r is token r. share: ds / s of each row, arbitrary
    in rows not in use. slot_row (T, K): the rows of each token, as in a RoutingPlan, or None if only `token` tells.
    """

    experts: slice
    offsets: Tensor
    token: Tensor | None
    share: Tensor
    slot_row: Tensor | None = None


def _rows(shares: Tensor, x: Tensor, w_in: Tensor, w_out: Tensor, winners: int | None, backend: str) -> Iterator[_Rows]:
    """The rows of backward, in groups. shares: (T, E), the gradients to the norms over the norms."""
    num_tokens, num_experts = shares.shape
    if backend == "cpu":
        yield from _selected(shares.t().contiguous(), num_tokens * max(winners or 1, 1))
    elif winners is not None and winners < num_experts:
        yield _of_winners(shares, winners, backend)
    else:
        for experts, offsets, token in _groups(x, w_in, w_out, backend):
            slot_row = None
            if token is not None:
                rows = torch.arange(token.shape[0], device=x.device, dtype=torch.int32)
                slot_row = rows.view(experts.stop - experts.start, num_tokens).t()
            yield _Rows(experts, offsets, token, shares.t()[experts].flatten().contiguous(), slot_row)


def _selected(shares: Tensor, most: int) -> Iterator[_Rows]:
    """The pairs whose share, in shares (E, T), is not zero: all in one group if there are at most `most`, else each
    expert alone. Both add the rows of a token in the order of experts, so its bits do not depend on other tokens."""
    chosen = shares != 0
    counts = chosen.sum(1)
    num_experts, num_tokens = shares.shape
    if int(counts.sum()) <= most:
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
        token = chosen.nonzero()[:, 1].to(torch.int32)
        yield _Rows(slice(0, num_experts), offsets, token, shares[chosen])
        return
    for expert, count in enumerate(counts.tolist()):
        offsets = torch.tensor([0, count], dtype=torch.int32, device=shares.device)
        if count == num_tokens:
            yield _Rows(slice(expert, expert + 1), offsets, None, shares[expert])
        else:
            token = chosen[expert].nonzero()[:, 0]
            share = shares[expert].index_select(0, token)
            yield _Rows(slice(expert, expert + 1), offsets, token.to(torch.int32), share)


def _of_winners(shares: Tensor, winners: int, backend: str) -> _Rows:
    """T `winners` rows for shares (T, E), of which at most `winners` of a token are not zero: no size comes from data,
    so the host does not wait for the device."""
    num_experts = shares.shape[1]
    chosen = shares != 0
    torch._assert_async(
        (chosen.sum(1) <= winners).all(),
        f"expert_norms: expected gradients to at most winners={winners} norms of a token, got more; pass winners=None "
        "if more norms have one",
    )
    # Distinct numbers, so that the order of the largest is defined: the first experts of a token come first.
    ranks = torch.arange(num_experts, 0, -1, device=shares.device, dtype=torch.int32)
    ranks = torch.where(chosen, ranks, 0).topk(winners, 1).values
    experts = torch.where(ranks > 0, num_experts - ranks, -1)
    offsets, token, choice, slot_row, *_ = make_plan_fwd(experts, num_experts, None, None, "choice", backend)
    weights = shares.gather(1, experts.clamp(min=0).long())
    share = row_weights(weights, token, choice, shares.dtype)
    return _Rows(slice(0, num_experts), offsets, token, share, slot_row)


def _check_fwd(op, x, w_in, w_out, b_in, b_out, activation, backend, winners=None) -> None:
    _checks.floating(op, "x", x, 2)
    num_experts = _checks.shape_of(op, "w_in", w_in, 3)[0]
    check_layers(op, x, num_experts, w_in, w_out, b_in, b_out, activation)
    if winners is not None:
        _checks.integer(op, "winners", winners, 0)


def _check_kept(op, x, w_in, w_out, b_in, b_out, activation, backend) -> None:
    _check_fwd(op, x, w_in, w_out, b_in, b_out, activation, backend)
    _checks.one_of(op, "backend", backend, ("cpu",))


def _check_bwd(
    op, grad, x, w_in, w_out, b_in, b_out, norms, activation, wanted, backend, winners=None, pre=None, outputs=None
) -> None:
    _check_fwd(op, x, w_in, w_out, b_in, b_out, activation, backend, winners)
    for name, each in (("grad", grad), ("norms", norms)):
        _checks.expect(op, name, each, (x.shape[0], w_in.shape[0]), compute_dtype(x.dtype), x)
    if (pre is None) != (outputs is None):
        raise ValueError(f"{op}: pre and outputs must both be given, or both be None")
    for name, each, width in (("pre", pre, w_in.shape[2]), ("outputs", outputs, w_out.shape[2])):
        _checks.expect(op, name, each, (w_in.shape[0], x.shape[0], width), x.dtype, x)
    _checks.flags(op, "wanted", wanted, 5)


def expert_norms_fwd(x, w_in, w_out, b_in, b_out, activation, backend, winners=None) -> Tensor:
    """winners: for the gradient alone."""
    squares = x.new_empty((w_in.shape[0], x.shape[0]), dtype=compute_dtype(x.dtype))
    for experts, offsets, token in _groups(x, w_in, w_out, backend):
        w1, w2, b1, b2 = _slice_of(experts, w_in, w_out, b_in, b_out)
        hidden, _ = grouped_gemm_fwd(x, w1, offsets, token, b1, activation, False, backend)
        found = kernels(backend).grouped_gemm_norms(hidden, contiguous_matrices(w2), offsets, b2)
        squares[experts] = found.view(experts.stop - experts.start, x.shape[0])
    return squares.sqrt_().t().contiguous()


def expert_norms_kept_fwd(x, w_in, w_out, b_in, b_out, activation, backend) -> tuple[Tensor, Tensor, Tensor]:
    """The norms, and what backward needs besides: pre-activations (E, T, W) and outputs (E, T, Dout)."""
    (num_experts, _, width), dout = w_in.shape, w_out.shape[2]
    offsets, token = _all_tokens(x, num_experts)
    hidden, pre = grouped_gemm_fwd(x, w_in, offsets, token, b_in, activation, activation != "", backend)
    outputs = x.new_empty((hidden.shape[0], dout))
    given = contiguous_matrices(w_out), offsets, *contiguous(b_out), outputs
    squares = kernels(backend).grouped_gemm_norms(hidden, *given)
    norms = squares.sqrt_().view(num_experts, x.shape[0]).t().contiguous()
    pre = (pre if activation else hidden).view(num_experts, x.shape[0], width)
    return norms, pre, outputs.view(num_experts, x.shape[0], dout)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.activation, ctx.backend, ctx.winners = inputs
    ctx.save_for_backward(*tensors, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:5])
    given = grad, *ctx.saved_tensors, ctx.activation, wanted, ctx.backend, ctx.winners
    found = operators.expert_norms_bwd(*given)
    return *(each if needed else None for each, needed in zip(found, wanted, strict=True)), None, None, None


def _save_kept(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.activation, ctx.backend = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, *output)


def _backward_kept(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, pre, outputs = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:5])
    given = grad, *tensors, ctx.activation, wanted, ctx.backend, None, pre, outputs
    found = operators.expert_norms_bwd(*given)
    return *(each if needed else None for each, needed in zip(found, wanted, strict=True)), None, None


def expert_norms_bwd(
    grad, x, w_in, w_out, b_in, b_out, norms, activation, wanted, backend, winners=None, pre=None, outputs=None
) -> tuple[Tensor, ...]:
    """pre, outputs: what expert_norms_kept_fwd returned; only "cpu" reads them, others compute them again."""
    given = w_in, w_out, b_in, b_out
    found: list[Tensor | None] = [None] * len(wanted)  # the gradients to x and to the tensors of `given`
    if w_in.shape[0] == 0:
        every = zip((x, *given), wanted, strict=True)
        found = [each.new_zeros(each.shape) if needed else None for each, needed in every]
    shares = torch.where((norms == 0) | (grad == 0), 0, grad / norms)
    for rows in _rows(shares, x, w_in, w_out, winners, backend):
        kept = None if pre is None or backend != "cpu" else _kept(rows, pre, outputs)
        to_x, *rest = _group_bwd(x, rows, _slice_of(rows.experts, *given), kept, activation, wanted, backend)
        if rows.experts.stop - rows.experts.start == w_in.shape[0]:
            found = [to_x, *rest]
            break
        if to_x is not None:
            found[0] = to_x.to(norms.dtype) if found[0] is None else found[0].add_(to_x)
        for index, part in enumerate(rest, 1):
            if part is not None:
                whole = found[index]
                if whole is None:
                    whole = found[index] = part.new_empty((w_in.shape[0], *part.shape[1:]))
                whole[rows.experts] = part
    return tuple(x.new_empty(0) if each is None else each.to(x.dtype) for each in found)


def _kept(rows: _Rows, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`rows` of the tensors (E, T, width) that expert_norms_kept_fwd returned."""
    if rows.token is None:  # all tokens of one expert
        return tuple(each[rows.experts.start].contiguous() for each in tensors)
    expert = torch.arange(rows.experts.start, rows.experts.stop, device=rows.token.device)
    pairs = expert.repeat_interleave(rows.offsets.diff()) * tensors[0].shape[1] + rows.token
    return tuple(each.flatten(0, 1).index_select(0, pairs) for each in tensors)


def _group_bwd(x, rows: _Rows, parameters, kept, activation, wanted, backend) -> tuple[Tensor | None, ...]:
    """Gradients to x and the parameters of a group of experts, where the gradient to an output row y_r is share_r y_r:
    the backward pass of an expert MLP with gate weights `share` and the gradient y.

    kept: the rows' pre-activations and outputs; None if they are to be computed again."""
    w_in, w_out, b_in, b_out = parameters
    to_x, to_w_in, to_w_out, to_b_in, to_b_out = wanted
    _, offsets, token, share, _ = rows
    dx = dw_in = dw_out = db_in = db_out = None
    if kept is None:
        hidden, pre = grouped_gemm_fwd(x, w_in, offsets, token, b_in, activation, activation != "", backend)
        y, _ = grouped_gemm_fwd(hidden, w_out, offsets, None, b_out, "", False, backend)
        pre = pre if activation else hidden
    else:
        pre, y = kept
    if x.dtype == torch.float16:  # kernels store hidden * share, which may overflow if a norm is small
        y, share = (y * share[:, None]).to(x.dtype), torch.ones_like(share)
    given = y, contiguous_matrices(w_out), offsets, None, share, pre
    dpre, weighted, _ = kernels(backend).expert_mlp_bwd_hidden(*given, activation)
    if to_w_out or to_b_out:
        dw_out, db_out = weight_gradient(weighted, y, offsets, None, None, to_b_out, backend, row_weight=share)
    if to_x:
        dx = _sum_of_rows(rows_gradient(dpre, w_in, offsets, backend), rows, x.shape[0], backend)
    if to_w_in or to_b_in:
        dw_in, db_in = weight_gradient(x, dpre, offsets, token, None, to_b_in, backend)
    found = dx, dw_in, dw_out, db_in, db_out
    return tuple(each if needed else None for each, needed in zip(found, wanted, strict=True))


def _sum_of_rows(given: Tensor, rows: _Rows, num_tokens: int, backend: str) -> Tensor:
    """(T, D): the sum of the rows of each token. given: (R, D)."""
    if rows.token is None:
        return given
    if rows.slot_row is None:
        return kernels(backend).grouped_gemm_sum_rows(given, rows.token, num_tokens)
    return combine_fwd(given, None, rows.slot_row, backend)


def _slice_of(experts: slice, *parameters: Tensor | None) -> tuple[Any, ...]:
    parts = (None if each is None else each[experts] for each in parameters)
    return tuple(each if each is None or each.dim() == 3 else each.contiguous() for each in parts)


def _kept_fake(x, w_in, w_out, *rest):
    norms = x.new_empty((x.shape[0], w_in.shape[0]), dtype=compute_dtype(x.dtype))
    return norms, *(x.new_empty((w_in.shape[0], x.shape[0], each.shape[2])) for each in (w_in, w_out))


def _bwd_fake(grad, x, w_in, w_out, b_in, b_out, norms, activation, wanted, *rest):
    given = zip((x, w_in, w_out, b_in, b_out), wanted, strict=True)
    return tuple(x.new_empty(0) if each is None else gradient_like(each, needed) for each, needed in given)


def _products_flops(x, w_in, w_out, num_rows: int | None = None) -> tuple[int, int]:
    num_rows = x[0] * w_in[0] if num_rows is None else num_rows
    return 2 * num_rows * w_in[1] * w_in[2], 2 * num_rows * w_out[1] * w_out[2]


def _bwd_flops(
    grad, x, w_in, w_out, b_in, b_out, norms, activation, wanted, backend, winners=None, pre=None, *rest, **kwargs
) -> int:
    each = w_in[0] if winners is None else smaller(winners, w_in[0])  # experts of a token
    first, second = _products_flops(x, w_in, w_out, x[0] * each)
    to_x, to_w_in, to_w_out, to_b_in, to_b_out = wanted
    again = first + second if pre is None else 0
    return again + second * (1 + (to_w_out or to_b_out)) + first * (to_x + (to_w_in or to_b_in))


_TENSORS = "Tensor x, Tensor w_in, Tensor w_out, Tensor? b_in, Tensor? b_out"

define(
    f"expert_norms_fwd({_TENSORS}, str activation, str backend, SymInt? winners=None) -> Tensor",
    expert_norms_fwd,
    lambda x, w_in, *rest: x.new_empty((x.shape[0], w_in.shape[0]), dtype=compute_dtype(x.dtype)),
    lambda x, w_in, w_out, *rest, out_shape=None, **kwargs: sum(_products_flops(x, w_in, w_out)),
    check=_check_fwd,
    save=_save,
    backward=_backward,
)
define(
    f"expert_norms_kept_fwd({_TENSORS}, str activation, str backend) -> (Tensor, Tensor, Tensor)",
    expert_norms_kept_fwd,
    _kept_fake,
    lambda x, w_in, w_out, *rest, out_shape=None, **kwargs: sum(_products_flops(x, w_in, w_out)),
    check=_check_kept,
    save=_save_kept,
    backward=_backward_kept,
)
define(
    f"expert_norms_bwd(Tensor grad, {_TENSORS}, Tensor norms, str activation, bool[] wanted, str backend, "
    f"SymInt? winners=None, Tensor? pre=None, Tensor? outputs=None) -> ({', '.join(['Tensor'] * 5)})",
    expert_norms_bwd,
    _bwd_fake,
    _bwd_flops,
    check=_check_bwd,
    backward=no_second_derivative("expert_norms"),
)


def expert_norms(
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    *,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    activation: str | None = "relu",
    winners: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """The l2 norm of every expert's output for every token: (T, D) -> (T, E).

    Args:
        x: (T, D), float32, bfloat16 or float16 (float64 on "reference" and "cpu"). Rows may have any stride.
        w_in: (E, D, H), or (E, D, 2 H) for a gated activation, in the dtype of x; any strides.
        w_out: (E, H, Dout) in the dtype of x.
        b_in, b_out: (E, H or 2 H) and (E, Dout) in the dtype of x, or None.
        activation: as in grouped_gemm, but not "swiglu_clamped".
        winners: the caller's promise that at most so many norms of a token get a gradient other than zero, as where
            topk_gate chooses so many experts by them; from 0 on. None: any number may. See Gradient.
        backend: "reference", "cpu", "triton" or "cuda"; None: automatic choice (see moe_kernels.explain).

    Returns:
        s (T, E) in the dtype of x. The hidden layer is rounded to that dtype. Outputs and sums of squares are in
        float32 (float64 stays), but a CPU with AMX rounds outputs of large bfloat16 experts to bfloat16.

    Gradient: to x, the weights and the biases; zero where a norm is zero, or is computed as zero because its squares
    underflow (outputs below about 3e-23 in float32). Kernels are once differentiable. On a CPU, kernels compute only
    the pairs (token, expert) whose norm has a gradient other than zero; `winners` is not needed there, and if more
    norms have one, the gradients are exact all the same, as those of the definition are. On a GPU, where no size may
    come from data, winners=K below E computes K pairs for each token, and more gradients than K are an error: an assert
    on the device, for which the host does not wait. A pair that is not computed adds nothing, even if its norm is NaN.

    Cost of kernels with W = H or 2 H columns of w_in. G experts are computed at a time, 1 on a CPU. On a GPU G is the
    largest number up to E with T G max(D, W, Dout) up to 2^27, but at least 1. Tensors with a row for each token and
    each of G experts have, all together, up to T G H elements forward and T G (D + 2 W + 2 H + Dout) backward, or with
    K winners T K (D + 2 W + 2 H + Dout). FLOPs (torch's counter): 2 T E (D W + H Dout) forward; backward, if all
    gradients are needed, 6 T E (D W + H Dout), with winners 6 T K (D W + H Dout), a third of them for recomputation.
    In eager mode on a CPU, with a gradient and without `winners`, forward saves pre-activations and outputs if they
    have up to 2^24 elements, T E (W + Dout); then backward computes nothing again.

    Raises:
        TypeError: a tensor has another dtype or layout, or torch.func or forward-mode AD is used.
        ValueError: shapes or devices that do not fit, an unknown activation, "swiglu_clamped", or an odd W with a
            gated activation.
        BackendError: the named backend cannot run this.

    Source: CompeteSMoE, the competition mechanism.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> w_in = torch.stack([torch.eye(2), 2 * torch.eye(2)])
        >>> w_out = torch.tensor([[[3.0, 4.0], [3.0, 4.0]]]).expand(2, 2, 2)
        >>> mk.expert_norms(x, w_in, w_out)
        tensor([[ 5., 10.],
                [ 5., 10.]])
    """
    check_tensor("expert_norms", "x", x, FLOATING)
    check_rank("expert_norms", "x", x, "(T, D)")
    if activation == CLAMPED:
        raise ValueError(f"expert_norms: activation must be one that grouped_gemm takes, but not {activation!r}")
    check_parameters("expert_norms", x, None, w_in, w_out, b_in, b_out, activation)
    if winners is not None:
        winners = check_int("expert_norms", "winners", winners, 0, INT32_MAX, "experts of a token")
    chosen = backends.choose("expert_norms", backend, x, w_in, w_out)
    if chosen == "reference":
        with without_autocast(x.device.type):
            return reference.expert_norms(x, w_in, w_out, b_in=b_in, b_out=b_out, activation=activation)
    given = x, w_in, w_out, b_in, b_out, activation or "", mark(chosen)
    if chosen == "cpu" and winners is None and not is_compiling() and _keeps(*given[:5]):
        return operators.expert_norms_kept_fwd(*given)[0].to(x.dtype)
    return operators.expert_norms_fwd(*given, winners).to(x.dtype)


def _keeps(x: Tensor, w_in: Tensor, w_out: Tensor, *biases: Tensor | None) -> bool:
    """Whether forward saves pre-activations and outputs: not if there is no gradient, or more of them than KEPT."""
    differentiated = any(each is not None and each.requires_grad for each in (x, w_in, w_out, *biases))
    elements = x.shape[0] * w_in.shape[0] * (w_in.shape[2] + w_out.shape[2])
    return differentiated and torch.is_grad_enabled() and elements <= KEPT
