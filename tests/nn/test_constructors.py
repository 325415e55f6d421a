"""Constructors of layers and models refuse wrong options with an error that names the option."""

from __future__ import annotations

import math

import pytest
import torch

from moe_kernels import nn as mnn
from moe_kernels.papers import models
from tests.helpers.constructors import D, E, constructors

COEFFICIENTS = {
    "SoftmaxGate": ["importance"],
    "TopKGate": ["importance", "load", "balance", "z"],
    "TreeGate": ["entropy"],
    "DSelectKGate": ["entropy", "reciprocal"],
    "StableGate": ["balance", "distill"],
    "StagedGate": ["distill"],
    "CompetitionGate": ["alpha", "rate"],
    "LocalSearch": ["zeta", "bound", "noise"],
    "XMoEGate": ["temperature"],
    "ExpertMLP": ["dropout"],
    "ExpertLayer": ["dropout"],
    "CometFFN": ["dropout"],
    "MoE": ["expert_dropout"],
}
SIZES = {
    **{f"{name}Gate": ["dim"] for name in ("Softmax", "TopK", "Tree", "DSelectK", "Ensemble")},
    "XMoEGate": ["dim", "embedding"],
    "HyperRouterGate": ["dim", "hidden"],
    "StableGate": ["dim", "vocabulary", "embedding"],
    "ExpertMLP": ["dim", "hidden", "out"],
    "ExpertLayer": ["dim", "out"],
    "MaskedLinear": ["in_features", "out_features"],
}
MODULES = {
    "StagedGate": ["first", "second"],
    "PermutedGate": ["gate", "search"],
    "MoE": ["gate", "experts", "policy"],
    "MultiGateMoE": ["experts", "search"],
}
OUT_OF_RANGE = [
    ("SoftmaxGate", {"num_experts": 0}, "num_experts must be from 1"),
    ("TopKGate", {"k": 5}, "k must be from 1 to 4"),
    ("TopKGate", {"noise": "gumbel"}, "noise must be one of None, 'jitter', 'vmoe'"),
    ("TopKGate", {"noise": None, "load": 0.1}, "load needs noise='vmoe'"),
    ("TreeGate", {"num_experts": 1}, "num_experts must be from 2"),
    ("TreeGate", {"trees": 0}, "trees must be from 1"),
    ("TreeGate", {"gamma": 0}, "gamma must be above 0"),
    ("DSelectKGate", {"k": 0}, "k must be from 1"),
    ("EnsembleGate", {"members": 3}, "members must divide 4"),
    ("EnsembleGate", {"load": 0.25}, "load needs noise=True"),
    ("CompetitionGate", {"rate": 2.0}, r"rate must be from 0 to 1 \(a chance\), got 2"),
    ("LocalSearch", {"num_experts": 0}, "num_experts must be from 1"),
    ("LocalSearch", {"steps": -1}, "steps must be from 0"),
    ("LocalSearch", {"noise": -0.1}, "noise must be finite and at least 0 .*, got -0.1"),
    ("LocalSearch", {"schedule": "slow"}, "schedule must be one of 'paper', 'annealed'"),
    ("MaskedLinear", {"k": 4}, "k must be from 0 to 3"),
    ("FixedRouting", {"widths": (D, 0)}, "a width must be from 1"),
    ("HashGate", {"frequencies": torch.ones(7)}, r"frequencies must be \(3,\)"),
    ("XMoEGate", {"temperature": 0.0}, "temperature must be above 0"),
    ("XMoEGate", {"temperature": -1.0}, "temperature must be above 0"),
    ("ExpertMLP", {"dropout": 2.0}, "dropout must be from 0 to 1"),
    ("ExpertMLP", {"dropout": -0.1}, "dropout must be from 0 to 1"),
    ("ExpertMLP", {"activation": "sine"}, "activation must be one of None, 'relu'"),
    ("ExpertLayer", {"dropout": 1.5}, "dropout must be from 0 to 1"),
    ("ExpertLayer", {"activation": "sine"}, "activation must be one of None, 'relu'"),
    ("LocalSearch", {"bound": -1.0}, "bound must be finite and at least 0"),
    ("ManualGate", {"assignment": [0, -1]}, "assignment must be from 0"),
    ("ManualGate", {"assignment": ()}, "assignment must have at least one label, got none"),
    ("ManualGate", {"assignment": (), "num_experts": 2}, "assignment must have at least one label, got none"),
    ("HashGate", {"frequencies": torch.tensor([1.0, math.nan, 0.0])}, "frequencies must be finite and at least 0"),
    ("HashGate", {"frequencies": torch.tensor([1.0, math.inf, 0.0])}, "frequencies must be finite and at least 0"),
    ("HashGate", {"frequencies": torch.tensor([1, -1, 0])}, "frequencies must be finite and at least 0"),
]
BACKENDS = ["TopKGate", "TreeGate", "XMoEGate", "HyperRouterGate", "EnsembleGate", "LocalSearch", "ExpertMLP"]
BACKENDS += ["ExpertLayer", "MaskedLinear", "FixedRouting"]


