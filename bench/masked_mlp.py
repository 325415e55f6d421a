"""Benchmarks of the MLP with given masks: the network of paper 000, a batch of 32.

All bits are set, so that layers without masks compute the same; no kernel branches on the bits of a mask. The kernel
picks the batch's masks out of the masks of all samples, as in training; a peer gets the masks of the batch.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from bench.entry import Inputs, Shape, entry
from moe_kernels.library import words
from moe_kernels.ops.masked_mlp import masked_mlp
from python_ref.kwta import pack_bits

LAYERS = 4
SAMPLES = 2048  # of the training set: the number of stored masks
LEAVES = tuple(f"{kind}{layer}" for kind in ("weight", "bias") for layer in range(LAYERS))


def _widths(shape: Shape) -> tuple[int, ...]:
    return (64, *[shape["N"]] * (LAYERS - 1), 10)


def _inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    tokens, widths = shape["B"], _widths(shape)
    tensors = {"x": torch.randn(tokens, widths[0]), "grad": torch.randn(tokens, widths[-1])}
    found: Inputs = {name: each.to(device, dtype) for name, each in tensors.items()}
    for layer, (n_in, n_out) in enumerate(pairwise(widths)):
        found[f"weight{layer}"] = (torch.randn(n_out, n_in) / n_in**0.5).to(device, dtype).requires_grad_()
        found[f"bias{layer}"] = torch.randn(n_out).to(device, dtype).requires_grad_()
    found["masks"] = [torch.ones(tokens, n, dtype=dtype, device=device) for n in widths[1:-1]]
    kept = [pack_bits(torch.ones(SAMPLES, n, dtype=torch.bool)).to(device) for n in widths[1:-1]]
    return found | {"bits": kept, "samples": torch.randint(SAMPLES, (tokens,)).to(device)}


def _parameters(inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
    tensors = [inputs[name] for name in LEAVES]
    return tensors[:LAYERS], tensors[LAYERS:]


def _masked(inputs: Inputs, backend: str) -> Tensor:
    named = {"samples": inputs["samples"], "activation": "tanh", "backend": backend}
    return masked_mlp(inputs["x"], *_parameters(inputs), inputs["bits"], **named)


def _layers(inputs: Inputs, masked: bool) -> Tensor:
    x, (weights, biases) = inputs["x"], _parameters(inputs)
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = torch.nn.functional.linear(x, weight, bias)
        if layer < LAYERS - 1:
            x = torch.tanh(x)
            x = x * inputs["masks"][layer] if masked else x
    return x


def _flops(shape: Shape, direction: str) -> int:
    """FLOPs of the products. Training has three times as many, except that the first layer needs no gradient to x."""
    products = [n_in * n_out for n_in, n_out in pairwise(_widths(shape))]
    return 2 * shape["B"] * (sum(products) if direction == "forward" else 3 * sum(products) - products[0])


def _least_bytes(shape: Shape, dtype: torch.dtype, direction: str) -> int:
    """Training reads everything again and writes a gradient of every parameter."""
    widths = _widths(shape)
    parameters = sum((n_in + 1) * n_out for n_in, n_out in pairwise(widths))
    given = (shape["B"] * widths[0] + parameters) * dtype.itemsize
    given += shape["B"] * sum(4 * words(n) for n in widths[1:-1])
    once = given + shape["B"] * widths[-1] * dtype.itemsize
    return once if direction == "forward" else 2 * once + parameters * dtype.itemsize


ENTRIES = {
    "masked_mlp": entry(
        _masked,
        {
            "torch without masks": lambda inputs: _layers(inputs, False),
            "torch, masks multiplied": lambda inputs: _layers(inputs, True),
        },
        LEAVES,
        shapes={
            "quick": [{"B": 32, "N": n} for n in (100, 500, 1000)],
            "papers": [{"B": 32, "N": n} for n in (100, 500, 1000, 3000)],
            "llm": [{"B": 32, "N": 3000}],
            "scaling": [{"B": tokens, "N": 500} for tokens in (8, 32, 128, 512, 1024)],
        },
        inputs=_inputs,
        flops=_flops,
        least_bytes=_least_bytes,
        dtypes=(torch.float32,),
    ),
}
