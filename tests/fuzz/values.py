"""Makes the tensors of a case, each with a kind of values and a memory layout."""

from __future__ import annotations

import math
import random
import zlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.cases.call import Call, Shapes
from moe_kernels.verify.operation import random_rows

Spec = dict[str, Any]

KINDS = ("normal", "ties", "constant", "zeros", "large", "tiny", "special")
LAYOUTS = ("contiguous", "padded", "offset", "stepped", "transposed", "expanded")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
SIZES = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 100, 127, 130)


def size(draw: random.Random, largest: int, smallest: int = 0) -> int:
    """A size from `smallest` to `largest`: with probability 0.8 one of SIZES, else uniform."""
    fit = [each for each in SIZES if smallest <= each <= largest]
    return draw.choice(fit) if draw.random() < 0.8 else draw.randint(smallest, largest)


def describe(draw: random.Random, *names: str, kinds: tuple[str, ...] = KINDS) -> Spec:
    """A random kind and layout for each named tensor; the likeliest are "normal" and "contiguous"."""
    spec = {}
    for name in names:
        spec[f"{name}.kind"] = draw.choice(kinds) if draw.random() < 0.4 else "normal"
        spec[f"{name}.layout"] = draw.choice(LAYOUTS) if draw.random() < 0.4 else "contiguous"
    return spec


def make(spec: Spec, name: str, *shape: int) -> Tensor:
    """The tensor `name` of a case; the spec and the shape determine it."""
    dtype, kind = DTYPES[spec["dtype"]], spec.get(f"{name}.kind", "normal")
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {spec['seed']}".encode()))
    count, columns = math.prod(shape[:-1]), shape[-1]
    if kind == "zeros":
        x = torch.zeros(count, columns, dtype=dtype)
    elif kind in ("large", "tiny"):
        limits = torch.finfo(dtype)
        scale = limits.max**0.4 if kind == "large" else limits.smallest_normal
        x = (torch.randn(count, columns, generator=generator, dtype=torch.float64) * scale).to(dtype)
    else:
        x = random_rows(kind, count, columns, dtype, generator)
    return lay(x.reshape(shape), spec.get(f"{name}.layout", "contiguous"))


def tensors(spec: Spec, call: Call, shapes: Shapes) -> dict[str, Tensor]:
    """The leaves and gradients of a call, those that have shapes."""
    return {name: make(spec, name, *shapes[name]) for name in call.tensors if name in shapes}


def lay(x: Tensor, layout: str) -> Tensor:
    """x in a memory layout; "expanded" returns x[:1] repeated. Memory outside the returned view holds NaN, or for
    bfloat16 the largest number, because on CPUs with AMX torch.mm reads past a bfloat16 view.
    """
    rest = torch.finfo(x.dtype).max if x.dtype == torch.bfloat16 else torch.nan
    if layout == "contiguous" or not x.dim() or not x.numel():
        return x
    if layout == "padded":
        return F.pad(x, (0, 3), value=rest)[..., : x.shape[-1]]
    if layout == "offset":
        return F.pad(x.reshape(-1), (1, 1), value=rest)[1:-1].view(x.shape)
    if layout == "stepped":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), rest, dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "transposed":
        return x.mT.contiguous().mT if x.dim() > 1 else x
    return x[:1].expand(x.shape)
