"""What torch knows of the operations: schemas, fakes (shapes without data) and FLOP formulas, a file an operation.

torch.compile, opcheck and torch.utils.flop_counter all read these. An operation is one schema, one implementation that
hands over to the backend named in its last argument, and one fake. Autograd stands in ops/<op>.py.
"""

from moe_kernels.library import combine, dispatch, grouped_gemm, kwta, plan, sinkhorn, topk_gate, tree_gate  # noqa: F401
from moe_kernels.library._define import GATED, all_rows, launch, listened_to, matrices, ops, rows, wide, words
from moe_kernels.library.plan import plan_rows

__all__ = ["GATED", "all_rows", "launch", "listened_to", "matrices", "ops", "plan_rows", "rows", "wide", "words"]
