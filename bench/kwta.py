"""Benchmarks of kWTA, with widths of the papers and of language models and several fractions of winners, and of the
linear layer that computes winners alone."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

import moe_kernels as mk
from bench.entry import DIRECTIONS, Inputs, Shape, entry
from moe_kernels.cases.kwta import KWTA
from moe_kernels.cases.kwta_linear import KWTA_LINEAR
from moe_kernels.ops._define import operators
from python_ref.kwta import pack_bits, unpack_bits


def _complete(shape: Shape, device: str) -> Shape:
    return {"R": 8192 if device == "cuda" else max(1, 2**21 // shape["N"]), **shape}


def _mask(inputs: Inputs) -> Inputs:
    """The bits that the backward kernel reads, and the mask for that of the peer."""
    mask = mk.kwta_mask(inputs["x"], inputs["k"])
    return {"bits": pack_bits(mask), "mask": mask.to(inputs["x"].dtype)}


def _composition(inputs: Inputs) -> Tensor:
    x = inputs["x"]
    mask = torch.zeros_like(x).scatter_(-1, x.detach().topk(inputs["k"], dim=-1).indices, 1)
    return mask * x


def _masked_after(inputs: Inputs) -> Tensor:
    return torch.where(inputs["mask"], F.linear(inputs["x"], inputs["weight"], inputs["bias"]), 0)


PEER = "torch topk+scatter+mul"
_THROUGH_AUTOGRAD = entry(
    KWTA,
    {PEER: _composition},
    more=_mask,
    shapes={
        "quick": [{"N": n, "p": 0.5} for n in (100, 512, 1024, 4096)] + [{"N": 1024, "p": 0.1}],
        "llm": [{"N": n, "p": 0.1} for n in (1024, 4096, 14336)],
        "aims": [{"N": 4096, "p": 0.1}],
        "scaling": [{"R": 512, "N": n, "p": 0.5} for n in (128, 512, 2048, 8192, 16384)],
        "papers": [{"N": n, "p": p} for n in (100, 512, 1024, 4096, 16384) for p in (0.1, 0.5, 0.9)],
    },
    complete=_complete,
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
)
ENTRIES = {
    "kwta": replace(
        _THROUGH_AUTOGRAD,
        kernel=lambda backend: {
            **_THROUGH_AUTOGRAD.kernel(backend),
            "backward": lambda inputs: operators.kwta_bwd(inputs["grad"], inputs["bits"], backend),
        },
        peers={PEER: {**_THROUGH_AUTOGRAD.peers[PEER], "backward": lambda inputs: inputs["grad"] * inputs["mask"]}},
        directions=DIRECTIONS,
    ),
    "kwta_linear": entry(
        KWTA_LINEAR,
        {"torch linear, then the mask": _masked_after},
        more=lambda inputs: {"mask": unpack_bits(inputs["bits"], inputs["weight"].shape[0])},
        shapes={
            "quick": [{"T": 512, "D": 1024, "N": 1024, "p": 0.1}],
            "llm": [{"T": 1, "D": 4096, "N": 14336, "p": 0.1}, {"T": 8, "D": 4096, "N": 14336, "p": 0.1}],
            "aims": [{"T": 8, "D": 4096, "N": 14336, "p": 0.1}],
            "scaling": [{"T": tokens, "D": 512, "N": 512, "p": 0.1} for tokens in (16, 64, 256, 1024, 2048)],
            "papers": [{"T": 512, "D": 3000, "N": 3000, "p": p} for p in (0.1, 0.3, 0.5)],
        },
    ),
}
