"""Inputs of expert_mlp with gradients."""

from __future__ import annotations

import math

import torch


def leaves_of(plan, dtype, device, activation, dim=14, hidden=22, dout=10, with_bias=True):
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
