"""Tests of routing plans."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_kernels as mk
from moe_kernels import backends
from moe_kernels.verify import threads, verify
from tests.helpers.inputs import padded
from tests.helpers.targets import Target, reason_to_skip

OP = "make_plan"
ARRAYS = ("expert_offsets", "row_token", "row_choice", "slot_row", "requested", "kept", "dropped")
NAN = math.nan


def rows_of(plan: mk.RoutingPlan) -> list[list[tuple[int, int]]]:
    """For each expert, the (token, choice) of each of its rows."""
    offsets = plan.expert_offsets.tolist()
    rows = list(zip(plan.row_token.tolist(), plan.row_choice.tolist(), strict=True))
    return [rows[first:last] for first, last in itertools.pairwise(offsets)]


def arrivals(experts, num_experts, capacity, priority, order) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """The definition as a loop: each expert's kept (token, choice), in visiting order, and its number of requests."""
    tokens = range(len(experts))
    if priority is not None:
        key = [(math.inf, 1) if math.isnan(p) else (p, 0) for p in priority]  # NaN above +inf
        tokens = sorted(tokens, key=lambda t: key[t], reverse=True)  # stable: ties keep their order
    k = len(experts[0]) if experts else 0
    if order == "choice":
        requests = [(t, c) for c in range(k) for t in tokens]
    else:
        requests = [(t, c) for t in tokens for c in range(k)]
    kept, requested = [[] for _ in range(num_experts)], [0] * num_experts
    for t, c in requests:
        e = experts[t][c]
        if e >= 0:
            if capacity is None or requested[e] < capacity:
                kept[e].append((t, c))
            requested[e] += 1
    return kept, requested


def assert_same(plan: mk.RoutingPlan, expected: mk.RoutingPlan) -> None:
    for name in ARRAYS:
        got, want = getattr(plan, name).cpu(), getattr(expected, name).cpu()
        assert got.dtype == want.dtype == torch.int32
        assert torch.equal(got, want), name


def assert_consistent(plan: mk.RoutingPlan) -> None:
    offsets, used = plan.expert_offsets.tolist(), int(plan.expert_offsets[-1])
    assert offsets[0] == 0
    assert plan.kept.tolist() == [last - first for first, last in itertools.pairwise(offsets)]
    assert int(plan.dropped) == int(plan.requested.sum()) - used
    assert (plan.row_token[used:] == -1).all()
    assert (plan.row_choice[used:] == -1).all()
    assert int((plan.slot_row >= 0).sum()) == used
    token, choice = plan.row_token[:used].long(), plan.row_choice[:used].long()
    assert torch.equal(plan.slot_row[token, choice], torch.arange(used, dtype=torch.int32))


# --- examples by hand -----------------------------------------------------------------------------------------------

GATES = torch.tensor(
    [
        [0.50, 0.30, 0.20],  # token 0: experts 0, 1; max .50, sum .80
        [0.60, 0.10, 0.30],  # token 1: experts 0, 2; max .60, sum .90
        [0.48, 0.47, 0.05],  # token 2: experts 0, 1; max .48, sum .95
        [0.20, 0.70, 0.10],  # token 3: experts 1, 0; max .70, sum .90
    ]
)


