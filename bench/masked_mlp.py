"""Benchmarks of the MLP under known masks: paper 000's, a batch of 32, beside the same without masks.

Every neuron answers, so that layers without masks compute the same; no kernel branches on what a mask holds. Masks are
read where those of all samples are kept, as in training; a peer's are a batch's, ready.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from bench.entry import Calls, Entry, Inputs, Shape, through_autograd
from moe_kernels.library import words
from moe_kernels.ops.masked_mlp import masked_mlp
from python_ref.kwta import pack_bits

LAYERS = 4
SAMPLES = 2048  # whose masks are kept
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


def _kernel(backend: str) -> Calls:
    def forward(inputs: Inputs) -> Tensor:
        named = {"samples": inputs["samples"], "activation": "tanh", "backend": backend}
        return masked_mlp(inputs["x"], *_parameters(inputs), inputs["bits"], **named)

    return through_autograd(forward, LEAVES, "grad")


def _layers(inputs: Inputs, masked: bool) -> Tensor:
    x, (weights, biases) = inputs["x"], _parameters(inputs)
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = torch.nn.functional.linear(x, weight, bias)
        if layer < LAYERS - 1:
            x = torch.tanh(x)
            x = x * inputs["masks"][layer] if masked else x
    return x


def _flops(shape: Shape, direction: str) -> int:
    """FLOPs of the products; training has twice as many more, less the gradient to x."""
    products = [n_in * n_out for n_in, n_out in pairwise(_widths(shape))]
    return 2 * shape["B"] * (sum(products) if direction == "forward" else 3 * sum(products) - products[0])


def _least_bytes(shape: Shape, dtype: torch.dtype, direction: str) -> int:
    """Training reads all again and writes a gradient of every parameter."""
    widths = _widths(shape)
    parameters = sum((n_in + 1) * n_out for n_in, n_out in pairwise(widths))
    given = (shape["B"] * widths[0] + parameters) * dtype.itemsize
    given += shape["B"] * sum(4 * words(n) for n in widths[1:-1])
    once = given + shape["B"] * widths[-1] * dtype.itemsize
    return once if direction == "forward" else 2 * once + parameters * dtype.itemsize


ENTRIES = {
    "masked_mlp": Entry(
        shapes={
            "quick": [{"B": 32, "N": n} for n in (100, 500, 1000)],
            "papers": [{"B": 32, "N": n} for n in (100, 500, 1000, 3000)],
            "llm": [{"B": 32, "N": 3000}],
            "scaling": [{"B": tokens, "N": 500} for tokens in (8, 32, 128, 512, 1024)],
        },
        complete=lambda shape, device: shape,
        inputs=_inputs,
        kernel=_kernel,
        peers={
            "torch without masks": through_autograd(lambda inputs: _layers(inputs, False), LEAVES, "grad"),
            "torch, masks multiplied": through_autograd(lambda inputs: _layers(inputs, True), LEAVES, "grad"),
        },
        flops=_flops,
        least_bytes=_least_bytes,
        directions=("forward", "training"),
        dtypes=(torch.float32,),
        leaves=LEAVES,
    ),
}
