"""Layers, gates, policies, losses, schedules and layouts of state dicts, built on the operations of moe_kernels."""

from moe_kernels.nn import convert, schedules
from moe_kernels.nn._output import collect_outputs
from moe_kernels.nn.bias import update_biases
from moe_kernels.nn.comet import ACTIVATIONS, CometFFN, CometMLP, FixedRouting, MaskedLinear
from moe_kernels.nn.experts import ExpertLayer, ExpertMLP, Experts
from moe_kernels.nn.gates import *  # noqa: F403 the package gates defines __all__
from moe_kernels.nn.gates import __all__ as _gates
from moe_kernels.nn.gates.ensemble import ensemble_log_probs, tile
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
    tree_entropy,
)
from moe_kernels.nn.moe import MoE, MoEOutput, MultiGateMoE
from moe_kernels.nn.policies import ExpertChoice, NonzeroWeights, PriorityRouting, TokenChoice
from moe_kernels.nn.routes import record_routing, replay_routing
from moe_kernels.nn.split import NeuronImportance, distillation_loss, split_ffn, split_neurons
from moe_kernels.nn.utilisation import Utilisation

__all__ = [
    *_gates,
    "ACTIVATIONS",
    "CometFFN",
    "CometMLP",
    "ExpertChoice",
    "ExpertLayer",
    "ExpertMLP",
    "Experts",
    "FixedRouting",
    "LocalSearch",
    "MaskedLinear",
    "MoE",
    "MoEOutput",
    "MultiGateMoE",
    "NeuronImportance",
    "NonzeroWeights",
    "PriorityRouting",
    "TokenChoice",
    "Utilisation",
    "balance_loss",
    "batch_inverse_cv",
    "batch_variation",
    "collect_outputs",
    "competition_loss",
    "convert",
    "cv_squared",
    "distillation_loss",
    "ensemble_log_probs",
    "importance_loss",
    "inverse_cv",
    "load_loss",
    "record_routing",
    "replay_routing",
    "router_z_loss",
    "schedules",
    "split_ffn",
    "split_neurons",
    "symmetric_kl",
    "tile",
    "tree_entropy",
    "update_biases",
]
