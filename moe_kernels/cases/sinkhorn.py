"""Sinkhorn's iteration, R times on B matrices of n x n scores."""

from __future__ import annotations

from functools import partial

import torch

from moe_kernels.cases.call import Call, Inputs, Shape, Shapes, normal, streamed
from moe_kernels.ops import sinkhorn


def shapes(shape: Shape) -> Shapes:
    return dict.fromkeys(("scores", "grad"), (shape["B"], shape["n"], shape["n"]))


def _inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    return {**normal(shapes(shape), dtype, device), "iterations": shape["R"], "tau": shape["tau"]}


LEAVES, SUMS_AND_NOISE, GRADS = ("scores",), ("rows", "columns", "noise"), ("grad",)
LEAST_BYTES = partial(streamed, shapes, LEAVES, GRADS)
SINKHORN = Call(sinkhorn.sinkhorn, ("p",), LEAVES, SUMS_AND_NOISE, GRADS, _inputs, LEAST_BYTES)
