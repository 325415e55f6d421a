"""No option of a layer is ignored: another value changes what the layer computes, or what it starts from."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

from moe_kernels import nn as mnn
from moe_kernels.nn import policies
from tests.helpers.constructors import IDS, D, E, constructors

T = 24
GENERATOR = {"generator": lambda: torch.Generator().manual_seed(5)}
DTYPE = {"dtype": torch.float64}
# By class: (what else is given, another value of each option).
OPTIONS = [
    ("SoftmaxGate", {}, {"bias": False, "noise": True, "importance": 0.5} | DTYPE),
    ("SoftmaxGate", {"noise": True}, GENERATOR),
    ("TopKGate", {}, {"order": "softmax_topk", "load": 0.5, "importance": 0.5, "balance": 0.5, "z": 0.5} | DTYPE),
    (
        "TopKGate",
        {"noise": None},
        {"bias": False, "noise": "jitter", "scores": "sigmoid", "groups": (2, 1), "scale": 2.0},
    ),
    ("TopKGate", {"noise": None, "scores": "sigmoid"}, {"renormalise": True, "balance_rate": 0.1}),
    ("TopKGate", {}, GENERATOR),
    ("TreeGate", {}, {"trees": 2, "gamma": 0.01, "entropy": 0.5, "bias": False, "parity": "tf"} | GENERATOR | DTYPE),
    ("DSelectKGate", {}, {"gamma": 0.5, "entropy": 0.5} | GENERATOR | DTYPE),
    ("DSelectKGate", {"num_experts": 3, "entropy": 0.5}, {"reciprocal": 0.5}),
    ("XMoEGate", {}, {"embedding": 5, "score": "cosine"} | DTYPE),
    ("XMoEGate", {"score": "cosine"}, {"temperature": 0.7}),
    ("HyperRouterGate", {}, {"hidden": 5} | DTYPE),
    ("StableGate", {}, {"embedding": 5, "balance": 0.1, "distill": 0.1} | DTYPE),
    ("EnsembleGate", {"noise": True}, {"members": 4, "load": 0.5, "importance": 0.5} | GENERATOR | DTYPE),
    ("EnsembleGate", {}, {"noise": True}),
    ("HashGate", {"num_ids": IDS}, {"frequencies": torch.arange(float(IDS))} | GENERATOR),
    ("ManualGate", {"assignment": [0, 1] * 6}, {"num_experts": 5}),
    ("StagedGate", {}, {"second_in_evaluation": True}),
    ("CompetitionGate", {"rate": 1.0}, {"rate": 0.0, "alpha": 0.5, "through_norms": False}),
    ("CompetitionGate", {"rate": 0.5}, {"coin": lambda: torch.Generator().manual_seed(3)}),
    ("LocalSearch", {}, {"permutations": 2, "zeta": 0.5, "renormalise": False, "schedule": "wide", "bound": 0.5}),
    ("LocalSearch", {}, {"noise": 0.5} | GENERATOR | DTYPE),
    ("ExpertMLP", {}, {"out": 4, "activation": "relu", "bias": False, "dropout": 0.5} | DTYPE),
    ("ExpertLayer", {}, {"activation": "gelu", "bias": False, "dropout": 0.5} | DTYPE),
    ("CometFFN", {"hidden": 20}, {"p": 0.2, "activation": "relu", "dropout": 0.5, "ties": "all"} | DTYPE),
    ("MaskedLinear", {}, {"activation": "tanh", "bias": False, "ties": "all"} | DTYPE),
    (
        "CometMLP",
        {"widths": (D, 20, 3)},
        {"p": 0.2, "activation": "tanh", "bias": False, "ties": "all"} | GENERATOR | DTYPE,
    ),
    ("RandomGate", {}, {"inference": "ids"} | GENERATOR),
    ("FixedRouting", {"widths": (D, 9)}, {"p": 0.2, "ties": "all"} | GENERATOR | DTYPE),
    ("MoE", {}, {"policy": policies.TokenChoice(0.5), "expert_dropout": 0.5, "output": "tensor"}),
    ("MoE", {"policy": policies.TokenChoice(0.5)}, {"pass_through": True}),
    ("MultiGateMoE", {}, {"search": lambda: mnn.LocalSearch(E, 5)}),
    ("TokenChoice", {}, {"factor": 0.5}),
    ("TokenChoice", {"factor": 0.5}, {"factor_eval": 1.0, "priority": "max", "order": "token", "multiple_of": 8}),
    ("TokenChoice", {"factor": 0.5}, {"group": 8}),
    ("ExpertChoice", {}, {"factor": 0.5, "multiple_of": 4, "group": 8}),
    ("PriorityRouting", {}, {"factor": 0.5}),
]
CASES = [(name, given, option, value) for name, given, others in OPTIONS for option, value in others.items()]
# backend and reduce change no value here, device has one kind.
WITHOUT = {"backend", "device", "reduce"}
# Stage two alone distils, and no tree is saturated at first: other tests have these options.
ELSEWHERE = {("StagedGate", "distill"), ("TreeGate", "route")}


def parts(value: object) -> list:
    """Everything in nested containers and dataclasses, tensors as (dtype, shape, numbers)."""
    if isinstance(value, torch.Tensor):
        return [(value.dtype, tuple(value.shape), value.detach().flatten().tolist())]
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return [each for name in value for each in (name, *parts(value[name]))]
    if isinstance(value, list | tuple):
        return [each for item in value for each in parts(item)]
    return [value] if isinstance(value, int | float | str | None.__class__) else []


def inputs(layer: torch.nn.Module) -> tuple:
    dtype = next((each.dtype for each in layer.state_dict().values() if each.is_floating_point()), torch.float32)
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(0)).round(decimals=0).to(dtype)  # ties too
    if isinstance(layer, mnn.LocalSearch):
        return (x[:, None, :E].softmax(-1).expand(-1, layer.scores.shape[0], -1),)
    if isinstance(layer, mnn.ExpertMLP | mnn.ExpertLayer):
        return x, mnn.TopKGate(D, E, 2).to(dtype)
    if isinstance(layer, mnn.MaskedLinear):
        return x, x[:, :3]
    return (
        (x,)
        if isinstance(layer, mnn.CometFFN | mnn.FixedRouting | mnn.CometMLP)
        else (x, torch.arange(T) % (2 if isinstance(layer, mnn.EnsembleGate) else IDS))
    )


def behaviour(name: str, given: dict) -> list:
    """What the layer starts from, two forward passes in training with their gradients, and one in evaluation."""
    torch.manual_seed(0)
    given = {key: value() if inspect.isfunction(value) else value for key, value in given.items()}
    if hasattr(policies, name):
        gate, policy = mnn.TopKGate(D, E, 2, order="softmax_topk"), getattr(policies, name)(**given)
        x = torch.randn(T, D)
        return [parts(policy(gate(x), training)) for training in (True, False)]
    layer = constructors()[name](**given)
    found = [parts(dict(layer.state_dict()))]
    x, *rest = inputs(layer)
    if isinstance(layer, mnn.ExpertMLP | mnn.ExpertLayer):
        layer = mnn.MoE(rest.pop(), layer)
    for training in (True, True, False):
        out = layer.train(training)(x.requires_grad_(), *rest)
        found.append(parts(out))
        leaves = [each for each in gradients_of(out) if each.requires_grad]
        if leaves:
            given = torch.autograd.grad(sum(each.double().sum() for each in leaves), x, allow_unused=True)
            found.append(parts(list(given)))
    return found


def gradients_of(out: object) -> list[torch.Tensor]:
    if dataclasses.is_dataclass(out):
        out = [getattr(out, name, None) for name in ("y", "gates", "weights")]
    found = out if isinstance(out, tuple | list) else [out]
    return [each for each in found if isinstance(each, torch.Tensor) and each.is_floating_point()]


@pytest.mark.parametrize(("name", "given", "option", "value"), CASES, ids=[f"{c[0]}-{c[2]}" for c in CASES])
def test_another_value_changes_the_layer(name, given, option, value):
    one, again = behaviour(name, given), behaviour(name, given)
    assert str(one) == str(again)  # else this test could not fail
    assert str(behaviour(name, given | {option: value})) != str(one)


@pytest.mark.parametrize(("name", "given"), [(name, given) for name, given, others in OPTIONS if "bias" in others])
def test_a_layer_without_bias_has_none(name, given):
    layer = constructors()[name](**given, bias=False)
    assert not [each for each in layer.state_dict() if "bias" in each or each.startswith("b_")]
    assert [each for each in constructors()[name](**given).state_dict() if "bias" in each or each.startswith("b_")]


def test_every_layer_is_here():
    layers = {name for name in mnn.__all__ if inspect.isclass(getattr(mnn, name))}
    layers = {name for name in layers if issubclass(getattr(mnn, name), torch.nn.Module)}
    assert layers - constructors().keys() == {"Experts", "Gate"}  # bases of others


def test_every_option_is_here():
    for name, make in constructors().items():
        known = {option for case, _, option, _ in CASES if case == name} | WITHOUT
        parameters = inspect.signature(make.func.__init__).parameters.values()
        optional = {each.name for each in parameters if each.default is not inspect.Parameter.empty}
        assert {(name, option) for option in optional - known} <= ELSEWHERE
