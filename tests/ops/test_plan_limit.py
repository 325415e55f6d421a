"""Tests of plans with a `limit`: the most rows of an expert, as a tensor on the device."""

from __future__ import annotations

import itertools

import pytest
import torch

import moe_kernels as mk
from moe_kernels.ops._define import operators
from tests.helpers.targets import on_every_target

plans, choosing, matching = map(on_every_target, ("make_plan", "plan_expert_choice", "plan_priority"))
ARRAYS = ("expert_offsets", "row_token", "row_choice", "slot_row", "requested", "kept", "dropped")
Rows = list[list[tuple[int, int]]]


def limits(num_experts: int) -> list[torch.Tensor]:
    """One for all experts, and one for each: negative, zero, small and larger than any number of requests."""
    each = torch.randint(-2, 9, (num_experts,), dtype=torch.int32)
    each[::4] = torch.iinfo(torch.int32).max
    strided = torch.stack([each, each + 1], 1)[:, 0]
    return [torch.tensor(3, dtype=torch.int32), torch.tensor(-1, dtype=torch.int32), each, strided]


def rows_of(plan: mk.RoutingPlan) -> Rows:
    rows = list(zip(plan.row_token.tolist(), plan.row_choice.tolist(), strict=True))
    return [rows[first:last] for first, last in itertools.pairwise(plan.expert_offsets.tolist())]


def room(limit: torch.Tensor, capacity: int | None, num_experts: int) -> list[int]:
    """The most rows of each expert."""
    most = 10**6 if capacity is None else capacity
    return [max(0, min(most, each)) for each in limit.expand(num_experts).tolist()]


def arrivals(experts: list[list[int]], most: list[int], tokens: list[int], order: str) -> tuple[Rows, list[int]]:
    """The kept (token, choice) of each expert, and its number of requests, in a loop over the requests."""
    k = len(experts[0])
    visited = (
        [(t, c) for c in range(k) for t in tokens] if order == "choice" else [(t, c) for t in tokens for c in range(k)]
    )
    kept: Rows = [[] for _ in most]
    requested = [0] * len(most)
    for t, c in visited:
        expert = experts[t][c]
        if expert >= 0:
            if requested[expert] < most[expert]:
                kept[expert].append((t, c))
            requested[expert] += 1
    return kept, requested


