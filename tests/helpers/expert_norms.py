"""Inputs of expert_norms, and the norms of all outputs by the definition."""

from __future__ import annotations

import math

import torch

from tests.helpers.grouped_gemm import ACTS


def dense(x, w_in, w_out, b_in=None, b_out=None, activation="relu"):
    pre = torch.einsum("td,edh->teh", x, w_in) + (0 if b_in is None else b_in)
    out = torch.einsum("teh,ehd->ted", ACTS[activation](pre), w_out) + (0 if b_out is None else b_out)
    return out.square().sum(-1).sqrt()


def leaves_of(dtype, device, activation, tokens, experts, dim, hidden, dout, with_bias=True):
    width = 2 * hidden if activation in ("swiglu", "geglu") else hidden
    leaves = {
        "x": torch.randn(tokens, dim),
        "w_in": torch.randn(experts, dim, width) / math.sqrt(dim),
        "w_out": torch.randn(experts, hidden, dout) / math.sqrt(hidden),
    }
    if with_bias:
        leaves |= {"b_in": torch.randn(experts, width), "b_out": torch.randn(experts, dout)}
    return {name: each.to(device, dtype) for name, each in leaves.items()}
