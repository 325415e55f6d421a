"""Cases of kWTA: kinds of rows, sizes, numbers of winners, tie rules and layouts."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from moe_kernels.cases.call import Call
from moe_kernels.cases.kwta import KWTA
from moe_kernels.ops import kwta
from moe_kernels.verify.operation import Case, Inputs, Operation, Outputs, differentiated, random_rows


def _layout(x: Tensor, layout: str) -> Tensor:
    """x stored with gaps between rows ("strided"), stored by columns ("transposed"), or unchanged."""
    if layout == "strided":
        return torch.nn.functional.pad(x, (0, 3))[:, : x.shape[1]]
    return x.t().contiguous().t() if layout == "transposed" else x


def _cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    """Kinds of rows x sizes x k x tie rules (a single rule for each k if `small` or n > 100), with random layouts."""
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
                        # The layout comes last: a copy to another device would have no gaps between rows.
                        name: _layout(random_rows(each, rows, n, dtype, generator).to(device), layout)
                        for name, each in kinds.items()
                    }
                    inputs = {"values": None, **tensors, "k": k, "ties": ties}
                    yield Case(f"{kind} {rows} x {n}, k={k}, {ties}, {layout}{', values=' * given}", inputs)


APPLY = Call(kwta.kwta_apply, ("y",), ("values",), grads=("grad",))


def _run(inputs: Inputs, backend: str) -> Outputs:
    x, values, k = (inputs[name] for name in ("x", "values", "k"))
    given = {"ties": inputs["ties"], "backend": backend}
    found = differentiated(inputs, backend, KWTA, ("x",) if values is None else ("values",))
    found["y without grad"] = KWTA.run(inputs, backend)
    found["mask"], found["bits"] = kwta.kwta_mask(x, k, **given), kwta.kwta_bits(x, k, **given)[1]
    applied = {"values": x if values is None else values, "bits": found["bits"], "grad": inputs["grad"]}
    return found | {f"{name} of kwta_apply": each for name, each in differentiated(applied, backend, APPLY).items()}


RESULTS = ("y", "gradient of x", "gradient of values")
APPLIED = ("y of kwta_apply", "gradient of values of kwta_apply")
OPERATION = Operation(_cases, _run, exact=frozenset((*RESULTS, *APPLIED, "y without grad", "mask", "bits")))