def test_vanilla_and_batch_priority_are_three_results(target):
    _, experts = mk.topk_gate(GATES.log(), 2, order="softmax_topk", backend="reference")
    top = GATES.topk(2).values
    policies = {
        # Tokens that request expert 0, first choices | second choices: 0 1 2 | 3. Expert 1: 3 | 0 2. Expert 2: | 1.
        "vanilla": (None, [[(0, 0), (1, 0)], [(3, 0), (0, 1)], [(1, 1)]]),
        # Tokens by maximum: 3 1 0 2. Expert 0: 1 0 2 | 3. Expert 1: 3 | 0 2.
        "max": (top[:, 0], [[(1, 0), (0, 0)], [(3, 0), (0, 1)], [(1, 1)]]),
        # Tokens by sum: 2 1 3 0 (1 and 3 are equal: by position). Expert 0: 2 1 0 | 3. Expert 1: 3 | 2 0.
        "sum": (torch.tensor([0.80, 0.90, 0.95, 0.90]), [[(2, 0), (1, 0)], [(3, 0), (2, 1)], [(1, 1)]]),
    }
    for priority, kept in policies.values():
        priority = priority if priority is None else priority.to(target.device)
        plan = mk.make_plan(experts.to(target.device), 3, capacity=2, priority=priority, backend=target.backend)
        assert rows_of(plan) == kept
        assert plan.requested.tolist() == [4, 3, 1]
        assert plan.kept.tolist() == [2, 2, 1]
        assert int(plan.dropped) == 3


def test_order_token_lets_an_early_second_choice_win(target):
    experts = torch.tensor([[0, 1], [1, 0]], device=target.device)
    by_choice = mk.make_plan(experts, 2, capacity=1, backend=target.backend)
    by_token = mk.make_plan(experts, 2, capacity=1, order="token", backend=target.backend)
    assert rows_of(by_choice) == [[(0, 0)], [(1, 0)]]
    assert rows_of(by_token) == [[(0, 0)], [(0, 1)]]


def test_the_docstring_example(target):
    experts = torch.tensor([[0, 1], [0, 1], [0, 1], [1, 0]], device=target.device)
    plan = mk.make_plan(experts, 2, capacity=2, backend=target.backend)
    assert plan.expert_offsets.tolist() == [0, 2, 4]
    assert plan.row_token.tolist() == [0, 1, 3, 0]
    assert plan.row_choice.tolist() == [0, 0, 0, 1]
    assert plan.slot_row.tolist() == [[0, 3], [1, -1], [-1, -1], [2, -1]]
    assert plan.slot_expert.tolist() == [[0, 1], [0, -1], [-1, -1], [1, -1]]
    assert plan.used.tolist() == [[True, True], [True, False], [False, False], [False, True]]
    assert plan.dropped_share == 0.5
    assert plan.imbalance == 1.0
    uneven = mk.make_plan(torch.tensor([[0], [0], [0], [1]]), 2, capacity=1)  # expert 0 has three requests
    assert (uneven.imbalance, uneven.dropped_share) == (1.5, 0.5)
    none = mk.make_plan(torch.full((2, 1), -1), 3)
    assert none.dropped_share == none.imbalance == 0
    busy = dataclasses.replace(uneven, requested=torch.tensor([2**31 - 1, 0], dtype=torch.int32))
    assert busy.imbalance == 2


def test_capacity_rounds_as_v_moe_does():
    assert mk.expert_capacity(8 * 49, 2, 8, 1.05) == 103  # 102.9, rounded up
    assert mk.expert_capacity(8 * 49, 2, 8, 1.05, 4) == 104
    assert mk.expert_capacity(400, 2, 32, 1.05, 4) == 28  # 26.25 -> 27 -> 28
    assert mk.expert_capacity(64, 1, 4, 1.0, 4) == 16
    assert mk.expert_capacity(100, 1, 1, 1.1) == 110  # the float product is 110.00000000000001
    assert mk.expert_capacity(0, 2, 4, 1.5) == 0
    assert mk.expert_capacity(10, 1, 3, "0.5") == 2
    for bad in ((-1, 1, 1, 1.0), (1, 1, 0, 1.0), (1, 1, 1, -0.5), (1, 1, 1, NAN), (1, 1, 1, math.inf), (1, 1, 1, 1, 0)):
        with pytest.raises(ValueError, match="expert_capacity"):
            mk.expert_capacity(*bad)


def need(target: Target, op: str) -> None:
    reason = reason_to_skip(target, op)
    if reason is not None:
        pytest.skip(reason)


