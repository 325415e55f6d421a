"""What constructors check, and that modules hand their backend on to every operation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from moe_kernels import nn as mnn
from moe_kernels.ops import _checks
from moe_kernels.papers.models.comparison import LayerwiseMLP, ScoredMLP
from tests.helpers.constructors import constructors
from tests.helpers.layers import EVERY, LAYERS, Operators, found, inputs

D, E, H = 6, 4, 5
REFERENCE: dict[str, Any] = {"backend": "reference"}
# Policies and linear assignment take no backend, and indices are refused before any backend sees them.
WITHOUT_BACKEND = ("harden", "make_plan_fwd", "plan_expert_choice_fwd", "plan_priority_fwd")
POLICIES = (
    partial(mnn.TokenChoice, 1.25, multiple_of=2, group=4, order="token"),
    partial(mnn.ExpertChoice, 1.5, multiple_of=2, group=4),
    mnn.PriorityRouting,
    mnn.NonzeroWeights,
)


def described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)}"
    return getattr(value, "__name__", None) or (repr(value) if type(value).__module__ == "builtins" else str(value))


def test_what_constructors_and_layers_check(stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their limits: check_int(operation, option, value, least, most, meaning)."""
    lines: set[str] = set()
    checks = {each for name, each in vars(_checks).items() if name.startswith("check_")}

    def noting(check: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any, **named: Any) -> Any:
            lines.add(
                ", ".join([f"{check.__name__}: {given[0]}", *map(described, given[1:]), *map(str, named.items())])
            )
            return check(*given, **named)

        return noted

    for name, module in [*sys.modules.items()]:
        if name.startswith(("moe_kernels.nn", "moe_kernels.papers.models")):
            for own, value in [*vars(module).items()]:
                if getattr(value, "__name__", "") == own and value in checks:
                    monkeypatch.setattr(module, own, noting(value))
    for make in (*constructors().values(), *POLICIES):
        make()
    for make in LAYERS.values():
        layer = make()
        found(layer, layer.parameters())
    stored("nn_checks", "\n".join(sorted(lines)))


def run(module: Callable[..., Any], *given: Any) -> set[str]:
    """The operators that forward and backward run, in training and in evaluation without gradients."""
    names: set[str] = set()
    for training in (True, False):
        if isinstance(module, torch.nn.Module):
            module.train(training)
        with Operators() as seen, torch.set_grad_enabled(training):
            out = module(*given)
            outputs = [*tree_leaves(getattr(out, "y", out)), getattr(out, "loss", None)]
            outputs = [each for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad]
            if outputs:
                sum(each.sum() for each in outputs).backward()
        names |= {name for name in seen.names if not name.startswith("refuse_")}
    return names - {*WITHOUT_BACKEND}


def experts(**options: Any) -> mnn.ExpertMLP:
    return mnn.ExpertMLP(E, D, H, **options, **REFERENCE)


TOPK = partial(mnn.TopKGate, D, E, 2, **REFERENCE)
CALLS: dict[str, Callable[[], Callable[..., Any]]] = {
    **{name: partial(lambda make: mnn.MoE(make(**REFERENCE), experts()), EVERY[name])
       for name in ("topk", "vmoe", "tree", "tree, route", "xmoe", "xmoe cosine", "hyper", "ensemble")},
    "swiglu": lambda: mnn.MoE(TOPK(), experts(activation="swiglu", bias=False)),
    "one layer": lambda: mnn.MoE(TOPK(), mnn.ExpertLayer(E, D, H, **REFERENCE)),
    "capacity": lambda: mnn.MoE(TOPK(), experts(), mnn.TokenChoice(1.25)),
    "expert choice": lambda: mnn.MoE(mnn.SoftmaxGate(D, E), experts(), mnn.ExpertChoice(1.5)),
    "priority": lambda: mnn.MoE(mnn.SoftmaxGate(D, E), experts(), mnn.PriorityRouting()),
    "nonzero": lambda: mnn.MoE(mnn.TreeGate(D, E, 2, **REFERENCE), experts(), mnn.NonzeroWeights()),
    "passing": lambda: mnn.MoE(TOPK(), experts(), mnn.TokenChoice(0.5), pass_through=True),
    "dropped experts": lambda: mnn.MoE(TOPK(), experts(dropout=0.1)),
    "tasks": lambda: mnn.MultiGateMoE([TOPK(), TOPK()], experts(), mnn.LocalSearch(E, 50, **REFERENCE)),
    "competition": lambda: mnn.MoE(mnn.CompetitionGate(TOPK(), (own := experts()), rate=1.0), own),
    "permuted": lambda: mnn.MoE(mnn.PermutedGate(TOPK(), mnn.LocalSearch(E, 50, **REFERENCE)), experts()),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_layers_of_experts_run_on_the_backend_that_they_are_given(name: str) -> None:
    if name in ("tasks", "permuted"):
        pytest.importorskip("scipy", reason="hardening needs scipy")
    module = CALLS[name]()
    x, ids = inputs(9)
    assert run(module, x.requires_grad_(), ids) == set()


@pytest.mark.parametrize("make", [mnn.CometMLP, ScoredMLP, LayerwiseMLP])
@pytest.mark.parametrize("activation", ["relu", "softplus"])
def test_comet_runs_on_the_backend_that_it_is_given(make: type[mnn.CometMLP], activation: str) -> None:
    model, x = make((D, 40, 40, 3), 0.25, activation=activation, **REFERENCE), torch.randn(7, D, requires_grad=True)
    assert run(model, x) == set()
    assert run(model.masks, x) == set()
