"""Operators of plans, dispatch and combine."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import python_ref.combine as combine
import python_ref.plan as plans
from tests.helpers.operators.operator import (
    INT32_MAX,
    Call,
    Given,
    Operator,
    Rule,
    computed,
    gradients,
    need,
    wide,
    within,
)

# The choices of small plans: expert 0 has room for 3 of its 5 requests, and two rows are not in use.
CHOICES, EXPERTS, ROOM = ((0, 1), (0, 2), (0, -1), (0, 1), (2, 0)), 3, 3


def small_plan(capacity: int | None = ROOM) -> dict[str, Tensor]:
    """The arrays of a plan that operators take."""
    made = plans.make_plan(torch.tensor(CHOICES), EXPERTS, capacity=capacity)
    return {name: getattr(made, name) for name in ("row_token", "slot_row", "expert_offsets", "row_choice")}


def arrays(*names: str, capacity: int | None = ROOM) -> dict[str, Tensor]:
    made = small_plan(capacity)
    return {name: made[name] for name in names}


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(repr(shape).encode()))).to(dtype)


INDEX: dict[str, tuple[int, Callable[[Given], int]]] = {
    "row_token": (-1, lambda s: s.T),
    "slot_row": (-1, lambda s: s.R),
    "row_choice": (-1, lambda s: s.K),
    "expert_offsets": (0, lambda s: s.R + 1),
}


def rises(offsets: Tensor, num_rows: int) -> bool:
    """Whether offsets rise from 0 to at most num_rows."""
    bounds = offsets.tolist()
    return bool(bounds) and bounds[0] == 0 and bounds[-1] <= num_rows and bounds == sorted(bounds)


def agree(s: Given) -> bool:
    """Whether the arrays of a plan are in range and agree with each other. Those that a call lacks may be anything."""
    tokens, k = s.slot_row.shape
    row_token, row_choice = getattr(s, "row_token", None), getattr(s, "row_choice", None)
    offsets, num_rows = getattr(s, "expert_offsets", None), s.R
    if num_rows > tokens * k or not within(s.slot_row, -1, num_rows):
        return False
    if offsets is not None and not rises(offsets, num_rows):
        return False
    rows = s.slot_row.flatten().tolist()
    used = num_rows if offsets is None else int(offsets[-1])
    kept = sorted(row for row in rows if row >= 0)
    if kept != (list(range(used)) if offsets is not None else sorted(set(kept))):
        return False
    owner = {row: divmod(slot, max(k, 1)) for slot, row in enumerate(rows) if row >= 0}
    wanted = [owner.get(row, (-1, -1)) for row in range(num_rows)]
    if row_token is not None and row_token.tolist() != [token for token, _ in wanted]:
        return False
    return row_choice is None or row_choice.tolist() == [choice for _, choice in wanted]


PLAN: tuple[Rule, ...] = ((agree, "row_token slot_row expert_offsets row_choice"),)
ENDS: Rule = (lambda s: s.P >= 1, "expert_offsets")


def ends(offsets: Tensor, num_rows: int) -> bool:
    """Whether the last offset, the only one that some operators read, is in range."""
    return 0 <= int(offsets[-1]) <= num_rows


def clear_unused(rows: Tensor, offsets: Tensor) -> Tensor:
    need(ends(offsets, rows.shape[0]), "expert_offsets")
    return torch.where(torch.arange(rows.shape[0])[:, None] < offsets[-1], rows, 0)


def gathered(x: Tensor, row_token: Tensor) -> Tensor:
    need(within(row_token, -1, x.shape[0]), "row_token")
    return torch.cat([x, x.new_zeros(1, x.shape[1])])[row_token.long()]


def _combined(s: Given, rows: Tensor, weights: Tensor | None) -> Tensor:
    need(within(s.slot_row, -1, rows.shape[0]), "slot_row")
    return combine.combine(rows, s, weights)


def _dispatch(dtype: torch.dtype) -> dict[str, Call]:
    names = "row_token", "slot_row", "expert_offsets"
    return {
        "capacity": {"x": random(dtype, 5, 7), **arrays(*names), "backend": "cpu"},
        "wide": {"x": random(dtype, 5, 37), **arrays(*names, capacity=None), "backend": "cpu"},
    }


def _combine_fwd(dtype: torch.dtype) -> dict[str, Call]:
    names, weights = ("row_token", "slot_row", "expert_offsets", "row_choice"), random(computed(dtype), 5, 2)
    return {
        "weights": {"rows": random(dtype, 9, 7), "weights": weights, **arrays(*names), "backend": "cpu"},
        "none": {
            "rows": random(dtype, 10, 37),
            "weights": None,
            **arrays(*names[:3], capacity=None),
            "row_choice": None,
            "backend": "cpu",
        },
    }


def _combine_bwd(dtype: torch.dtype) -> dict[str, Call]:
    def call(num_rows: int, dim: int, capacity: int | None) -> Call:
        given = {"grad": random(dtype, 5, dim), "rows": random(dtype, num_rows, dim)}
        given["weights"] = random(computed(dtype), 5, 2)
        return {
            **given,
            **arrays("row_token", "slot_row", "expert_offsets", "row_choice", capacity=capacity),
            "backend": "cpu",
        }

    return {"capacity": call(9, 7, ROOM), "wide": call(10, 37, None)}


def _combine_gradients(s: Given) -> tuple[Tensor, ...]:
    leaves = wide(s.rows, s.weights)
    need(ends(s.expert_offsets, s.rows.shape[0]), "expert_offsets")
    return gradients(_combined(s, *leaves), s.grad, leaves, [True, True])


def _make_plan(dtype: torch.dtype) -> dict[str, Call]:
    experts, priority = torch.tensor(CHOICES), random(dtype, 5)
    return {
        "priority": {
            "experts": experts,
            "num_experts": EXPERTS,
            "capacity": ROOM,
            "priority": priority,
            "order": "choice",
            "backend": "cpu",
            "limit": torch.tensor([2, 9, -1], dtype=torch.int32),
        },
        "int32": {
            "experts": torch.cat([experts, experts.flip(0), experts]).int(),
            "num_experts": 4,
            "capacity": None,
            "priority": None,
            "order": "token",
            "backend": "cpu",
            "limit": None,
        },
    }


def _planned(s: Given) -> tuple[Tensor, ...]:
    need(within(s.experts, -1, s.num_experts), "experts")
    options: dict[str, Any] = {"capacity": s.capacity, "priority": s.priority, "order": s.order, "limit": s.limit}
    return plans.make_plan(s.experts, s.num_experts, **options)[2:]


def _scores(dtype: torch.dtype) -> dict[str, Call]:
    limit = torch.tensor([2, 9, -1], dtype=torch.int32)
    return {
        "small": {"scores": random(dtype, 7, 3).softmax(1), "capacity": 2, "backend": "cpu", "limit": limit},
        "many experts": {"scores": random(dtype, 5, 19).softmax(1), "capacity": 3, "backend": "cpu", "limit": None},
    }


def _by_priority(s: Given) -> tuple[Tensor, ...]:
    made = plans.plan_priority(s.scores, s.capacity, s.limit)[0]
    expert = torch.searchsorted(made.expert_offsets[1:], made.slot_row.clamp(min=0), right=True, out_int32=True)
    return *made[2:], torch.where(made.slot_row >= 0, expert, -1)


def _refuse_rows(s: Given) -> tuple[()]:
    need(within(s.slot_row, -1, s.num_rows), "slot_row")
    need(within(s.row_token, -1, s.slot_row.shape[0]), "row_token")
    need(s.expert_offsets is None or ends(s.expert_offsets, s.num_rows), "expert_offsets")
    return ()


def _refuse_groups(s: Given) -> tuple[()]:
    num_rows = (s.rows if s.row_token is None else s.row_token).shape[0]
    need(rises(s.expert_offsets, num_rows), "expert_offsets")
    need(within(s.row_token, -1, s.rows.shape[0]), "row_token")
    return ()


def _refuse_experts(s: Given) -> tuple[()]:
    need(within(s.experts, -1, s.num_experts), "experts")
    return ()


CAPACITY = {"capacity": (0, lambda s: INT32_MAX)}
LIMIT: Rule = (lambda s: s.limit is None or s.limit.shape in ((), (s.E,)), "limit scores")
SOFT_EXPERTS: tuple[Rule, ...] = ((lambda s: within(s.experts, -1, s.num_experts), "experts num_experts"),)

OPERATORS = {
    "dispatch_fwd": Operator(
        {"x": "f T D", "row_token": "i R", "slot_row": "i T K", "expert_offsets": "i P"},
        _dispatch,
        lambda s: (clear_unused(gathered(s.x, s.row_token), s.expert_offsets),),
        index=INDEX,
        rules=(ENDS,),
        soft=PLAN,
        exact=True,
    ),
    "combine_fwd": Operator(
        {
            "rows": "f R D",
            "weights": "c T K",
            "row_token": "i R",
            "slot_row": "i T K",
            "expert_offsets": "i P",
            "row_choice": "i R",
        },
        _combine_fwd,
        lambda s: (_combined(s, s.rows.double(), None if s.weights is None else s.weights.double()),),
        index=INDEX,
        rules=(ENDS,),
        soft=PLAN,
    ),
    "combine_bwd": Operator(
        {
            "grad": "f T D",
            "rows": "f R D",
            "weights": "c T K",
            "row_token": "i R",
            "slot_row": "i T K",
            "expert_offsets": "i P",
            "row_choice": "i R",
        },
        _combine_bwd,
        _combine_gradients,
        index=INDEX,
        rules=(ENDS,),
        soft=PLAN,
    ),
    "make_plan_fwd": Operator(
        {"experts": "ij T K", "priority": "any T", "limit": "i ..."},
        _make_plan,
        _planned,
        rules=((lambda s: s.limit is None or s.limit.shape in ((), (s.num_experts,)), "limit num_experts"),),
        ints={"num_experts": (1, lambda s: INT32_MAX), **CAPACITY},
        choices={"order": ("choice", "token")},
        index={"experts": (-1, lambda s: s.num_experts)},
        soft=SOFT_EXPERTS,
        exact=True,
    ),
    "plan_expert_choice_fwd": Operator(
        {"scores": "f T E", "limit": "i ..."},
        _scores,
        lambda s: plans.plan_expert_choice(s.scores, s.capacity, s.limit)[0][2:],
        ints=CAPACITY,
        rules=((lambda s: s.E >= 1, "scores"), LIMIT),
        exact=True,
        backends=("cpu", "triton"),
    ),
    "plan_priority_fwd": Operator(
        {"scores": "f T E", "limit": "i ..."},
        _scores,
        _by_priority,
        ints=CAPACITY,
        rules=((lambda s: s.E >= 1, "scores"), LIMIT),
        exact=True,
        backends=("cpu", "triton"),
    ),
    "refuse_bad_rows": Operator(
        {"slot_row": "i T K", "row_token": "i R", "expert_offsets": "i P"},
        lambda dtype: {
            "all": {
                "op": "refuse_bad_rows",
                **arrays("slot_row"),
                "num_rows": 9,
                **arrays("row_token", "expert_offsets"),
            }
        },
        _refuse_rows,
        index=INDEX,
        soft=((lambda s: s.num_rows == s.R, "num_rows"), *PLAN),
        loose=True,
        free=frozenset({"op", "num_rows"}),
    ),
    "refuse_bad_groups": Operator(
        {"expert_offsets": "i P", "rows": "f T D", "row_token": "i R"},
        lambda dtype: {"all": {**arrays("expert_offsets"), "rows": random(dtype, 5, 7), **arrays("row_token")}},
        _refuse_groups,
        index={name: INDEX[name] for name in ("expert_offsets", "row_token")},
        soft=((lambda s: rises(s.expert_offsets, s.R), "expert_offsets"),),
        loose=True,
        families=("grouped_gemm",),
    ),
    "refuse_unknown_experts": Operator(
        {"experts": "ij T K"},
        lambda dtype: {"int64": {"experts": torch.tensor(CHOICES), "num_experts": EXPERTS}},
        _refuse_experts,
        index={"experts": (-1, lambda s: s.num_experts)},
        soft=SOFT_EXPERTS,
        loose=True,
        free=frozenset({"num_experts"}),
        families=("make_plan",),
    ),
}
