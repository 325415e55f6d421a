"""The masked MLP with every activation, on widths that fill their words of bits and on others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import sqrt

import torch

from moe_kernels.ops import masked_mlp
from moe_kernels.ops.kwta import pack_bits
from moe_kernels.verify.grouped_gemm import FLOOR, leaves_of, named_gradients
from moe_kernels.verify.operation import Case, Inputs, Operation, Outputs

LAYERS = ("1", "2", "3")


def _cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    draw = torch.Generator().manual_seed(0)
    sizes = ((0, 0), (1, 1), (3, 3), (3, 7)) if small else ((0, 0), (1, 1), (32, 32), (32, 70), (300, 300))
    for tokens, num_samples in sizes:
        samples = None if num_samples == tokens else torch.randint(num_samples, (tokens,), generator=draw).to(device)
        for activation in sorted(masked_mlp.ACTIVATIONS):
            widths = (9, 33, 64, 7) if small else (64, 500, 1024, 10)
            inputs = {"x": torch.randn(tokens, widths[0], generator=draw)}
            for layer, (n_in, n_out) in zip(LAYERS, pairwise(widths), strict=True):
                inputs[f"w{layer}"] = torch.randn(n_out, n_in, generator=draw) / sqrt(n_in)
                inputs[f"b{layer}"] = torch.randn(n_out, generator=draw)
            inputs["grad"] = torch.randn(tokens, widths[-1], generator=draw)
            inputs = {name: each.to(dtype).to(device) for name, each in inputs.items()}
            bits = [pack_bits(torch.rand(num_samples, n, generator=draw) < 0.5).to(device) for n in widths[1:-1]]
            name = f"{tokens} of {num_samples} through {widths}, {activation}"
            yield Case(name, {**inputs, "bits": bits, "samples": samples, "activation": activation})


def _run(inputs: Inputs, backend: str) -> Outputs:
    leaves = leaves_of(inputs, "x", *(f"{kind}{layer}" for kind in "wb" for layer in LAYERS))
    weights, biases = ([leaves[f"{kind}{layer}"] for layer in LAYERS] for kind in "wb")
    named = {name: inputs[name] for name in ("activation", "samples")}
    y = masked_mlp.masked_mlp(leaves["x"], weights, biases, inputs["bits"], **named, backend=backend)
    return {"y": y, **named_gradients(y, leaves, inputs["grad"])}


OPERATION = Operation(_cases, _run, exact=frozenset(), floor=FLOOR)
