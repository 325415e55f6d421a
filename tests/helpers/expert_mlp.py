"""Inputs of expert_mlp with gradients."""

from __future__ import annotations

import math

import torch


def leaves_of(plan, dtype, device, activation, dim=19, hidden=23, dout=18, with_bias=True):
    """By default with sizes of 16 or more of which, also if `padded`, none is a multiple of 4, as in other tests of
    grouped products: Triton compiles a kernel for each pattern of multiples of 16 bytes, and one for fewer terms."""
    width = 2 * hidden if activation in ("swiglu", "geglu") else hidden
    experts = plan.num_experts
    leaves = {
        "x": torch.randn(plan.num_tokens, dim),
        "w_in": torch.randn(experts, dim, width) / math.sqrt(dim),
        "w_out": torch.randn(experts, hidden, dout) / math.sqrt(hidden),
        "weights": torch.rand(plan.num_tokens, plan.num_choices),
    }
    if with_bias:
        leaves |= {"b_in": torch.randn(experts, width), "b_out": torch.randn(experts, dout)}
    return {name: each.to(device, dtype) for name, each in leaves.items()}
