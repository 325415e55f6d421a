"""Gates: all have the interface `gate(x (T, D), ids=None) -> GateOutput`."""

from moe_kernels.nn.gates.competition import CompetitionGate
from moe_kernels.nn.gates.dselect import DSelectKGate
from moe_kernels.nn.gates.ensemble import EnsembleGate
from moe_kernels.nn.gates.gate import Gate, GateOutput
from moe_kernels.nn.gates.hash import HashGate
from moe_kernels.nn.gates.hyper import HyperRouterGate
from moe_kernels.nn.gates.manual import ManualGate
from moe_kernels.nn.gates.permuted import PermutedGate
from moe_kernels.nn.gates.softmax import SoftmaxGate
from moe_kernels.nn.gates.stable import StableGate
from moe_kernels.nn.gates.staged import StagedGate
from moe_kernels.nn.gates.thor import RandomGate
from moe_kernels.nn.gates.topk import TopKGate
from moe_kernels.nn.gates.tree import TreeGate
from moe_kernels.nn.gates.xmoe import XMoEGate

__all__ = [
    "CompetitionGate",
    "DSelectKGate",
    "EnsembleGate",
    "Gate",
    "GateOutput",
    "HashGate",
    "HyperRouterGate",
    "ManualGate",
    "PermutedGate",
    "RandomGate",
    "SoftmaxGate",
    "StableGate",
    "StagedGate",
    "TopKGate",
    "TreeGate",
    "XMoEGate",
]
