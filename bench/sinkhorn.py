"""Benchmarks of Sinkhorn's iteration on many small and few large matrices, at high and low temperatures."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.entry import Inputs, Shape, entry
from moe_kernels.cases.sinkhorn import SINKHORN


def _shape(batch: int, n: int, iterations: int, tau: float) -> Shape:
    return {"B": batch, "n": n, "R": iterations, "tau": tau}


def _loop(inputs: Inputs) -> Tensor:
    log_p = inputs["scores"] / inputs["tau"]
    for _ in range(inputs["iterations"]):
        log_p = log_p - log_p.logsumexp(-1, keepdim=True)
        log_p = log_p - log_p.logsumexp(-2, keepdim=True)
    return log_p.exp()


ENTRIES = {
    "sinkhorn": entry(
        SINKHORN,
        {"torch log-form loop": _loop},
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
        dtypes=(torch.float32,),
    )
}
