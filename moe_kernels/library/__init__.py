"""The operations as operators of torch, one file each: schema, implementation, fake, autograd, vmap rule, FLOP formula.

An implementation with kernels calls the backend named in its last argument; others, such as harden and the checks,
have no such argument. Eager mode, torch.compile, torch.export, profilers, dispatch modes and torch.utils.flop_counter
all see these operators.
"""

from moe_kernels.library import (  # noqa: F401
    activation,
    combine,
    dispatch,
    expert_mlp,
    expert_norms,
    grouped_gemm,
    harden,
    kwta,
    plan,
    sinkhorn,
    topk_gate,
    tree_gate,
)
from moe_kernels.library._define import (
    CLAMPED,
    GATED,
    all_rows,
    compute_dtype,
    contiguous_matrices,
    contiguous_rows,
    ops,
    words,
)
from moe_kernels.library.plan import plan_rows

__all__ = [
    "CLAMPED",
    "GATED",
    "all_rows",
    "compute_dtype",
    "contiguous_matrices",
    "contiguous_rows",
    "ops",
    "plan_rows",
    "words",
]
