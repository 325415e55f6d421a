"""Gates with one call and one result: `gate(x (T, D), ids=None) -> GateOutput`, so that a layer takes any of them."""

from moe_kernels.nn.gates.gate import Gate, GateOutput
from moe_kernels.nn.gates.softmax import SoftmaxGate
from moe_kernels.nn.gates.topk import TopKGate

__all__ = ["Gate", "GateOutput", "SoftmaxGate", "TopKGate"]
