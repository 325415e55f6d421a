"""kWTA on kinds of rows, sizes, winners, tie rules and layouts."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from moe_kernels.ops import kwta
from moe_kernels.verify.operation import Case, Inputs, Operation, Outputs, fill


def _layout(x: Tensor, layout: str) -> Tensor:
    """The same values with gaps between rows ("strided"), stored by columns ("transposed"), or unchanged."""
    if layout == "strided":
        return torch.nn.functional.pad(x, (0, 3))[:, : x.shape[1]]
    return x.t().contiguous().t() if layout == "transposed" else x


def _cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    """Kinds of rows x sizes x winners x tie rules; layout and `values` are random, independent of the tie rule."""
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    sizes = {1: 1, 33: 2, 500: 1} if small else {1: 3, 31: 5, 100: 9, 1000: 4, 1025: 3, 4099: 2, 16400: 3}
    for n, rows in sizes.items():
        for kind in ("normal", "ties", "constant", "special", "sorted"):
            for index, k in enumerate(sorted({0, 1, n // 2, n})):
                for ties in (kwta.TIES[index % 3],) if small or n > 100 else kwta.TIES:
                    layout = draw.choice(("contiguous", "strided", "transposed"))
                    given = draw.random() < 0.5
                    kinds = {"x": kind, "grad": "normal"} | ({"values": "special"} if given else {})
                    tensors = {
                        name: _layout(fill(each, rows, n, dtype, generator), layout).to(device)
                        for name, each in kinds.items()
                    }
                    inputs = {"values": None, **tensors, "k": k, "ties": ties}
                    yield Case(f"{kind} {rows} x {n}, k={k}, {ties}, {layout}{', values=' * given}", inputs)


def _run(inputs: Inputs, backend: str) -> Outputs:
    x, values, k, ties = (inputs[name] for name in ("x", "values", "k", "ties"))
    leaf = (x if values is None else values).detach().requires_grad_()
    given = {"ties": ties, "backend": backend}
    y = kwta.kwta(leaf, k, **given) if values is None else kwta.kwta(x, k, values=leaf, **given)
    (gradient,) = torch.autograd.grad(y, leaf, inputs["grad"])
    inference = kwta.kwta(x, k, values=values, **given)
    return {"y": y, "y without grad": inference, "mask": kwta.kwta_mask(x, k, **given), "gradient": gradient}


OPERATION = Operation(_cases, _run, exact=frozenset({"y", "y without grad", "mask", "gradient"}))
