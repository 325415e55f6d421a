"""Routing plans: choices of tokens become rows, grouped by expert.

    slot_i = |{j visited before i : expert_j = expert_i}|,   kept if slot_i < capacity      (V-MoE, algorithms 1 and 2)
    row_i  = expert_offsets[expert_i] + slot_i,   expert_offsets_e = sum of min(requests, capacity) over experts < e

A request i is a choice that names an expert. Kernels of make_plan sort T priorities, if given, but not the requests,
build no (T, E) one-hot matrix, and do not make the host wait for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import torch
from torch import Tensor

import python_ref.plan as reference
from moe_kernels import backends
from moe_kernels.ops import _checks
from moe_kernels.ops._checks import FLOATING, INDEX, check_choice, check_factor, check_int, check_rank, check_tensor
from moe_kernels.ops._define import define, define_check, no_flops, operators
from moe_kernels.plan import RoutingPlan
from moe_kernels.sizes import contiguous_rows, plan_rows, refuse_unknown_experts

ORDERS = ("choice", "token")
INT32_MAX = 2**31 - 1
MOST_EXPERTS = 2**24  # plans hold several arrays with an element an expert


def check_choices(op: str, experts: Tensor) -> int:
    """T; raises unless `experts` is (T, K), int32 or int64, with at most 2^31 - 1 elements."""
    check_tensor(op, "experts", experts, INDEX)
    check_rank(op, "experts", experts, "(T, K)")
    num_tokens, k = experts.shape
    _check_size(op, num_tokens, k, "K")
    return num_tokens


def _check_scores(op: str, scores: Tensor, capacity: int) -> tuple[int, int, int]:
    check_tensor(op, "scores", scores, FLOATING)
    check_rank(op, "scores", scores, "(T, E)")
    num_tokens, num_experts = scores.shape
    if num_experts < 1:
        raise ValueError(f"{op}: scores must have a column for at least one expert, got {tuple(scores.shape)}")
    _check_size(op, num_tokens, num_experts, "E")
    return num_tokens, num_experts, check_int(op, "capacity", capacity, 0, INT32_MAX, "rows an expert has room for")


def _check_size(op: str, num_tokens: int, k: int, letter: str) -> None:
    if num_tokens * k > INT32_MAX:
        raise ValueError(
            f"{op}: T * {letter} must be at most 2^31 - 1, the largest int32 index; got {num_tokens} * {k}"
        )


def _check_known(op: str, experts: Tensor, num_experts: int) -> None:
    check_tensor(op, "experts", experts, INDEX)


define_check("refuse_unknown_experts(Tensor experts, SymInt num_experts)", refuse_unknown_experts, _check_known)


def _check_limit(op: str, limit: Tensor | None, num_experts: int, like: Tensor) -> None:
    """Raises unless `limit` is None or an int32 tensor, () or (E,), on the device of `like`."""
    if limit is None:
        return
    check_tensor(op, "limit", limit, (torch.int32,))
    if limit.shape not in ((), (num_experts,)) or limit.device != like.device:
        raise ValueError(
            f"{op}: limit must be () or ({num_experts},), the most rows of each expert, on {like.device}; "
            f"got {tuple(limit.shape)} on {limit.device}"
        )


def _check_plan(op: str, experts: Tensor, num_experts: int, capacity, priority, order, backend, limit=None) -> None:
    num_tokens = check_choices(op, experts)
    _checks.integer(op, "num_experts", num_experts, 1, MOST_EXPERTS)
    if capacity is not None:
        _checks.integer(op, "capacity", capacity, 0)
    if priority is not None:
        _checks.floating(op, "priority", priority, 1)
        _checks.expect(op, "priority", priority, (num_tokens,), priority.dtype, experts)
    _checks.one_of(op, "order", order, ORDERS)
    _check_limit(op, limit, num_experts, experts)


def _check_scored(op: str, scores: Tensor, capacity: int, backend: str, limit: Tensor | None = None) -> None:
    _, num_experts, _ = _check_scores(op, scores, capacity)
    _check_limit(op, limit, num_experts, scores)


def make_plan_fwd(experts, num_experts, capacity, priority, order, backend, limit=None) -> tuple[Tensor, ...]:
    if backend != "cpu":  # the C++ kernel checks while it reads
        refuse_unknown_experts(experts, num_experts)
    return backends.load(backend, "make_plan").make_plan_fwd(
        experts.contiguous(), num_experts, capacity, priority, order, limit
    )


def _plan_scored(name: str) -> Callable[..., tuple[Tensor, ...]]:
    """The implementation of plan_expert_choice_fwd or plan_priority_fwd."""

    def run(scores: Tensor, capacity: int, backend: str, limit: Tensor | None = None) -> tuple[Tensor, ...]:
        forward = getattr(backends.load(backend, name), f"{name}_fwd")
        return forward(contiguous_rows(scores), capacity, limit)

    return run


def _plan_fake(x: Tensor, num_tokens: int, k: int, num_experts: int, num_rows: int) -> tuple[Tensor, ...]:
    shapes = ((num_experts + 1,), (num_rows,), (num_rows,), (num_tokens, k), (num_experts,), (num_experts,), ())
    return tuple(x.new_empty(shape, dtype=torch.int32) for shape in shapes)


def _make_plan_fake(
    experts: Tensor, num_experts: int, capacity: int | None, priority: Tensor | None, order, backend, limit=None
):
    num_tokens, k = experts.shape
    return _plan_fake(experts, num_tokens, k, num_experts, plan_rows(num_tokens, k, num_experts, capacity))


def _plan_expert_choice_fake(scores: Tensor, capacity: int, backend: str, limit: Tensor | None = None):
    num_tokens, num_experts = scores.shape
    num_rows = plan_rows(num_tokens, num_experts, num_experts, capacity)
    return _plan_fake(scores, num_tokens, num_experts, num_experts, num_rows)


def _plan_priority_fake(scores: Tensor, capacity: int, backend: str, limit: Tensor | None = None):
    num_tokens, num_experts = scores.shape
    arrays = _plan_fake(scores, num_tokens, 1, num_experts, plan_rows(num_tokens, 1, num_experts, capacity))
    return *arrays, scores.new_empty((num_tokens, 1), dtype=torch.int32)


_PLAN = ", ".join(["Tensor"] * 7)  # expert_offsets, row_token, row_choice, slot_row, requested, kept, dropped

define(
    "make_plan_fwd(Tensor experts, SymInt num_experts, SymInt? capacity, Tensor? priority, str order, str backend, "
    f"Tensor? limit=None) -> ({_PLAN})",
    make_plan_fwd,
    _make_plan_fake,
    no_flops,
    check=_check_plan,
)
define(
    f"plan_expert_choice_fwd(Tensor scores, SymInt capacity, str backend, Tensor? limit=None) -> ({_PLAN})",
    _plan_scored("plan_expert_choice"),
    _plan_expert_choice_fake,
    no_flops,
    check=_check_scored,
)
define(
    f"plan_priority_fwd(Tensor scores, SymInt capacity, str backend, Tensor? limit=None) -> ({_PLAN}, Tensor)",
    _plan_scored("plan_priority"),
    _plan_priority_fake,
    no_flops,
    check=_check_scored,
)


def make_plan(
    experts: Tensor,
    num_experts: int,
    *,
    capacity: int | None = None,
    priority: Tensor | None = None,
    order: str = "choice",
    limit: Tensor | None = None,
    backend: str | None = None,
) -> RoutingPlan:
    """The plan of tokens that choose experts; each expert keeps its first `capacity` requests.

    A request's slot is the number of earlier requests to the same expert, dropped ones included. The request is kept
    if its slot is below capacity, and below limit.

    Args:
        experts: (T, K) int32 or int64, the choices of every token, best first; -1 is no choice. A token may name an
            expert twice; each is a request.
        num_experts: E, from 1 to 2^24.
        capacity: largest number of rows of an expert (see `expert_capacity`), from 0; None: nothing is dropped.
        priority: (T,), float32, bfloat16, float16 or float64, for Batch Prioritized Routing: tokens are visited in
            descending priority instead of by position, tokens of equal priority by position. -0.0 equals 0.0, NaN is
            the highest. V-MoE takes the largest of a token's gate weights, or their sum.
        order: "choice" visits the first choices of all tokens, then all second choices, and so on (GShard, V-MoE);
            "token" visits every choice of a token before the next token (MegaBlocks).
        limit: int32, () or (E,), a second bound on the rows of an expert, which is on the device: a capacity that
            depends on tensors, such as the number of tokens that are no padding. The host does not wait for it, so
            that R is as without it. A negative limit is 0; None is no limit.
        backend: "reference", "cpu", "triton" or "cuda"; None: automatic choice (see moe_kernels.explain).

    An id outside [-1, E) raises ValueError for tensors on the CPU. On a GPU it counts as -1, since a check would wait
    for the device. Plans have no gradient.

    Raises:
        TypeError: a tensor or number has another type, dtype or layout, or torch.func or forward-mode AD is used.
        ValueError: experts that are not (T, K), a priority that is not (T,) or a limit that is not () or (E,) on
            their device, num_experts < 1, capacity < 0, unknown order, an id as above, or T * K above 2^31 - 1 (rows
            have int32 indices).
        BackendError: the named backend cannot run this.

    Source: V-MoE, section 4 and algorithms 1 and 2; GShard, algorithm 1.

    Example:
        >>> experts = torch.tensor([[0], [1], [0], [0]])  # (T, K) = (4, 1)
        >>> plan = mk.make_plan(experts, num_experts=2, capacity=2)
        >>> plan.row_token  # expert 0 keeps tokens 0 and 2, expert 1 token 1; one row is not in use
        tensor([ 0,  2,  1, -1], dtype=torch.int32)
        >>> plan.slot_row.flatten(), plan.dropped  # token 3 came third to expert 0
        (tensor([ 0,  2,  1, -1], dtype=torch.int32), tensor(1, dtype=torch.int32))
    """
    num_tokens = check_choices("make_plan", experts)
    num_experts = check_int("make_plan", "num_experts", num_experts, 1, MOST_EXPERTS, "experts")
    if capacity is not None:
        capacity = check_int("make_plan", "capacity", capacity, 0, INT32_MAX, "rows an expert has room for")
    if priority is not None:
        check_tensor("make_plan", "priority", priority, FLOATING)
        if priority.shape != (num_tokens,) or priority.device != experts.device:
            raise ValueError(
                f"make_plan: priority must be ({num_tokens},) on {experts.device}, one for every token; "
                f"got {tuple(priority.shape)} on {priority.device}"
            )
        priority = priority.detach()
    check_choice("make_plan", "order", order, ORDERS)
    _check_limit("make_plan", limit, num_experts, experts)
    chosen = backends.choose("make_plan", backend, experts)
    if chosen == "reference":
        operators.refuse_unknown_experts(experts, num_experts)
        plan = reference.make_plan(experts, num_experts, capacity=capacity, priority=priority, order=order, limit=limit)
        return RoutingPlan(*plan)
    arrays = operators.make_plan_fwd(experts, num_experts, capacity, priority, order, chosen, limit)
    return RoutingPlan(num_tokens, num_experts, *arrays)


def plan_expert_choice(
    scores: Tensor, capacity: int, *, limit: Tensor | None = None, backend: str | None = None
) -> tuple[RoutingPlan, Tensor]:
    """The plan of experts that choose their tokens: each takes its min(capacity, limit, T) highest scores.

        weights_te = scores_te if expert e takes token t, else 0

    Args:
        scores: (T, E), float32, bfloat16 or float16 (float64 on "reference" and "cpu"), usually a softmax over
            experts. Of equal scores the lower token index is taken first; -0.0 equals 0.0, NaN ranks highest.
        capacity: largest number of tokens that an expert takes, from 0.
        limit: as in make_plan.
        backend: "reference", "cpu" or "triton"; None: automatic choice (see moe_kernels.explain).

    Returns:
        A plan with K = E, where column e of slot_row (T, E) belongs to expert e and row_choice is the row's expert,
        and weights (T, E) in the dtype of scores, for `combine`. A token may be chosen by any number of experts, or by
        none. An expert's rows are in token order. requested equals kept, and dropped is 0.

    Gradient: from weights to the scores of chosen tokens; the choice itself is a constant.

    Raises:
        TypeError: a tensor or number has another type, dtype or layout, or torch.func or forward-mode AD is used.
        ValueError: scores that are not (T, E), a limit that is not () or (E,) on their device, E < 1, capacity < 0,
            T * E above 2^31 - 1.
        BackendError: the named backend cannot run this.

    Source: Zhou et al. 2022; also in the sparse ViT, section 4, and in V-MoE's public code.

    Example:
        >>> scores = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
        >>> plan, weights = mk.plan_expert_choice(scores, capacity=2)
        >>> weights  # expert 0 takes tokens 0 and 1, expert 1 takes tokens 1 and 2
        tensor([[0.9000, 0.0000],
                [0.6000, 0.4000],
                [0.0000, 0.8000]])
    """
    num_tokens, num_experts, capacity = _check_scores("plan_expert_choice", scores, capacity)
    _check_limit("plan_expert_choice", limit, num_experts, scores)
    chosen = backends.choose("plan_expert_choice", backend, scores)
    if chosen == "reference":
        definition, weights = reference.plan_expert_choice(scores, capacity, limit)
        return RoutingPlan(*definition), weights
    arrays = operators.plan_expert_choice_fwd(scores.detach(), capacity, chosen, limit)
    plan = RoutingPlan(num_tokens, num_experts, *arrays)
    return plan, torch.where(plan.slot_row >= 0, scores, 0)


def plan_priority(
    scores: Tensor, capacity: int, *, limit: Tensor | None = None, backend: str | None = None
) -> tuple[RoutingPlan, Tensor]:
    """The plan of the sparse ViT's priority routing: each token gets at most one expert.

    Pairs (token, expert) are visited in descending score, pairs of equal score by token and then by expert. A pair is
    assigned if the token has no expert yet and the expert has fewer than `capacity` tokens, and fewer than `limit`.
    The result is the stable matching of tokens and experts that all prefer higher scores.

    Args:
        scores: (T, E), float32, bfloat16 or float16 (float64 on "reference" and "cpu"), such as the softmax over
            experts. -0.0 equals 0.0, NaN ranks highest.
        capacity: largest number of tokens of an expert, from 0. With ceil(T / E) or more every token gets an expert.
        limit: as in make_plan.
        backend: "reference", "cpu" or "triton"; None: automatic choice (see moe_kernels.explain).

    Returns:
        A plan with K = 1, and weights (T, 1): a token's score for its expert, or 0 for a token without an expert.
        requested[e] counts the tokens that score expert e highest, kept[e] the tokens that expert e got, and dropped
        the tokens without an expert. An expert's rows are in token order.

    Gradient: from weights to the scores of the assigned pairs; the matching itself is a constant.

    Raises:
        TypeError: a tensor or number has another type, dtype or layout, or torch.func or forward-mode AD is used.
        ValueError: scores that are not (T, E), a limit that is not () or (E,) on their device, E < 1, capacity < 0,
            T * E above 2^31 - 1.
        BackendError: the named backend cannot run this.

    Source: sparse ViT, section 4, "priority routing".

    Example:
        >>> scores = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.2, 0.8]])
        >>> plan, weights = mk.plan_priority(scores, capacity=2)
        >>> weights.flatten()  # expert 0 is full with tokens 0 and 2, so token 1 goes to expert 1
        tensor([0.9000, 0.4000, 0.7000, 0.8000])
    """
    num_tokens, num_experts, capacity = _check_scores("plan_priority", scores, capacity)
    _check_limit("plan_priority", limit, num_experts, scores)
    chosen = backends.choose_shapes("plan_priority", backend, scores)
    if chosen == "reference":
        definition, weights = reference.plan_priority(scores, capacity, limit)
        return RoutingPlan(*definition), weights
    *arrays, experts = operators.plan_priority_fwd(scores.detach(), capacity, chosen, limit)
    weights = torch.where(experts < 0, 0, scores.gather(1, experts.clamp(min=0).long()))
    return RoutingPlan(num_tokens, num_experts, *arrays), weights


def expert_capacity(
    num_tokens: int, k: int, num_experts: int, factor: float | str | Decimal | Fraction, multiple_of: int = 1
) -> int:
    """A capacity: ceil(num_tokens * k * factor / num_experts), rounded up to a multiple of `multiple_of`.

    `factor` is read as the decimal that it prints as: expert_capacity(100, 1, 1, 1.1) is 110, while the ceiling of
    100 * 1.1 in binary floats is 111. V-MoE rounds up to a multiple of 4. The result may exceed the number of tokens.

    Raises:
        TypeError: a count is not an int, or factor is not a number or a string.
        ValueError: num_tokens or k < 0, num_experts or multiple_of < 1, a factor that is negative or not finite.

    Source: V-MoE, eq. 4.

    Example:
        >>> mk.expert_capacity(100, 2, 8, 1.05)  # 26.25, rounded up
        27
    """
    for name, value, low in (("num_tokens", num_tokens, 0), ("k", k, 0), ("num_experts", num_experts, 1)):
        check_int("expert_capacity", name, value, low, 2**63 - 1, "a count")
    check_int("expert_capacity", "multiple_of", multiple_of, 1, 2**63 - 1, "a divisor of the capacity")
    return capacity_of(num_tokens, k, num_experts, check_factor("expert_capacity", "factor", factor), multiple_of)


def capacity_of(num_tokens: int, k: int, num_experts: int, ratio: tuple[int, int], multiple_of: int = 1) -> int:
    """expert_capacity for a factor ratio[0] / ratio[1], without checks."""
    capacity = -(-num_tokens * k * ratio[0] // (num_experts * ratio[1]))
    return capacity + -capacity % multiple_of
