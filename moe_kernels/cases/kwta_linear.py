"""A linear layer from D to N features on T tokens, of which each keeps the fraction p of its outputs."""

from __future__ import annotations

import torch

from moe_kernels.cases.call import Call, Inputs, Shape, Shapes, normal
from moe_kernels.ops import kwta, kwta_linear
from moe_kernels.sizes import words


def shapes(shape: Shape) -> Shapes:
    tokens, dim, width = (shape[name] for name in "TDN")
    return {"x": (tokens, dim), "weight": (width, dim), "bias": (width,), "grad": (tokens, width)}


def masks(tokens: int, width: int, k: int, generator: torch.Generator | None = None) -> torch.Tensor:
    return kwta.kwta_bits(torch.randn(tokens, width, generator=generator), k, backend="reference")[1]


def _inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    found = normal(shapes(shape), dtype, device)
    k = kwta.k_from_fraction(shape["p"], shape["N"])
    found["weight"] /= max(shape["D"], 1) ** 0.5
    return {**found, "bits": masks(shape["T"], shape["N"], k).to(device), "k": k}


def _least_bytes(shape: Shape, dtype: torch.dtype, direction: str) -> int:
    """Forward reads the rows of the weight that some token keeps, if tokens keep different ones; backward all."""
    tokens, dim, width = (shape[name] for name in "TDN")
    kept = min(width, tokens * kwta.k_from_fraction(shape["p"], width))
    size, bits = dtype.itemsize, 4 * tokens * words(width)
    forward = size * (tokens * (dim + width) + kept * dim + width) + bits
    backward = size * (tokens * (2 * dim + width) + 2 * width * dim + width) + bits
    return {"forward": forward, "backward": backward, "training": forward + backward}[direction]


LEAVES = ("x", "weight")
KWTA_LINEAR = Call(kwta_linear.kwta_linear, ("y",), LEAVES, ("bias",), ("grad",), _inputs, _least_bytes)
