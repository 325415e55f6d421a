"""What is measured: one Entry an operation gives its shapes, inputs, calls, FLOPs, least bytes and peers."""

from __future__ import annotations

import torch
from torch import Tensor

import moe_kernels as mk
from bench import routing, sinkhorn
from bench.entry import Calls, Entry, Inputs, Shape, label
from moe_kernels.library import words

__all__ = ["ENTRIES", "Calls", "Entry", "Inputs", "Shape", "label"]


def _kwta_complete(shape: Shape, device: str) -> Shape:
    # A GPU takes the 8192 rows of the design; a CPU 2^21 elements, 4 to 8 MB, so that a call takes milliseconds.
    return {"R": 8192 if device == "cuda" else max(1, 2**21 // int(shape["N"])), **shape}


def _kwta_inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    rows, n = int(shape["R"]), int(shape["N"])
    x, grad = (torch.randn(rows, n, device=device).to(dtype) for _ in range(2))
    k = mk.k_from_fraction(shape["p"], n)
    mask = mk.kwta_mask(x, k)
    bits = torch.zeros(rows, words(n) * 32, dtype=torch.int64, device=device)
    bits[:, :n] = mask
    packed = (bits.view(rows, -1, 32) << torch.arange(32, device=device)).sum(-1).to(torch.int32)
    leaf = x.clone().requires_grad_()
    return {"x": x, "leaf": leaf, "grad": grad, "k": k, "bits": packed, "mask": mask.to(dtype)}


def _kwta_kernel(backend: str) -> Calls:
    def training(inputs: Inputs) -> object:
        y = mk.kwta(inputs["leaf"], inputs["k"], backend=backend)
        return torch.autograd.grad(y, inputs["leaf"], inputs["grad"])

    return {
        "forward": lambda inputs: mk.kwta(inputs["x"], inputs["k"], backend=backend),
        "backward": lambda inputs: torch.ops.moe_kernels.kwta_bwd(inputs["grad"], inputs["bits"], backend),
        "training": training,
    }


def _composition(x: Tensor, k: int) -> Tensor:
    mask = torch.zeros_like(x).scatter_(-1, x.detach().topk(k, dim=-1).indices, 1)
    return mask * x


def _composition_training(inputs: Inputs) -> object:
    return torch.autograd.grad(_composition(inputs["leaf"], inputs["k"]), inputs["leaf"], inputs["grad"])


def _kwta_least_bytes(shape: Shape, dtype: torch.dtype, direction: str) -> int:
    rows, n = int(shape["R"]), int(shape["N"])
    matrix, bits = rows * n * dtype.itemsize, rows * words(n) * 4
    forward, backward = 2 * matrix, 2 * matrix + bits  # x -> y; grad and bits -> dx
    return {"forward": forward, "backward": backward, "training": forward + bits + backward}[direction]


def _kwta_flops(shape: Shape, direction: str) -> int:
    """The product with the mask: one an element and direction. Comparisons count none."""
    return int(shape["R"]) * int(shape["N"]) * (2 if direction == "training" else 1)


ENTRIES: dict[str, Entry] = {
    "kwta": Entry(
        shapes={
            "quick": [{"N": n, "p": 0.5} for n in (100, 512, 1024, 4096)] + [{"N": 1024, "p": 0.1}],
            "papers": [{"N": n, "p": p} for n in (100, 512, 1024, 4096, 16384) for p in (0.1, 0.5, 0.9)],
        },
        complete=_kwta_complete,
        inputs=_kwta_inputs,
        kernel=_kwta_kernel,
        peers={
            "torch topk+scatter+mul": {
                "forward": lambda inputs: _composition(inputs["x"], inputs["k"]),
                "backward": lambda inputs: inputs["grad"] * inputs["mask"],
                "training": _composition_training,
            }
        },
        flops=_kwta_flops,
        least_bytes=_kwta_least_bytes,
    ),
}
ENTRIES |= routing.ENTRIES | sinkhorn.ENTRIES
