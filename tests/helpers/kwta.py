"""Rows with special values, and a comparison of bits."""

from __future__ import annotations

import math

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


TIES = ("index", "strict", "all")


INF, NAN = math.inf, math.nan


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))


def special(n: int) -> torch.Tensor:
    pool = torch.tensor([NAN, -NAN, INF, -INF, 0.0, -0.0, 1e-40, -1e-40, 6e-8, 1.0, 1.0, -1.0, 65504.0])
    return pool[torch.randint(len(pool), (n,))]