@pytest.mark.parametrize("shape", [(33, 2, 7), (70, 1, 1), (64, 3, 130), (300, 2, 1100)], ids=str)
def test_a_request_is_kept_below_the_capacity_and_the_limit(plans, shape):
    tokens, k, num_experts = shape
    for number, limit in enumerate(limits(num_experts)):
        experts = torch.randint(-1, max(num_experts // 3, 1), (tokens, k))
        priority = torch.rand(tokens) if number % 2 else None
        visited = list(range(tokens)) if priority is None else priority.argsort(descending=True).tolist()
        for capacity, order in (None, "choice"), (4, "token"), (0, "choice"):
            options = {"capacity": capacity, "order": order, "backend": plans.backend}
            plan = mk.make_plan(
                experts.to(plans.device),
                num_experts,
                priority=None if priority is None else priority.to(plans.device),
                limit=limit.to(plans.device),
                **options,
            )
            most = room(limit, capacity, num_experts)
            kept, requested = arrivals(experts.tolist(), most, visited, order)
            assert rows_of(plan) == kept
            assert plan.requested.tolist() == requested
            assert plan.kept.tolist() == [len(rows) for rows in kept]
            assert int(plan.dropped) == sum(requested) - sum(map(len, kept))
            assert int((plan.slot_row >= 0).sum()) == sum(map(len, kept))
            used = sum(map(len, kept))
            assert (plan.row_token[used:] == -1).all()
            assert plan.num_rows == (tokens * k if capacity is None else min(tokens * k, num_experts * capacity))


def test_an_expert_takes_its_best_tokens_up_to_the_limit(choosing):
    for (tokens, num_experts), dtype in ((40, 7), torch.float32), ((1, 1), torch.float32), ((33, 5), torch.bfloat16):
        scores = torch.randint(0, 9, (tokens, num_experts)).to(dtype)
        for limit, capacity in itertools.product(limits(num_experts), (0, 3, tokens + 2)):
            plan, weights = mk.plan_expert_choice(
                scores.to(choosing.device), capacity, limit=limit.to(choosing.device), backend=choosing.backend
            )
            for expert, most in enumerate(room(limit, capacity, num_experts)):
                column = scores[:, expert].float().tolist()
                best = sorted(sorted(range(tokens), key=lambda t: -column[t])[:most])
                assert rows_of(plan)[expert] == [(token, expert) for token in best]
                assert torch.equal(weights[best, expert].cpu(), scores[best, expert])
                assert int((weights[:, expert] != 0).sum()) <= len(best)
            assert torch.equal(plan.requested, plan.kept)
            assert int(plan.dropped) == 0


def test_priority_routing_fills_experts_up_to_their_limits(matching):
    for tokens, num_experts in (40, 7), (1, 1), (30, 4):
        scores = torch.rand(tokens, num_experts)
        for limit, capacity in itertools.product(limits(num_experts), (0, 3, tokens + 2)):
            free, left = set(range(tokens)), room(limit, capacity, num_experts)
            found: Rows = [[] for _ in left]
            for pair in scores.flatten().argsort(descending=True).tolist():
                token, expert = divmod(pair, num_experts)
                if token in free and left[expert] > 0:
                    free.remove(token)
                    left[expert] -= 1
                    found[expert].append((token, 0))
            plan, _ = mk.plan_priority(
                scores.to(matching.device), capacity, limit=limit.to(matching.device), backend=matching.backend
            )
            assert rows_of(plan) == [sorted(each) for each in found]
            assert int(plan.dropped) == len(free)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("op", ["make_plan", "plan_expert_choice", "plan_priority"])
def test_a_limit_of_another_kind_is_refused(op, backend):
    given = (torch.zeros(4, 2, dtype=torch.int32), 3) if op == "make_plan" else (torch.rand(4, 3), 2)
    call = getattr(mk, op)
    for limit, error, words in (
        (torch.tensor(2), TypeError, "limit must have dtype int32; got int64"),
        (2, TypeError, "limit must be a Tensor, got int"),
        (torch.zeros(2, dtype=torch.int32), ValueError, r"limit must be \(\) or \(3,\), the most rows .*; got \(2,\)"),
        (torch.zeros(1, dtype=torch.int32), ValueError, r"limit must be \(\) or \(3,\)"),
        (torch.zeros((), dtype=torch.int32, device="meta"), ValueError, "limit must be .* on cpu; got .* on meta"),
    ):
        with pytest.raises(error, match=f"{op}: {words}"):
            call(*given, limit=limit, backend=backend)


def test_operators_without_a_limit_are_those_of_before():
    """Exported programs that were saved before operators had a limit call them without it."""
    experts, scores = torch.randint(3, (9, 2)), torch.rand(9, 3)
    for old, new in (
        (operators.make_plan_fwd(experts, 3, 4, None, "choice", "cpu"), mk.make_plan(experts, 3, capacity=4)),
        (operators.plan_expert_choice_fwd(scores, 4, "cpu"), mk.plan_expert_choice(scores, 4)[0]),
        (operators.plan_priority_fwd(scores, 4, "cpu"), mk.plan_priority(scores, 4)[0]),
    ):
        for name, array in zip(ARRAYS, old, strict=False):
            assert torch.equal(array, getattr(new, name)), name


def test_a_limit_is_traced():
    """torch.compile and torch.export with dynamic tokens: the limit is a tensor, on which nothing specialises."""

    def planned(experts, limit):
        plan = mk.make_plan(experts, 5, capacity=experts.shape[0], limit=limit)
        return plan.slot_row, plan.kept

    module = torch.nn.Module()
    module.forward = planned
    tokens = torch.export.Dim("tokens", max=10**6)
    experts, limit = torch.randint(5, (12, 2)), torch.tensor(2, dtype=torch.int32)
    program = torch.export.export(module, (experts, limit), dynamic_shapes=({0: tokens}, None)).module()
    compiled = torch.compile(planned, fullgraph=True, dynamic=True, backend="eager")
    for count, most in (12, 2), (40, 1), (7, 0):
        given = torch.randint(5, (count, 2)), torch.tensor(most, dtype=torch.int32)
        for run in program, compiled:
            for got, want in zip(run(*given), planned(*given), strict=True):
                assert torch.equal(got, want)