def test_experts_choose_by_hand(target):
    need(target, "plan_expert_choice")
    scores = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.5, 0.8], [0.2, 0.8]], device=target.device)
    plan, weights = mk.plan_expert_choice(scores, 2, backend=target.backend)
    assert rows_of(plan) == [[(0, 0), (1, 0)], [(2, 1), (3, 1)]]  # tokens 1 and 2 tie for expert 0: 1 wins
    assert torch.equal(weights, torch.tensor([[0.9, 0], [0.5, 0], [0, 0.8], [0, 0.8]], device=target.device))
    assert plan.requested.tolist() == plan.kept.tolist() == [2, 2]


def test_priority_routing_by_hand(target):
    need(target, "plan_priority")
    scores = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.7, 0.3], [0.8, 0.2]], device=target.device)
    plan, weights = mk.plan_priority(scores, 2, backend=target.backend)
    assert rows_of(plan) == [[(1, 0), (3, 0)], [(0, 0), (2, 0)]]  # expert 0: tokens 1 and 3 rank above 0 and 2
    assert torch.equal(weights, torch.tensor([[0.4], [0.9], [0.3], [0.8]], device=target.device))
    assert plan.requested.tolist() == [4, 0]
    plan, weights = mk.plan_priority(scores, 1, backend=target.backend)
    assert rows_of(plan) == [[(1, 0)], [(0, 0)]]  # 0.4, of token 0, is the highest score for expert 1
    assert int(plan.dropped) == 2
    assert weights[2:].tolist() == [[0], [0]]


# --- every backend against the definition ---------------------------------------------------------------------------


