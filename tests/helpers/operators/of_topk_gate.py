"""Operators of the top-k gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import python_ref.topk_gate as topk_gate
from tests.helpers.operators.of_routing import random
from tests.helpers.operators.operator import INT32_MAX, Call, Given, Operator, computed, need, within

ORDERS = ("topk_softmax", "softmax_topk")
LARGEST = torch.finfo(torch.float32).max
RULES = (*ORDERS, "sigmoid")
PLAIN = {
    "bias": None, "num_groups": 0, "kept_groups": 0, "renormalise": False, "scale": 1.0, "forced": None,
}  # fmt: skip


def _fwd(dtype: torch.dtype) -> dict[str, Call]:
    def call(n: int, order: str, **more: Any) -> Call:
        return {"logits": random(dtype, 5, n), "k": 2, "order": order, "backend": "cpu"} | PLAIN | more

    bias = torch.linspace(-1, 1, 6)
    groups = {"num_groups": 3, "kept_groups": 2}
    forced = torch.tensor([[0, 5], [-1, -1], [3, -1], [-1, 0], [2, 4]])
    return {
        ORDERS[0]: call(3, ORDERS[0]),
        ORDERS[1]: call(40, ORDERS[1]),
        "sigmoid": call(6, "sigmoid", bias=bias, **groups, renormalise=True, scale=2.5),
        "forced int64": call(6, ORDERS[1], forced=forced, scale=0.5),
        "forced int16": call(6, "sigmoid", forced=forced.short(), **groups),
    }


def _choices(s: Given) -> tuple[Tensor, Tensor]:
    if s.forced is not None:
        need(within(s.forced, -1, s.E) and _distinct(s.forced), "forced")
    rule = {"scores": "sigmoid"} if s.order == "sigmoid" else {"order": s.order}
    groups = (s.num_groups, s.kept_groups) if s.num_groups else None
    return topk_gate.topk_gate(
        s.logits.to(computed(s.logits.dtype)), s.k, **rule, bias=s.bias, groups=groups, renormalise=s.renormalise,
        scale=s.scale, forced=s.forced,
    )  # fmt: skip


def _distinct(experts: Tensor) -> bool:
    ordered = experts.sort(1).values
    return not bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any())


def _fits(s: Given) -> bool:
    return s.num_groups == 0 or (s.E % s.num_groups == 0 and s.k <= s.kept_groups * (s.E // s.num_groups))


def _bwd(dtype: torch.dtype) -> dict[str, Call]:
    def call(n: int, chosen_by: str, order: str, renormalise: bool = False, scale: float = 1.0) -> Call:
        logits = random(dtype, 5, n)
        weights, experts = topk_gate.topk_gate(logits.to(computed(dtype)), 2, order=chosen_by)
        return {
            "grad": random(computed(dtype), 5, 2), "weights": weights, "experts": experts,
            "logits": None if (order, chosen_by) == ("", ORDERS[0]) else logits, "num_experts": n, "dtype": dtype,
            "backend": "cpu", "order": order, "renormalise": renormalise, "scale": scale,
        }  # fmt: skip

    return {
        ORDERS[0]: call(3, ORDERS[0], ""),
        ORDERS[1]: call(40, ORDERS[1], ""),
        "scaled": call(6, ORDERS[0], ORDERS[0], scale=0.5),
        "softmax first, renormalised": call(6, ORDERS[0], ORDERS[1], True),
        "sigmoid": call(6, ORDERS[0], "sigmoid", True, 2.5),
    }


def _gradient(s: Given) -> tuple[Tensor]:
    need(within(s.experts, 0, s.num_experts), "experts")
    weights, grad, index = s.weights.double(), s.grad.double(), s.experts.long()
    if s.order != "":
        logits = s.logits.detach().double().requires_grad_()
        if s.order == "sigmoid":
            found = logits.gather(1, index).sigmoid()
        elif s.order == ORDERS[0]:
            found = logits.gather(1, index).softmax(1)
        else:
            found = logits.softmax(1).gather(1, index)
        if s.renormalise:
            found = found / (found.sum(1, keepdim=True) + 1e-20)
        return (torch.autograd.grad(found * s.scale, logits, grad)[0].to(s.dtype),)
    mean = (weights * grad).sum(1, keepdim=True)
    if s.logits is None:
        zeros = torch.zeros(grad.shape[0], s.num_experts, dtype=torch.float64)
        return (zeros.scatter(1, index, weights * (grad - mean)).to(s.dtype),)
    logits = s.logits.double()
    first = logits.gather(1, index[:, :1]) if index.shape[1] else 0.0
    shares = weights[:, :1] * (logits - first).exp()  # softmax(logits), if the weights are from there
    return ((shares * (torch.zeros_like(shares).scatter(1, index, grad) - mean)).to(s.dtype),)


def _refuse_forced(s: Given) -> tuple[()]:
    need(within(s.forced, -1, s.num_experts) and _distinct(s.forced), "forced")
    return ()


def _counts(dtype: torch.dtype) -> dict[str, Call]:
    experts = torch.tensor([[0, 2], [-1, 2], [1, 7]], dtype=torch.int32)
    return {"": {"loads": torch.ones(3), "counted": torch.ones(3), "experts": experts}}


OPERATORS = {
    "count_requests": Operator(
        {"loads": "c32 E", "counted": "c32 E", "experts": "i T K"},
        _counts,
        lambda s: (),
    ),
    "topk_gate_fwd": Operator(
        {"logits": "f T E", "bias": "c32 E", "forced": "short T K"},
        _fwd,
        _choices,
        ints={
            "k": (0, lambda s: s.E),
            "num_groups": (0, lambda s: max(s.E, 1)),
            "kept_groups": (0, lambda s: s.num_groups),
        },
        choices={"order": RULES},
        floats={"scale": lambda s: abs(s.scale) <= LARGEST},
        index={"forced": (-1, lambda s: s.E)},
        rules=(
            (_fits, "num_groups kept_groups logits k"),
            (lambda s: s.k == s.K, "k forced"),
            (lambda s: within(s.forced, -1, s.E) and _distinct(s.forced), "forced"),
        ),
    ),
    "topk_gate_bwd": Operator(
        {"grad": "c T K", "weights": "c T K", "experts": "i T K", "logits": "f T E", "dtype": "f"},
        _bwd,
        _gradient,
        ints={"num_experts": (0, lambda s: getattr(s, "E", INT32_MAX))},
        floats={"scale": lambda s: abs(s.scale) <= LARGEST},
        choices={"order": ("", *RULES)},
        index={"experts": (0, lambda s: s.num_experts)},
        rules=(
            (lambda s: s.num_experts == s.E, "num_experts logits"),
            (lambda s: s.order == "" or s.logits is not None, "order logits"),
        ),
        soft=(
            (lambda s: within(s.experts, 0, s.num_experts) and _distinct(s.experts), "experts"),
            (lambda s: s.num_experts <= 2**20 // max(s.T, 1), "num_experts"),
        ),
        saved=("weights", "logits"),
    ),
    "refuse_bad_forced": Operator(
        {"forced": "short T K"},
        lambda dtype: {"int16": {"forced": torch.tensor([[0, -1, 4], [-1, -1, 2]]).short(), "num_experts": 5}},
        _refuse_forced,
        index={"forced": (-1, lambda s: s.num_experts)},
        loose=True,
        free=frozenset({"num_experts"}),
        families=("topk_gate",),
    ),
}