GATES = {name: make for name, make in constructors().items() if name.endswith("Gate")}


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("shape", [(D,), (2, 3, D)], ids=str)
def test_gates_refuse_other_shapes_than_tokens_by_features(name, shape):
    gate = GATES[name]()
    words = (
        {"ids": torch.zeros(shape[:-1], dtype=torch.long)}
        if name in ("StableGate", "HashGate", "ManualGate", "EnsembleGate")
        else {}
    )
    with pytest.raises(ValueError, match=r"(x must be \(T, \w+\)|ids must be)"):
        gate(torch.zeros(shape), **words)


@pytest.mark.parametrize("name", constructors())
def test_constructors_refuse_at_once_what_a_forward_could_not_use(name):
    make = constructors()[name]
    for option in COEFFICIENTS.get(name, ()):
        for value in (math.nan, math.inf, -math.inf):
            with pytest.raises(ValueError, match=f"^{name}: {option} must be .*, got {value}"):
                make(**{option: value})
        for value in ("0.5", True, torch.tensor(0.5)):
            with pytest.raises(TypeError, match=f"^{name}: {option} must be a number, got {type(value).__name__}"):
                make(**{option: value})
    for option in SIZES.get(name, ()):
        with pytest.raises(ValueError, match=f"^{name}: {option} must be from . to .*, got -1"):
            make(**{option: -1})
        with pytest.raises(TypeError, match=f"^{name}: {option} must be an int, got float"):
            make(**{option: 1.5})
    for option in MODULES.get(name, ()):
        with pytest.raises(TypeError, match=f"^{name}: {option} must be|^{name}: a {option} must be"):
            make(**{option: 3})
    if name in BACKENDS:
        with pytest.raises(ValueError, match=f"^{name}: backend must be one of .*; got 'gpu'"):
            make(backend="gpu")
    for _, options, words in (each for each in OUT_OF_RANGE if each[0] == name):
        with pytest.raises(ValueError, match=f"^{name}: {words}"):
            make(**options)


def test_an_expert_of_no_outputs_has_none():
    assert mnn.ExpertMLP(E, D, 3, out=0).w_out.shape == (E, 3, 0)


def test_experts_told_by_fractions_are_refused():
    with pytest.raises(TypeError, match="ManualGate: assignment must be an int, got float"):
        mnn.ManualGate([0.5, 1.0])


def test_what_is_printed_tells_modules_apart():
    made = {name: make() for name, make in constructors().items()}
    assert "ExpertMLP(w_in=(4, 6, 3), w_out=(4, 3, 6), " in repr(made["ExpertMLP"])
    assert "activation='relu', dropout=0.5" in repr(mnn.ExpertLayer(E, D, 3, dropout=0.5))
    assert "assignment=(0, 1), num_experts=2" in repr(made["ManualGate"])
    made["StableGate"].begin_stage_two()
    assert "stage=2" in repr(made["StableGate"])
    assert "rate=0.05, alpha=1" in repr(made["CompetitionGate"])
    for name, module in made.items():
        assert not repr(module).startswith(f"{name}()")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: models.ViT((1, 8, 8), 3, patch=3), "patches: expected a patch .* got 3 for 8 x 8"),
        (lambda: models.Mixer((1, 8, 8), 3, patch=0), "patches: expected a patch .* got 0 for 8 x 8"),
        (lambda: models.MoEViT((1, 8, 8), 3, lambda index: None, patch=16), "expected a patch of at least 1 pixel"),
        (lambda: models.GPT(9, 4, dim=8, heads=0), "Block: heads must be from 1"),
        (lambda: models.GPT(9, 4, dim=8, dropout=2.0), r"CometFFN: dropout must be from 0 to 1 \(a rate\), got 2"),
        (lambda: models.MoEGPT(9, 4, lambda index: None, dim=8, dropout=math.nan), "FeedForward: dropout must be"),
    ],
)
def test_models_refuse_at_once_what_a_forward_could_not_use(make, words):
    with pytest.raises(ValueError, match=words):
        make()
