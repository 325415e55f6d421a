"""The torch operators of the package: their schemas, implementations, fakes, gradients and FLOP formulas."""

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