def choices(kind: str, tokens: int, k: int, num_experts: int) -> torch.Tensor:
    if kind == "one expert":
        return torch.full((tokens, k), num_experts - 1)
    if kind == "zipf":
        return torch.multinomial(1 / torch.arange(1, num_experts + 1) ** 1.2, max(tokens * k, 1), True)[
            : tokens * k
        ].view(tokens, k)
    low = -1 if kind == "some none" else 0
    return torch.randint(low, max(num_experts // 2, 1) if kind == "half empty" else num_experts, (tokens, k))


PRIORITIES = {
    "none": lambda tokens: None,
    "distinct": torch.randn,
    "equal": lambda tokens: torch.zeros(tokens),
    "few values": lambda tokens: torch.randint(0, 3, (tokens,)).float(),
    "special": lambda tokens: torch.tensor([NAN, math.inf, -math.inf, 0.0, -0.0, -NAN])[torch.randint(6, (tokens,))],
}
SHAPES = [(0, 2, 3), (1, 1, 1), (5, 0, 4), (33, 2, 7), (40, 4, 4), (70, 1, 1), (64, 3, 130)]  # T, K, E


@pytest.mark.parametrize("kind", ["uniform", "zipf", "one expert", "half empty", "some none"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plans_are_the_reference(target, shape, kind):
    tokens, k, num_experts = shape
    for index, make in enumerate(PRIORITIES.values()):
        experts = choices(kind, tokens, k, num_experts).to(torch.int32 if index % 2 else torch.int64)
        priority = make(tokens)
        for order in ("choice", "token"):
            for capacity in (None, 0, 1, 9, 1000) if index == 0 or not target.interpreted else (3,):
                expected = mk.make_plan(
                    experts, num_experts, capacity=capacity, priority=priority, order=order, backend="reference"
                )
                plan = mk.make_plan(
                    experts.to(target.device),
                    num_experts,
                    capacity=capacity,
                    priority=None if priority is None else priority.to(target.device),
                    order=order,
                    backend=target.backend,
                )
                assert_same(plan, expected)
                bound = tokens * k if capacity is None else min(tokens * k, num_experts * capacity)
                assert plan.num_rows == bound


@pytest.mark.parametrize("tokens", [512, 528, 544])
def test_as_many_chunks_as_a_block_has_warps(target, tokens):
    """GPU kernels split the choices into chunks: here into 32, 33 and 34."""
    if target.backend == "cuda":
        tokens *= 32
    experts = torch.randint(-1, 9, (tokens, 2))
    plan = mk.make_plan(experts.to(target.device), 9, backend=target.backend)
    assert_same(plan, mk.make_plan(experts, 9, backend="reference"))


@pytest.mark.parametrize("order", ["choice", "token"])
def test_chunks_of_many_tiles_and_windows_of_experts(target, monkeypatch, order):
    """GPU kernels split choices into chunks, chunks into tiles, and experts into windows of at most 1024."""
    if target.backend == "triton":
        monkeypatch.setattr(backends.load("triton", OP), "CHUNKS", 2)
    if target.backend == "cuda":
        two = lambda experts, num_experts, order: experts.new_empty((2, num_experts), dtype=torch.int32)  # noqa: E731
        monkeypatch.setattr(backends.load("cuda", OP), "plan_counts", two)
    tokens = 1301 if target.backend == "cuda" else 301
    for num_experts in (9, 1100):
        experts = torch.randint(-1, num_experts, (tokens, 2))
        experts[::3], experts[1::3, 0], experts[2::3] = num_experts - 1, 0, -1
        priority = torch.randn(tokens)
        for capacity in (None, 7):
            expected, plan = (
                mk.make_plan(
                    experts.to(device),
                    num_experts,
                    capacity=capacity,
                    priority=priority.to(device),
                    order=order,
                    backend=backend,
                )
                for device, backend in (("cpu", "reference"), (target.device, target.backend))
            )
            assert_same(plan, expected)


@pytest.mark.parametrize("tiles", [1024, 1025])
def test_the_most_chunks(target, tiles):
    """GPU kernels divide the tiles of 32 choices (CUDA: 1024) among at most 1024 chunks: 1025 tiles make 513 chunks."""
    if target.interpreted:
        pytest.skip("interpreted kernels would take a minute for so many programs")
    tokens = tiles * (512 if target.backend == "cuda" else 16)
    experts = torch.randint(-1, 9, (tokens, 2))
    expected = mk.make_plan(experts, 9, capacity=tokens // 6, backend="reference")
    plan = mk.make_plan(experts.to(target.device), 9, capacity=tokens // 6, backend=target.backend)
    assert_same(plan, expected)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_reference_is_the_definition(data):
    num_experts, k = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 3))
    row = st.lists(st.integers(-1, num_experts - 1), min_size=k, max_size=k)
    experts = data.draw(st.lists(row, max_size=12))
    capacity = data.draw(st.none() | st.integers(0, 4))
    value = st.sampled_from([NAN, math.inf, -math.inf, -1.0, -0.0, 0.0, 2.0])
    priority = data.draw(st.none() | st.lists(value, min_size=len(experts), max_size=len(experts)))
    order = data.draw(st.sampled_from(["choice", "token"]))
    kept, requested = arrivals(experts, num_experts, capacity, priority, order)
    for backend in ("reference", "cpu"):
        plan = mk.make_plan(
            torch.tensor(experts, dtype=torch.int64).view(len(experts), k),
            num_experts,
            capacity=capacity,
            priority=None if priority is None else torch.tensor(priority, dtype=torch.float32),
            order=order,
            backend=backend,
        )
        assert rows_of(plan) == kept
        assert plan.requested.tolist() == requested
        assert_consistent(plan)


def scores_of(kind: str, tokens: int, num_experts: int, dtype: torch.dtype) -> torch.Tensor:
    if kind == "ties":
        return torch.randint(-1, 2, (tokens, num_experts)).to(dtype)
    if kind == "same for all":  # all tokens rank the experts alike
        return torch.arange(num_experts).to(dtype).expand(tokens, -1) + torch.arange(tokens)[:, None].to(dtype)
    if kind == "special":
        pool = torch.tensor([NAN, math.inf, -math.inf, 0.0, -0.0, 1.0])
        return pool[torch.randint(6, (tokens, num_experts))].to(dtype)
    return torch.rand(tokens, num_experts).softmax(-1).to(dtype)


@pytest.mark.parametrize("policy", ["plan_expert_choice", "plan_priority"])
@pytest.mark.parametrize("kind", ["softmax", "ties", "same for all", "special"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_policies_are_the_reference(target, policy, kind, dtype):
    need(target, policy)
    if dtype == torch.float64 and target.backend != "cpu":
        pytest.skip("GPU kernels take no float64 scores")
    shapes = ((0, 3), (33, 1), (40, 7)) if target.interpreted else ((0, 3), (1, 1), (33, 1), (40, 7), (70, 20))
    for tokens, num_experts in shapes:
        scores = scores_of(kind, tokens, num_experts, dtype)
        for capacity in {0, 1, -(-tokens // num_experts), tokens + 3}:
            expected, want = getattr(mk, policy)(scores, capacity, backend="reference")
            plan, weights = getattr(mk, policy)(scores.to(target.device), capacity, backend=target.backend)
            assert_same(plan, expected)
            assert torch.equal(weights.cpu().nan_to_num(7.0), want.nan_to_num(7.0))
            assert_consistent(expected)


@pytest.mark.parametrize("kind", ["softmax", "ties", "same for all"])
def test_several_windows_of_pairs(target, kind):
    """Triton's priority routing reads 1024 pairs of a token and an expert at a time: `few` has 1200 pairs. Triton's
    expert choice pads up to 2048 tokens: `many` has more."""
    few, many = scores_of(kind, 60, 20, torch.float32), scores_of(kind, 2100, 2, torch.float32)
    for policy, capacity in itertools.product(("plan_priority", "plan_expert_choice"), (2, 3, 60)):
        need(target, policy)
        scores = many if (policy, capacity) == ("plan_expert_choice", 60) and not target.interpreted else few
        expected, want = getattr(mk, policy)(scores, capacity, backend="reference")
        plan, weights = getattr(mk, policy)(scores.to(target.device), capacity, backend=target.backend)
        assert_same(plan, expected)
        assert torch.equal(weights.cpu(), want)


def test_index_arrays_and_priorities_that_are_views(target):
    experts, priority = torch.randint(-1, 5, (40, 3)), torch.rand(40)
    for order in ("choice", "token"):
        expected = mk.make_plan(experts, 5, capacity=9, priority=priority, order=order, backend="reference")
        wide = torch.full((42, 7), 4)
        wide[1:-1, 1:-1:2] = experts
        views = [wide.to(target.device)[1:-1, 1:-1:2], experts.t().contiguous().to(target.device).t()]
        second = torch.stack([priority, torch.full((40,), NAN)], 1).to(target.device)[:, 0]
        for view in views:
            plan = mk.make_plan(view, 5, capacity=9, priority=second, order=order, backend=target.backend)
            assert_same(plan, expected)


@pytest.mark.parametrize("policy", ["plan_expert_choice", "plan_priority"])
def test_scores_that_are_views(target, policy):
    need(target, policy)
    scores = torch.rand(40, 7, device=target.device)
    expected, want = getattr(mk, policy)(scores, 6, backend="reference")
    for view in (padded(scores), scores.t().contiguous().t(), torch.stack([scores, scores], -1)[..., 0]):
        plan, weights = getattr(mk, policy)(view, 6, backend=target.backend)
        assert_same(plan, expected)
        assert torch.equal(weights, want)


def test_priorities_that_only_float64_tells_apart(target):
    experts, priority = torch.zeros(9, 1, dtype=torch.int32), 1 + torch.arange(9).double() * 1e-12
    expected = mk.make_plan(experts, 1, capacity=4, priority=priority, backend="reference")
    assert expected.row_token.tolist() == [8, 7, 6, 5]
    experts, priority = experts.to(target.device), priority.to(target.device)
    assert_same(mk.make_plan(experts, 1, capacity=4, priority=priority, backend=target.backend), expected)


@pytest.mark.parametrize("policy", ["plan_expert_choice", "plan_priority"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_gradient_of_a_policy_goes_to_the_scores_it_used(policy, backend):
    scores = torch.rand(9, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: getattr(mk, policy)(s, 3, backend=backend)[1], (scores,))


@pytest.mark.parametrize("num_experts", [1, 64, 1024])
def test_many_tokens_and_threads(num_experts):
    experts = torch.randint(-1, num_experts, (20000, 2))
    priority = torch.rand(20000).bfloat16()
    for order in ("choice", "token"):
        given = {"capacity": 50, "priority": priority, "order": order}
        expected = mk.make_plan(experts, num_experts, **given, backend="reference")
        for count in (1, 2, 3):
            with threads(count):
                assert_same(mk.make_plan(experts, num_experts, **given), expected)
    scores = torch.rand(3000, 40).bfloat16()
    expected, _ = mk.plan_expert_choice(scores, 100, backend="reference")
    for count in (1, 2, 3):
        with threads(count):
            assert_same(mk.plan_expert_choice(scores, 100)[0], expected)


# --- bad ids, bad input ---------------------------------------------------------------------------------------------


def test_invalid_ids_raise_on_the_cpu_and_count_as_none_in_a_kernel(target):
    experts = torch.tensor([[0, 5], [-2, 1], [2**32, 1], [2, 0]], device=target.device)
    if target.device == "cpu":
        for backend in ("reference", target.backend):
            with pytest.raises(ValueError, match=r"make_plan: experts must be from -1 \(none\) to 1; got -2 to"):
                mk.make_plan(experts, 2, backend=backend)
            for index in (-2, 2, 2**31 - 1, -(2**31), 2**32, -(2**32), 2**63 - 1, -(2**63)):
                for dtype in (torch.int32, torch.int64)[index not in range(-(2**31), 2**31) :]:
                    one = torch.tensor([[1, -1, index]], dtype=dtype)
                    with pytest.raises(ValueError, match=rf"got {min(index, -1)} to {max(index, 1)}$"):
                        mk.make_plan(one, 2, backend=backend)
    if target.backend == "cpu":  # its make_plan_fwd refuses such ids too
        return
    experts[0, 1] = 2**32 + 1  # its lower 32 bits are expert 1
    arrays = backends.load(target.backend, OP).make_plan_fwd(experts, 2, None, None, "choice")
    expected = mk.make_plan(torch.tensor([[0, -1], [-1, 1], [-1, 1], [-1, 0]]), 2, backend="reference")
    for got, name in zip(arrays, ARRAYS, strict=True):
        assert torch.equal(got.cpu(), getattr(expected, name)), name


E = torch.tensor([[0, 1], [1, 0]])
BAD = [
    (lambda: mk.make_plan(E.float(), 2), TypeError, "experts must have dtype int32, int64; got float32"),
    (lambda: mk.make_plan(E[0], 2), ValueError, r"experts must be \(T, K\), got shape \(2,\)"),
    (lambda: mk.make_plan(E, 0), ValueError, "num_experts must be from 1 to"),
    (lambda: mk.make_plan(E, 2.0), TypeError, "num_experts must be an int"),
    (lambda: mk.make_plan(E, 2, capacity=-1), ValueError, "capacity must be from 0 to"),
    (lambda: mk.make_plan(E, 2, capacity=1.5), TypeError, "capacity must be an int, got float"),
    (lambda: mk.make_plan(E, 2, order="row"), ValueError, "order must be one of 'choice', 'token'; got 'row'"),
    (lambda: mk.make_plan(E, 2, priority=E[0]), TypeError, "priority must have dtype float32"),
    (lambda: mk.make_plan(E, 2, priority=torch.rand(3)), ValueError, r"priority must be \(2,\) on cpu"),
    (lambda: mk.make_plan(E, 2, priority=torch.rand(2, 1)), ValueError, r"priority must be \(2,\) on cpu"),
    (lambda: mk.make_plan(E[:1, :1].expand(2**16, 2**15), 2), ValueError, r"T \* K must be at most 2\^31 - 1"),
    (lambda: mk.plan_expert_choice(E, 2), TypeError, "scores must have dtype"),
    (lambda: mk.plan_expert_choice(torch.rand(2, 0), 2), ValueError, "at least one expert"),
    (lambda: mk.plan_expert_choice(torch.rand(2, 2), -2), ValueError, "capacity must be from 0"),
    (lambda: mk.plan_priority(torch.rand(1, 1).expand(2**16, 2**15), 1), ValueError, r"T \* E must be at most"),
    (lambda: mk.plan_priority(torch.rand(2), 1), ValueError, r"scores must be \(T, E\)"),
]


@pytest.mark.parametrize(("call", "error", "words"), BAD)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=f"^(make_plan|plan_expert_choice|plan_priority): .*{words}"):
        call()


# --- padded rows, missing kernels -----------------------------------------------------------------------------------


def test_padded_and_back():
    plan = mk.make_plan(torch.tensor([[0, 2], [0, -1], [1, 0], [0, 2]]), 4, capacity=3)
    rows = torch.randn(plan.num_rows, 5, dtype=torch.float64, requires_grad=True)
    used = int(plan.expert_offsets[-1])
    padded = plan.to_padded(rows, 3)
    for e, (first, count) in enumerate(zip(plan.expert_offsets.tolist(), plan.kept.tolist(), strict=False)):
        assert torch.equal(padded[e, :count], rows[first : first + count])
        assert not padded[e, count:].any()
    back = plan.from_padded(padded)
    assert torch.equal(back[:used], rows[:used])
    assert not back[used:].any()
    assert not plan.from_padded(torch.ones_like(padded))[used:].any()
    assert not plan.from_padded(torch.full_like(padded, torch.nan))[used:].any()
    nans = plan.to_padded(torch.full_like(rows, torch.nan), 3)
    assert torch.equal(nans.isnan(), padded != 0)  # empty slots are zeros, whatever the rows hold
    slots = (
        torch.arange(used)
        - plan.expert_offsets[plan.slot_expert[plan.row_token[:used].long(), plan.row_choice[:used].long()].long()]
    )[:, None]
    assert torch.equal(plan.from_padded(plan.to_padded(rows, 2))[:used], torch.where(slots < 2, rows[:used], 0))
    assert torch.autograd.gradcheck(lambda r: plan.from_padded(plan.to_padded(r, 2)), (rows,))
    assert plan.to_padded(rows, 0).shape == (4, 0, 5)
    empty = mk.make_plan(torch.zeros(0, 2, dtype=torch.int32), 3)
    assert empty.to_padded(torch.zeros(0, 5), 2).shape == (3, 2, 5)
    with pytest.raises(ValueError, match="to_padded: expected 2 dimensions, the first of size 8; got"):
        plan.to_padded(rows[:3], 3)


def test_a_missing_kernel_is_not_a_failure(target):
    """`verify` reports a kernel that does not exist as "not run". Of these operations CUDA has only make_plan."""
    rows = list(verify(["make_plan", "plan_expert_choice", "plan_priority"], [target.backend]))
    assert {row.verdict for row in rows if row.operation == "make_plan"} == {"ok"}, rows
    others = {row.verdict for row in rows if row.operation != "make_plan"}
    assert "not run" in others if target.backend == "cuda" else "ok" in others, rows
    assert others <= {"ok", "not run"}, rows  # Triton takes no float64 scores
