"""Thin modules over the operations: parameters and reshapes; no algorithm lives here."""

from moe_kernels.nn.comet import ACTIVATIONS, CometMLP, FixedRouting, MaskedLinear
from moe_kernels.nn.gates import Gate, GateOutput, SoftmaxGate, TopKGate
from moe_kernels.nn.local_search import LocalSearch
from moe_kernels.nn.losses import balance_loss, cv_squared, importance_loss, load_loss, router_z_loss
from moe_kernels.nn.utilisation import Utilisation

__all__ = [
    "ACTIVATIONS",
    "CometMLP",
    "FixedRouting",
    "Gate",
    "GateOutput",
    "LocalSearch",
    "MaskedLinear",
    "SoftmaxGate",
    "TopKGate",
    "Utilisation",
    "balance_loss",
    "cv_squared",
    "importance_loss",
    "load_loss",
    "router_z_loss",
]
