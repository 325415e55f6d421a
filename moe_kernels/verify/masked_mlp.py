"""The masked MLP with every activation, on widths that fill their words of bits and on others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from moe_kernels.ops import masked_mlp
from moe_kernels.ops.kwta import pack_bits
from moe_kernels.verify.grouped_gemm import FLOOR
from moe_kernels.verify.operation import Case, Inputs, Operation, Outputs, differentiated


def _cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    draw = torch.Generator().manual_seed(0)
    sizes = ((0, 0), (1, 1), (3, 3), (3, 7)) if small else ((0, 0), (1, 1), (32, 32), (32, 70), (300, 300))
    for tokens, num_samples in sizes:
        samples = None if num_samples == tokens else torch.randint(num_samples, (tokens,), generator=draw).to(device)
        for activation in sorted(masked_mlp.ACTIVATIONS):
            widths = (9, 33, 64, 7) if small else (64, 500, 1024, 10)
            inputs = {"x": torch.randn(tokens, widths[0], generator=draw)}
            for layer, (n_in, n_out) in enumerate(pairwise(widths)):
                inputs[f"w{layer}"] = torch.randn(n_out, n_in, generator=draw) / sqrt(n_in)
                inputs[f"b{layer}"] = torch.randn(n_out, generator=draw)
            inputs["grad"] = torch.randn(tokens, widths[-1], generator=draw)
            inputs = {name: each.to(dtype).to(device) for name, each in inputs.items()}
            bits = [pack_bits(torch.rand(num_samples, n, generator=draw) < 0.5).to(device) for n in widths[1:-1]]
            name = f"{tokens} of {num_samples} through {widths}, {activation}"
            yield Case(name, {**inputs, "bits": bits, "samples": samples, "activation": activation})


def _run(inputs: Inputs, backend: str) -> Outputs:
    layers = range(len(inputs["bits"]) + 1)

    def call(x: Tensor, bits: list[Tensor], **given: Any) -> Tensor:
        weights, biases = ([given.pop(f"{kind}{layer}") for layer in layers] for kind in "wb")
        return masked_mlp.masked_mlp(x, weights, biases, bits, **given)

    names = [f"{kind}{layer}" for kind in "wb" for layer in layers]
    return differentiated(call, inputs, ("x", *names), ("y",), backend=backend)


OPERATION = Operation(_cases, _run, exact=frozenset(), floor=FLOOR)
