"""What is measured of Sinkhorn's iteration: the design's shapes, hot and cold."""

from __future__ import annotations

import torch
from torch import Tensor

import moe_kernels as mk
from bench.entry import Calls, Entry, Inputs, Shape


def _shape(batch: int, n: int, iterations: int, tau: float) -> Shape:
    return {"B": batch, "n": n, "R": iterations, "tau": tau}


def _inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    size = (int(shape["B"]), int(shape["n"]), int(shape["n"]))
    scores, grad = (torch.randn(size, device=device).to(dtype) for _ in range(2))
    leaf = scores.clone().requires_grad_()
    return {"scores": scores, "leaf": leaf, "grad": grad, "R": int(shape["R"]), "tau": float(shape["tau"])}


def _kernel(backend: str) -> Calls:
    def p(inputs: Inputs, scores: Tensor) -> Tensor:
        return mk.sinkhorn(scores, inputs["R"], tau=inputs["tau"], backend=backend)

    return {
        "forward": lambda inputs: p(inputs, inputs["scores"]),
        "training": lambda inputs: torch.autograd.grad(p(inputs, inputs["leaf"]), inputs["leaf"], inputs["grad"]),
    }


def _loop(inputs: Inputs, scores: Tensor) -> Tensor:
    log_p = scores / inputs["tau"]
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
            "quick": [_shape(16384, 4, 20, 1.0), _shape(256, 64, 50, 1.0), _shape(256, 64, 50, 1e-5)],
            "papers": [
                _shape(*size, tau)
                for size in ((65536, 4, 20), (4096, 16, 50), (4096, 64, 50), (64, 256, 150), (1, 16, 150))
                for tau in (1.0, 1e-3, 1e-7)
            ],
        },
        complete=lambda shape, device: shape,
        inputs=_inputs,
        kernel=_kernel,
        peers={
            "torch log-form loop": {
                "forward": lambda inputs: _loop(inputs, inputs["scores"]),
                "training": lambda inputs: torch.autograd.grad(
                    _loop(inputs, inputs["leaf"]), inputs["leaf"], inputs["grad"]
                ),
            }
        },
        flops=_flops,
        least_bytes=_least_bytes,
        directions=("forward", "training"),
        dtypes=(torch.float32,),
    )
}
