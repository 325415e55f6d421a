"""The torch operators of the package: their schemas, implementations, fakes, gradients and FLOP formulas."""

from moe_kernels.library import (  # noqa: F401
    expert_norms,
)
from moe_kernels.ops._define import operators as ops  # noqa: F401
from moe_kernels.sizes import CLAMPED, GATED, compute_dtype, contiguous_rows, plan_rows, words  # noqa: F401
