"""The expert MLP, on the tensors of moe_kernels/cases/grouped_gemm.py."""

from __future__ import annotations

from functools import partial

from moe_kernels.cases.call import Call, streamed
from moe_kernels.cases.grouped_gemm import inputs, shapes
from moe_kernels.ops import expert_mlp

LEAVES, GRADS = ("x", "w_in", "w_out", "weights"), ("grad",)
LEAST_BYTES = partial(streamed, shapes, LEAVES, GRADS)
EXPERT_MLP = Call(expert_mlp.expert_mlp, ("y",), LEAVES, ("b_in", "b_out"), GRADS, inputs, LEAST_BYTES)
