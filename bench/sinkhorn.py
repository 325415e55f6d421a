"""Benchmarks of Sinkhorn's iteration: the design's shapes, hot and cold."""

from __future__ import annotations

import torch
from torch import Tensor

import moe_kernels as mk
from bench.entry import Calls, Entry, Inputs, Shape, through_autograd


def _shape(batch: int, n: int, iterations: int, tau: float) -> Shape:
    return {"B": batch, "n": n, "R": iterations, "tau": tau}


def _inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    size = (int(shape["B"]), int(shape["n"]), int(shape["n"]))
    scores, grad = (torch.randn(size, device=device).to(dtype) for _ in range(2))
    return {"leaf": scores.requires_grad_(), "grad": grad, "R": int(shape["R"]), "tau": float(shape["tau"])}


def _kernel(backend: str) -> Calls:
    return through_autograd(
        lambda inputs: mk.sinkhorn(inputs["leaf"], inputs["R"], tau=inputs["tau"], backend=backend), ("leaf",), "grad"
    )


def _loop(inputs: Inputs) -> Tensor:
    log_p = inputs["leaf"] / inputs["tau"]
    for _ in range(inputs["R"]):
        log_p = log_p - log_p.logsumexp(-1, keepdim=True)
        log_p = log_p - log_p.logsumexp(-2, keepdim=True)
    return log_p.exp()


def _least_bytes(shape: Shape, dtype: torch.dtype, direction: str) -> int:
    """scores -> p; then scores and grad -> dscores."""
    matrix = int(shape["B"]) * int(shape["n"]) ** 2 * dtype.itemsize
    return (5 if direction == "training" else 2) * matrix


def _flops(shape: Shape, direction: str) -> int:
    """Multiply-adds of the form that scales by vectors."""
    step = int(shape["B"]) * int(shape["R"]) * int(shape["n"]) ** 2
    return (16 if direction == "training" else 4) * step


ENTRIES = {
    "sinkhorn": Entry(
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
        complete=lambda shape, device: shape,
        inputs=_inputs,
        kernel=_kernel,
        peers={"torch log-form loop": through_autograd(_loop, ("leaf",), "grad")},
        flops=_flops,
        least_bytes=_least_bytes,
        directions=("forward", "training"),
        dtypes=(torch.float32,),
        leaves=("leaf",),
    )
}
