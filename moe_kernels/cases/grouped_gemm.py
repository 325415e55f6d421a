"""The grouped GEMM, which gathers its rows from tokens; the tensors of its calls, expert_mlp's and expert_norms'."""

from __future__ import annotations

from functools import partial

import torch

from moe_kernels.cases.call import Call, Inputs, Shape, Shapes, normal, streamed
from moe_kernels.cases.routing import logits
from moe_kernels.ops import grouped_gemm, plan, topk_gate


def shapes(shape: Shape) -> Shapes:
    """Tensors of E expert MLPs from D over H to O features (D without O) on T tokens, and gradients of results.

    K: choices of a token, 1 without it. R: number of rows; T K without it. Biases only if `bias` is true.
    """
    tokens, dim, hidden, experts = (shape[name] for name in "TDHE")
    k, out = shape.get("K", 1), shape.get("O", dim)
    width = 2 * hidden if shape.get("activation") in grouped_gemm.HALVING else hidden
    found = {
        "x": (tokens, dim),
        "w_in": (experts, dim, width),
        "w_out": (experts, hidden, out),
        "grad": (tokens, out),
        "grad_hidden": (shape.get("R", tokens * k), hidden),
        "grad_norms": (tokens, experts),
        "weights": (tokens, k),
    }
    return found | ({"b_in": (experts, width), "b_out": (experts, out)} if shape.get("bias") else {})


def inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    shape = {"K": 1, "routing": "uniform", **shape}
    weights, chosen = topk_gate.topk_gate(logits(shape, device), shape["K"], backend="reference")
    made = plan.make_plan(chosen, shape["E"], backend="reference")
    sizes = shapes({**shape, "R": made.num_rows, "bias": False})
    del sizes["weights"]
    found = normal(sizes, dtype, device)
    found |= {name: found[name] / sizes[name][1] ** 0.5 for name in ("w_in", "w_out")}
    return {**found, "weights": weights.to(dtype), "plan": made}


def _gemm(x, w_in, plan, b_in=None, activation=None, gathered=True, backend=None) -> torch.Tensor:
    """gathered: x has the tokens; else the rows of the plan."""
    given = {"bias": b_in, "activation": activation, "row_token": plan.row_token if gathered else None}
    return grouped_gemm.grouped_gemm(x, w_in, plan.expert_offsets, **given, backend=backend)


LEAVES, GRADS = ("x", "w_in"), ("grad_hidden",)
GROUPED_GEMM = Call(_gemm, ("out",), LEAVES, ("b_in",), GRADS, inputs, partial(streamed, shapes, LEAVES, GRADS))
