"""Benchmarks of Sinkhorn's iteration on many small and few large matrices, at high and low temperatures."""

from __future__ import annotations

import torch
from torch import Tensor

import moe_kernels as mk
from bench.entry import Inputs, Shape, entry


def _shape(batch: int, n: int, iterations: int, tau: float) -> Shape:
    return {"B": batch, "n": n, "R": iterations, "tau": tau}


def _inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    size = (shape["B"], shape["n"], shape["n"])
    scores, grad = (torch.randn(size, device=device).to(dtype) for _ in range(2))
    return {"leaf": scores.requires_grad_(), "grad": grad, "R": shape["R"], "tau": shape["tau"]}


def _loop(inputs: Inputs) -> Tensor:
    log_p = inputs["leaf"] / inputs["tau"]
    for _ in range(inputs["R"]):
        log_p = log_p - log_p.logsumexp(-1, keepdim=True)
        log_p = log_p - log_p.logsumexp(-2, keepdim=True)
    return log_p.exp()


def _least_bytes(shape: Shape, dtype: torch.dtype, direction: str) -> int:
    """Forward: scores -> p. Training also backward: scores and grad -> dscores. All five are (B, n, n)."""
    return (5 if direction == "training" else 2) * shape["B"] * shape["n"] ** 2 * dtype.itemsize


def _flops(shape: Shape, direction: str) -> int:
    """FLOPs of iterations that scale rows and columns by vectors; a multiply-add counts as two.

    An iteration takes 4 for each element; in training 16: 4 forward, 4 as backward recomputes it, 8 for the gradient.
    """
    return (16 if direction == "training" else 4) * shape["B"] * shape["R"] * shape["n"] ** 2


ENTRIES = {
    "sinkhorn": entry(
        lambda inputs, backend: mk.sinkhorn(inputs["leaf"], inputs["R"], tau=inputs["tau"], backend=backend),
        {"torch log-form loop": _loop},
        ("leaf",),
        shapes={
            "quick": [_shape(16384, 4, 20, 1.0), _shape(64, 64, 50, 1.0), _shape(64, 64, 50, 1e-5)],
            "llm": [_shape(65536, 4, 20, 1.0)],
            "aims": [_shape(65536, 4, 20, 1.0), _shape(4096, 64, 50, 1.0)],
            "scaling": [_shape(4, n, 20, 1.0) for n in (4, 16, 64, 256, 512)],
            "papers": [
                _shape(*size, tau)
                for size in ((65536, 4, 20), (4096, 16, 50), (4096, 64, 50), (64, 256, 150), (1, 16, 150))
                for tau in (1.0, 1e-3, 1e-7)
            ],
        },
        inputs=_inputs,
        flops=_flops,
        least_bytes=_least_bytes,
        dtypes=(torch.float32,),
    )
}
