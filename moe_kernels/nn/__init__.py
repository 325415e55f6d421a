"""Thin modules over the operations: parameters and reshapes; no algorithm lives here."""

from moe_kernels.nn.comet import ACTIVATIONS, CometFFN, CometMLP, FixedRouting, MaskedLinear
from moe_kernels.nn.experts import ExpertLayer, ExpertMLP, Experts
from moe_kernels.nn.gates import (
    CompetitionGate,
    EnsembleGate,
    Gate,
    GateOutput,
    HyperRouterGate,
    ManualGate,
    RandomGate,
    SoftmaxGate,
    StableGate,
    StagedGate,
    TopKGate,
    XMoEGate,
)
from moe_kernels.nn.local_search import LocalSearch
from moe_kernels.nn.losses import (
    balance_loss,
    batch_inverse_cv,
    batch_variation,
    competition_loss,
    cv_squared,
    importance_loss,
    inverse_cv,
    load_loss,
    router_z_loss,
    symmetric_kl,
)
from moe_kernels.nn.moe import MoE, MoEOutput, MultiGateMoE
from moe_kernels.nn.policies import ExpertChoice, PriorityRouting, TokenChoice
from moe_kernels.nn.utilisation import Utilisation

__all__ = [
    "ACTIVATIONS",
    "CometFFN",
    "CometMLP",
    "CompetitionGate",
    "EnsembleGate",
    "ExpertChoice",
    "ExpertLayer",
    "ExpertMLP",
    "Experts",
    "FixedRouting",
    "Gate",
    "GateOutput",
    "HyperRouterGate",
    "LocalSearch",
    "ManualGate",
    "MaskedLinear",
    "MoE",
    "MoEOutput",
    "MultiGateMoE",
    "PriorityRouting",
    "RandomGate",
    "SoftmaxGate",
    "StableGate",
    "StagedGate",
    "TokenChoice",
    "TopKGate",
    "Utilisation",
    "XMoEGate",
    "balance_loss",
    "batch_inverse_cv",
    "batch_variation",
    "competition_loss",
    "cv_squared",
    "importance_loss",
    "inverse_cv",
    "load_loss",
    "router_z_loss",
    "symmetric_kl",
]
