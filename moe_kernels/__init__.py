"""Kernels for mixtures of experts in Triton, CUDA and C++, with a definition in PyTorch for every operation."""

from moe_kernels import _checkout, _numpy  # noqa: F401
from moe_kernels._version import __version__
from moe_kernels.backends import BackendError, available_backends, explain, use_backend
from moe_kernels.backends.invariance import batch_invariant
from moe_kernels.ops import _loads  # noqa: F401 registers an operator that exported programs call
from moe_kernels.ops.combine import combine
from moe_kernels.ops.dispatch import dispatch
from moe_kernels.ops.expert_mlp import expert_mlp
from moe_kernels.ops.expert_norms import expert_norms
from moe_kernels.ops.grouped_gemm import grouped_gemm
from moe_kernels.ops.harden import harden
from moe_kernels.ops.kwta import k_from_fraction, kwta, kwta_apply, kwta_bits, kwta_mask
from moe_kernels.ops.kwta_linear import kwta_linear
from moe_kernels.ops.plan import expert_capacity, make_plan, plan_expert_choice, plan_priority
from moe_kernels.ops.sinkhorn import sinkhorn
from moe_kernels.ops.topk_gate import topk_gate
from moe_kernels.ops.tree_gate import RouteStatistics, smooth_step, tree_gate, tree_route
from moe_kernels.plan import RoutingPlan

__all__ = [
    "BackendError",
    "RouteStatistics",
    "RoutingPlan",
    "__version__",
    "available_backends",
    "batch_invariant",
    "combine",
    "dispatch",
    "expert_capacity",
    "expert_mlp",
    "expert_norms",
    "explain",
    "grouped_gemm",
    "harden",
    "k_from_fraction",
    "kwta",
    "kwta_apply",
    "kwta_bits",
    "kwta_linear",
    "kwta_mask",
    "make_plan",
    "plan_expert_choice",
    "plan_priority",
    "sinkhorn",
    "smooth_step",
    "topk_gate",
    "tree_gate",
    "tree_route",
    "use_backend",
]

_checkout.warn_if_hiding()
