"""Constructors of moe_kernels.nn with valid options."""

from __future__ import annotations

from functools import partial

from moe_kernels import nn as mnn

D, E, IDS = 6, 4, 12


def constructors():
    """By name of a class: its constructor with valid options."""
    softmax, topk, experts = mnn.SoftmaxGate(D, E), mnn.TopKGate(D, E, 2), mnn.ExpertMLP(E, D, 3)
    right = {
        "SoftmaxGate": {"dim": D, "num_experts": E},
        "TopKGate": {"dim": D, "num_experts": E, "k": 2, "noise": "vmoe"},
        "TreeGate": {"dim": D, "num_experts": E},
        "DSelectKGate": {"dim": D, "num_experts": E, "k": 2},
        "XMoEGate": {"dim": D, "num_experts": E, "k": 2},
        "HyperRouterGate": {"dim": D, "num_experts": E, "k": 2},
        "StableGate": {"dim": D, "num_experts": E, "vocabulary": IDS},
        "EnsembleGate": {"dim": D, "num_experts": E, "k": 1},
        "HashGate": {"num_ids": 3, "num_experts": E},
        "ManualGate": {"assignment": [0, 1]},
        "StagedGate": {"first": softmax, "second": topk},
        "PermutedGate": {"gate": softmax, "search": mnn.LocalSearch(E, 5)},
        "CompetitionGate": {"router": topk, "experts": experts},
        "LocalSearch": {"num_experts": E, "steps": 5},
        "ExpertMLP": {"num_experts": E, "dim": D, "hidden": 3},
        "ExpertLayer": {"num_experts": E, "dim": D, "out": 3},
        "CometFFN": {"dim": D, "hidden": 3},
        "MaskedLinear": {"in_features": D, "out_features": 3, "k": 1},
        "FixedRouting": {"widths": (D, 3)},
        "CometMLP": {"widths": (D, 5, 3)},
        "RandomGate": {"num_experts": E},
        "MoE": {"gate": softmax, "experts": experts},
        "MultiGateMoE": {"gates": [softmax], "experts": experts},
    }
    return {name: partial(getattr(mnn, name), **options) for name, options in right.items()}
