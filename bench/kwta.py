"""Benchmarks of kWTA: widths of the papers and of language models, several fractions of winners."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import moe_kernels as mk
from bench.entry import Calls, Entry, Inputs, Shape, through_autograd
from moe_kernels.ops._define import operators
from moe_kernels.sizes import words
from python_ref.kwta import pack_bits


def _complete(shape: Shape, device: str) -> Shape:
    return {"R": 8192 if device == "cuda" else max(1, 2**21 // shape["N"]), **shape}


def _inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    rows, n = shape["R"], shape["N"]
    x, grad = (torch.randn(rows, n, device=device).to(dtype) for _ in range(2))
    k = mk.k_from_fraction(shape["p"], n)
    mask = mk.kwta_mask(x, k)
    return {"leaf": x.requires_grad_(), "grad": grad, "k": k, "bits": pack_bits(mask), "mask": mask.to(dtype)}


def _calls(forward: Callable[[Tensor, int], Tensor], backward: Callable[[Inputs], object]) -> Calls:
    calls = through_autograd(lambda inputs: forward(inputs["leaf"], inputs["k"]), ("leaf",), "grad")
    return {**calls, "backward": backward}


def _kernel(backend: str) -> Calls:
    return _calls(
        lambda x, k: mk.kwta(x, k, backend=backend),
        lambda inputs: operators.kwta_bwd(inputs["grad"], inputs["bits"], backend),
    )


def _composition(x: Tensor, k: int) -> Tensor:
    mask = torch.zeros_like(x).scatter_(-1, x.detach().topk(k, dim=-1).indices, 1)
    return mask * x


def _least_bytes(shape: Shape, dtype: torch.dtype, direction: str) -> int:
    rows, n = shape["R"], shape["N"]
    matrix, bits = rows * n * dtype.itemsize, rows * words(n) * 4
    forward, backward = 2 * matrix, 2 * matrix + bits  # x -> y; grad and bits -> dx
    return {"forward": forward, "backward": backward, "training": forward + bits + backward}[direction]


def _flops(shape: Shape, direction: str) -> int:
    """One product with the mask for each element, forward and backward. Comparisons are not counted."""
    return shape["R"] * shape["N"] * (2 if direction == "training" else 1)


ENTRIES = {
    "kwta": Entry(
        shapes={
            "quick": [{"N": n, "p": 0.5} for n in (100, 512, 1024, 4096)] + [{"N": 1024, "p": 0.1}],
            "llm": [{"N": n, "p": 0.1} for n in (1024, 4096, 14336)],
            "aims": [{"N": 4096, "p": 0.1}],
            "scaling": [{"R": 512, "N": n, "p": 0.5} for n in (128, 512, 2048, 8192, 16384)],
            "papers": [{"N": n, "p": p} for n in (100, 512, 1024, 4096, 16384) for p in (0.1, 0.5, 0.9)],
        },
        complete=_complete,
        inputs=_inputs,
        kernel=_kernel,
        peers={"torch topk+scatter+mul": _calls(_composition, lambda inputs: inputs["grad"] * inputs["mask"])},
        flops=_flops,
        least_bytes=_least_bytes,
        leaves=("leaf",),
    ),
}
