"""Cases of the linear layer of winners alone: sizes around those of blocks, and masks of few, many and all bits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from moe_kernels.cases.call import normal
from moe_kernels.cases.kwta_linear import KWTA_LINEAR, masks, shapes
from moe_kernels.verify.operation import Case, Operation, differentiated

SMALL = [(3, 9, 33, 4), (1, 40, 300, 7), (2, 17, 5, 5)]
SIZES = [*SMALL, (0, 4, 7, 2), (4, 0, 7, 2), (5, 3, 0, 0), (2, 100, 64, 0), (70, 513, 257, 31), (600, 64, 130, 13)]
SIZES += [(9, 1030, 128, 128), (5, 2049, 5000, 40)]


def _cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for index, (tokens, dim, width, k) in enumerate(SMALL if small else SIZES):
        tensors = normal(shapes({"T": tokens, "D": dim, "N": width}), dtype, "cpu", generator)
        tensors["weight"] = tensors["weight"] / max(dim, 1) ** 0.5
        # A view with gaps between rows; it comes last, as copies to another device have none.
        found = {name: _spread(each.to(device)) if index % 2 else each.to(device) for name, each in tensors.items()}
        if index % 3 == 0:
            del found["bias"]
        bits = masks(tokens, width, k, generator).to(device)
        layout = ", strided" * (index % 2) + ", no bias" * (index % 3 == 0)
        yield Case(f"{tokens} x {dim} to {k} of {width}{layout}", {**found, "bits": bits, "k": k})


def _spread(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, 3))[..., : x.shape[-1]]


OPERATION = Operation(_cases, partial(differentiated, call=KWTA_LINEAR), exact=frozenset(), floor=4.0)
