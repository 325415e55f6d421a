"""A program of every operator with a gradient, exported once with this file: tests/pytorch/test_saved.py loads it.

python -m tests.helpers.saved.program writes program.pt2. torch 2.13 wrote it when operators were defined in
moe_kernels/library.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import moe_kernels as mk

SAVED = Path(__file__).with_suffix(".pt2")


class Program(torch.nn.Module):
    def forward(self, x: Tensor, logits: Tensor, w_in: Tensor, w_out: Tensor, split: Tensor, scores: Tensor):
        weights, experts = mk.topk_gate(logits, 2)
        plan = mk.make_plan(experts, logits.shape[1], capacity=9)
        rows = mk.grouped_gemm(mk.dispatch(x, plan), w_in, plan.expert_offsets, activation="swiglu")
        y = mk.combine(mk.grouped_gemm(rows, w_out, plan.expert_offsets), plan, weights)
        whole = mk.expert_mlp(mk.kwta(x, 3), plan, w_in, w_out, weights=weights, activation="swiglu")
        gates, leaf_probs = mk.tree_gate(x, split, torch.zeros(2, 4, 6), gamma=1.0)
        return y, whole, gates, leaf_probs, mk.sinkhorn(scores, 5)


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    sizes = (11, 6), (11, 4), (4, 6, 16), (4, 8, 6), (2, 3, 6), (3, 5, 5)
    return tuple(torch.randn(size) for size in sizes)


if __name__ == "__main__":
    torch.export.save(torch.export.export(Program(), inputs()), SAVED)
