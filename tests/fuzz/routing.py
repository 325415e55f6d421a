"""Fuzzed cases of the routing plans, dispatch and combine, and of expert_capacity and k_from_fraction."""

from __future__ import annotations

import random
from fractions import Fraction
from functools import partial

import torch

import moe_kernels as mk
from moe_kernels import RoutingPlan
from moe_kernels.cases.call import Call, Inputs
from moe_kernels.cases.combine import COMBINE
from moe_kernels.cases.dispatch import DISPATCH
from moe_kernels.cases.plan import PLAN_PRIORITY
from moe_kernels.cases.routing import shapes
from moe_kernels.ops.plan import ORDERS
from moe_kernels.verify.operation import Outputs
from tests.fuzz.operation import Fuzzed, without_kernels
from tests.fuzz.values import KINDS, Spec, describe, make, size, tensors

FINITE = ("normal", "ties", "constant", "zeros", "large", "tiny")
LIMITS = (None, None, "one", "each")
ROUTINGS = ("uniform", "one expert", "no choice", "some without", "skewed")


def draw_routing(draw: random.Random, tokens: int = 65, max_experts: int = 33, k: int = 5) -> Spec:
    spec = {"tokens": size(draw, tokens), "k": size(draw, k), "experts": size(draw, max_experts, 1)}
    if draw.random() < 0.03:
        spec |= {"tokens": draw.randint(0, 700), "experts": draw.randint(1, 300)}
    capacity = draw.choice((None, None, 0, 1, 2, 5, 40))
    return spec | {"capacity": capacity, "routing": draw.choice(ROUTINGS), "order": draw.choice(ORDERS)}


def experts_of(spec: Spec) -> torch.Tensor:
    """The chosen experts (T, K), -1 for no expert; int32 for odd seeds, else int64."""
    generator = torch.Generator().manual_seed(spec["seed"])
    shape, count = (spec["tokens"], spec["k"]), spec["experts"]
    experts = torch.randint(count, shape, generator=generator)
    if spec["routing"] == "one expert":
        experts = torch.full(shape, count - 1)
    elif spec["routing"] == "skewed":
        experts = (torch.rand(shape, generator=generator) ** 4 * count).long()
    elif spec["routing"] == "no choice":
        experts = torch.full(shape, -1)
    elif spec["routing"] == "some without":
        experts = experts.masked_fill(torch.rand(shape, generator=generator) < 0.4, -1)
    return experts.int() if spec["seed"] % 2 else experts


def _limit_of(spec: Spec) -> torch.Tensor | None:
    """A limit for all experts or for each: from below zero to more than most have requests."""
    if spec["limit"] is None:
        return None
    shape = () if spec["limit"] == "one" else (spec["experts"],)
    generator = torch.Generator().manual_seed(spec["seed"] + 1)
    return torch.randint(-1, 8, shape, generator=generator, dtype=torch.int32)


def plan_of(spec: Spec) -> RoutingPlan:
    options = {"capacity": spec["capacity"], "order": spec["order"], "backend": "reference"}
    return mk.make_plan(experts_of(spec), spec["experts"], **options)


def _draw_plan(draw: random.Random) -> Spec:
    spec = draw_routing(draw) | {"priority": draw.random() < 0.4, "limit": draw.choice(LIMITS)}
    return spec | describe(draw, "priority")


def _build_plan(spec: Spec) -> Inputs:
    priority = make(spec, "priority", spec["tokens"]) if spec["priority"] else None
    given = {"experts": experts_of(spec), "num_experts": spec["experts"], "capacity": spec["capacity"]}
    return given | {"priority": priority, "order": spec["order"], "limit": _limit_of(spec)}


def _draw_scores(draw: random.Random) -> Spec:
    spec = {"tokens": size(draw, 65), "experts": size(draw, 33, 1), "capacity": size(draw, 70)}
    spec |= {"limit": draw.choice(LIMITS)}
    return spec | describe(draw, "scores", "grad")


def _build_scores(spec: Spec) -> Inputs:
    sizes = dict.fromkeys(PLAN_PRIORITY.tensors, (spec["tokens"], spec["experts"]))
    return {**tensors(spec, PLAN_PRIORITY, sizes), "capacity": spec["capacity"], "limit": _limit_of(spec)}


def _draw_moving(draw: random.Random, kinds: tuple[str, ...]) -> Spec:
    spec = draw_routing(draw) | {"dim": size(draw, 130), "weights": draw.random() < 0.7}
    return spec | describe(draw, "rows", "weights", kinds=FINITE) | describe(draw, "x", kinds=kinds)


def _build_moving(spec: Spec, call: Call) -> Inputs:
    plan = plan_of(spec)
    sizes = {"T": plan.num_tokens, "R": plan.num_rows, "D": spec["dim"], "K": spec["k"]}
    found = tensors(spec, call, shapes(sizes))
    return {**found, "plan": plan, "weights": found.get("weights") if spec["weights"] else None}


def _draw_counts(draw: random.Random) -> Spec:
    counts = {"tokens": draw.randint(0, 10**6), "k": draw.randint(0, 64), "experts": draw.randint(1, 4096)}
    return counts | {"factor": draw.randint(0, 4000), "multiple": draw.randint(1, 9), "n": draw.randint(1, 10**6)}


def _run_counts(spec: Inputs, backend: str) -> Outputs:
    """expert_capacity and k_from_fraction, which must be exact for decimals; "reference" computes with Fraction."""
    tokens, k, experts, multiple, n = (spec[name] for name in ("tokens", "k", "experts", "multiple", "n"))
    exact, p = Fraction(spec["factor"], 1000), Fraction(min(spec["factor"], 1000) or 1, 1000)
    if backend == "reference":
        rows = -((-tokens * k * exact) // experts)
        found = [int(-(-rows // multiple) * multiple), max(1, int(p * n))]
    else:
        rows = mk.expert_capacity(tokens, k, experts, float(exact), multiple)
        found = [rows, mk.k_from_fraction(float(p), n)]
    return {"counts": torch.tensor(found)}


def has_experts(spec: Spec) -> bool:
    return bool(spec["experts"] >= 1)


def _countable(spec: Spec) -> bool:
    return min(spec["experts"], spec["multiple"], spec["n"]) >= 1


OPERATIONS = {
    "make_plan": Fuzzed(_draw_plan, _build_plan, has_experts, weight=2),
    # Only x, which dispatch copies, may be "special" (with NaN, infinities and the largest numbers). The other tensors
    # enter sums, and whether a sum of the largest numbers overflows depends on its order.
    "dispatch": Fuzzed(partial(_draw_moving, kinds=KINDS), partial(_build_moving, call=DISPATCH), has_experts),
    "combine": Fuzzed(partial(_draw_moving, kinds=FINITE), partial(_build_moving, call=COMBINE), has_experts, weight=2),
    "counts": Fuzzed(
        _draw_counts,
        lambda spec: {name: each for name, each in spec.items() if isinstance(each, int)},
        _countable,
        dtypes=("float32",),
        own=without_kernels(_run_counts, "counts"),
    ),
    "plan_expert_choice": Fuzzed(_draw_scores, _build_scores, has_experts),
    "plan_priority": Fuzzed(_draw_scores, _build_scores, has_experts),
}
