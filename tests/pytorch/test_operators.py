"""Runs torch.library.opcheck on every registered operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils._pytree import tree_map_only

import moe_kernels as mk
from moe_kernels import backends
from moe_kernels.ops._define import operators
from moe_kernels.ops.kwta import pack_bits

T, E, K, D, H = 7, 3, 2, 8, 6
Calls = dict[str, list[tuple[Any, ...]]]  # operator -> the arguments of its calls


def leaf(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, device=device).requires_grad_()


def of_kwta(b: str, device: str) -> Calls:
    x, values = leaf(3, 40, device=device), leaf(3, 40, device=device)
    bits = pack_bits(torch.rand(3, 40, device=device) < 0.5)
    return {
        "kwta_fwd": [(x, values, 5, "index", True, b), (x, None, 5, "strict", False, b)],
        "kwta_bwd": [(x, bits, b)],
        "kwta_mask": [(x, 5, "all", b)],
        "kwta_linear_fwd": [
            (leaf(3, D, device=device), leaf(40, D, device=device), bias, bits, 5, b)
            for bias in (None, leaf(40, device=device))
        ],
    }


def of_topk_gate(b: str, device: str) -> Calls:
    logits, given = leaf(T, E, device=device), {}
    for order in ("topk_softmax", "softmax_topk"):
        weights, experts = operators.topk_gate_fwd(logits.detach(), K, order, b)
        saved = logits if order == "softmax_topk" else None
        given[order] = (leaf(T, K, device=device), weights, experts, saved, E, torch.float32, b)
    scored = (logits, K, "sigmoid", b, torch.rand(E, device=device), 3, 2, True, 2.5)
    weights, experts = operators.topk_gate_fwd(logits.detach(), *scored[1:])
    back = (leaf(T, K, device=device), weights, experts, logits, E, torch.float32, b, "sigmoid", True, 2.5)
    return {
        "topk_gate_fwd": [*((logits, K, order, b) for order in given), scored, (*scored, experts.long())],
        "topk_gate_bwd": [*given.values(), back],
        "refuse_bad_forced": [(experts, E)],
        "count_requests": [
            (torch.zeros(E, device=device), torch.ones(E, device=device), experts),
        ],
    }


def of_plans(b: str, device: str) -> Calls:
    experts, scores = torch.randint(-1, E, (T, K), device=device), torch.rand(T, E, device=device)
    limit = torch.arange(1, E + 1, dtype=torch.int32, device=device)
    return {
        "refuse_unknown_experts": [(experts, E)],
        "make_plan_fwd": [
            (experts, E, 3, torch.rand(T, device=device), "choice", b),
            (experts.int(), E, None, None, "token", b),
            (experts, E, None, None, "choice", b, limit[0]),
        ],
        "plan_expert_choice_fwd": [(scores, 3, b), (scores, 3, b, limit)],
        "plan_priority_fwd": [(scores, 3, b), (scores, 3, b, limit[0])],
    }


def a_plan(device: str) -> mk.RoutingPlan:
    return mk.make_plan(torch.randint(-1, E, (T, K), device=device), E, capacity=4, backend="reference")


def of_rows(b: str, device: str) -> Calls:
    plan = a_plan(device)
    rows, weights = leaf(plan.num_rows, D, device=device), leaf(T, K, device=device)
    arrays = plan.row_token, plan.slot_row, plan.expert_offsets
    return {
        "refuse_bad_rows": [("dispatch", plan.slot_row, plan.num_rows, plan.row_token, plan.expert_offsets)],
        "dispatch_fwd": [(leaf(T, D, device=device), *arrays, b)],
        "combine_fwd": [(rows, weights, *arrays, plan.row_choice, b), (rows, None, *arrays, None, b)],
        "combine_bwd": [(leaf(T, D, device=device), rows, weights, *arrays, plan.row_choice, b)],
    }


def of_experts(b: str, device: str) -> Calls:
    plan = a_plan(device)
    x, weights = leaf(T, D, device=device), leaf(T, K, device=device)
    w_in, w_out = leaf(E, D, 2 * H, device=device), leaf(E, H, D, device=device)
    b_in, b_out = leaf(E, 2 * H, device=device), leaf(E, D, device=device)
    offsets, token = plan.expert_offsets, plan.row_token
    pre, grad_rows = leaf(plan.num_rows, 2 * H, device=device), leaf(plan.num_rows, H, device=device)
    mlp = x, weights, w_in, w_out, b_in, b_out, offsets, token, plan.row_choice, plan.slot_row
    grad = leaf(T, D, device=device)
    norms = x, w_in, w_out, b_in, b_out
    found: Calls = {
        "refuse_bad_groups": [(offsets, x, token)],
        "grouped_gemm_fwd": [
            (x, w_in, offsets, token, b_in, "swiglu", True, b),
            (x, w_in, offsets, token, None, "gelu", False, b),
        ],
        "grouped_gemm_bwd": [
            (grad_rows, x, w_in.mT.contiguous().mT, offsets, token, b_in, pre, "swiglu", [True, True, True], b),
            (grad_rows, x, w_in, offsets, token, b_in, pre, "swiglu", [True, True, True], b),
            (pre, x, w_in, offsets, token, None, None, "gelu", [False, True, False], b),
        ],
        "swiglu_clamped": [(pre, 1.702, 0.9)],
        "swiglu_clamped_bwd": [(grad_rows, pre, 1.702, 0.9)],
        "expert_mlp_fwd": [(*mlp, "geglu", keep, b) for keep in (True, False)],
        "expert_mlp_of_choices": [
            (*mlp[:6], torch.randint(-1, E + 1, (T, K), device=device), "geglu", b),
            (x, None, *mlp[2:4], None, None, torch.randint(-1, E, (T, K), device=device).int(), "geglu", b),
        ],
        "expert_mlp_bwd": [
            (grad, *mlp, pre, "geglu", [True] * 6, b),
            (grad, *mlp, None, "geglu", [False, True, False, True, False, False], b),
        ],
        "expert_norms_fwd": [
            (*norms, "swiglu", b),
            (*norms, "swiglu", b, 2),
            (*(each.detach().bfloat16() for each in norms), "swiglu", b),
        ],
        "expert_norms_bwd": [
            (leaf(T, E, device=device), *norms, leaf(T, E, device=device), "swiglu", [True] * 5, b),
            (leaf(T, E, device=device), *norms, leaf(T, E, device=device), "swiglu", [True] * 5, b, 2),
        ],
    }
    if b == "cpu":
        saved = leaf(E, T, 2 * H), leaf(E, T, D)
        found["expert_norms_bwd"].append((leaf(T, E), *norms, leaf(T, E), "swiglu", [True] * 5, b, None, *saved))
        found["expert_norms_kept_fwd"] = [(*norms, "swiglu", b)]
    return found


def of_sinkhorn(b: str, device: str) -> Calls:
    scores, grad = leaf(2, 4, 4, device=device), leaf(2, 4, 4, device=device)
    taus, sums = torch.tensor([1.0, 0.5], dtype=torch.float64), torch.ones(2, 4, dtype=torch.float64, device=device)
    sums = sums.requires_grad_()
    return {
        "sinkhorn_fwd": [
            (scores, taus, 3, None, None, -1.0, False, b),
            (scores, taus, 3, sums, sums, 0.1, False, b),
            (scores, torch.ones(2, dtype=torch.float64), 300, None, None, -1.0, True, b),
        ],
        "sinkhorn_bwd": [
            (grad, scores, taus, 3, None, None, -1.0, b),
            (grad, scores, taus, 3, sums, sums, 0.1, b),
        ],
        "sinkhorn_implicit_bwd": [(grad, torch.full((2, 4, 4), 0.25, device=device), taus)],
    }


def of_trees(b: str, device: str) -> Calls:
    x, split, leaves = leaf(T, D, device=device), leaf(K, E - 1, D, device=device), leaf(K, E, D, device=device)
    given = x, split, leaves, leaf(K, E - 1, device=device), leaf(K, E, device=device)
    logits = leaf(T, K, E - 1, device=device), leaf(T, K, E, device=device)
    grads = leaf(T, E, device=device), leaf(T, K, E, device=device)
    into = *logits, logits[0], x, split, leaves, 1.0
    found = {
        "tree_gate_fwd": [(*given, 1.0, "", b), (*given[:3], None, None, 1.0, "tf", b)],
        "tree_gate_bwd": [(*grads, *logits, 1.0, "", b), (grads[0], None, *logits, 1.0, "bert", b)],
        "tree_gate_logits_bwd": [(*into, [True] * 3, b), (*into, [False, True, False], b)],
    }
    if b == "cpu":
        found["tree_route_fwd"] = [(*given, 1.0, b)]
    return found


def on_the_cpu(b: str, device: str) -> Calls:
    return {"harden": [(torch.rand(2, 4, 4),)]}


GROUPS = (of_kwta, of_topk_gate, of_plans, of_rows, of_experts, of_sinkhorn, of_trees, on_the_cpu)
NAMES = sorted(vars(operators))

# Backward operators that have a derivative.
TWICE = ("kwta_bwd", "combine_bwd")


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    checked = 0
    for group in GROUPS:
        for given in group("cpu", "cpu").get(name, []):
            if (not name.endswith(("_fwd", "clamped")) and name not in TWICE) or name == "tree_route_fwd":
                given = tree_map_only(Tensor, Tensor.detach, given)
            opcheck(getattr(operators, name), given)
            checked += 1
    assert checked, f"{name} has no arguments here"


@pytest.mark.parametrize("group", GROUPS[:-1], ids=lambda group: group.__name__)
def test_opcheck_of_triton(group):
    if backends.missing("triton", "kwta"):
        pytest.skip(str(backends.missing("triton", "kwta")))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, calls in group("triton", device).items():
        given = tree_map_only(Tensor, Tensor.detach, calls[0])
        opcheck(getattr(operators, name), given, test_utils=("test_schema", "test_faketensor"))
