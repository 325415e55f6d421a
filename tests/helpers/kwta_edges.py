"""Rows at any address and stride, and a comparison of kwta on them with the definition."""

from __future__ import annotations

import math

import torch

import moe_kernels as mk
from tests.helpers.kwta import same_bits, special
from tests.helpers.targets import Target

ROWS = 9  # contiguous rows of odd length start at every offset in a vector


def rows_of(n: int) -> torch.Tensor:
    kinds = (torch.randn, lambda n: torch.randint(-2, 3, (n,)).float(), special, lambda n: torch.full((n,), 0.3))
    return torch.stack([kinds[r % len(kinds)](n) for r in range(ROWS)])


def placed(x: torch.Tensor, offset: int, gap: int) -> torch.Tensor:
    """x with its first row `offset` elements behind the start of its memory, and `gap` NaN behind each row."""
    stride = x.shape[1] + gap
    memory = x.new_full((offset + len(x) * stride,), math.nan)
    view = memory.as_strided(x.shape, (stride, 1), offset)
    view.copy_(x)
    return view


OUTPUTS = ("mask", "bits", "values")  # what a launch writes; Triton compiles a kernel for each


def check(
    target: Target,
    x: torch.Tensor,
    k: int,
    ties: str,
    values: torch.Tensor,
    grad: torch.Tensor,
    outputs: tuple[str, ...] = OUTPUTS,
) -> None:
    expected_y, expected_bits = mk.kwta_bits(x, k, ties=ties, backend="reference")
    # The reference sorts the rows, which takes long, so it is not called for the mask too.
    lanes = torch.arange(32, dtype=torch.int32, device=x.device)
    mask = ((expected_bits[..., None] >> lanes) & 1).bool().flatten(-2)[..., : x.shape[-1]]
    if "mask" in outputs:
        assert torch.equal(mk.kwta_mask(x, k, ties=ties, backend=target.backend), mask)
    if "bits" in outputs:
        y, bits = mk.kwta_bits(x, k, ties=ties, backend=target.backend)
        assert same_bits(y, expected_y)
        assert torch.equal(bits, expected_bits)
    if "values" in outputs:
        assert same_bits(mk.kwta(x, k, values=values, ties=ties, backend=target.backend), torch.where(mask, values, 0))
    assert same_bits(mk.kwta_apply(grad, expected_bits, backend=target.backend), torch.where(mask, grad, 0))


PLACES = {  # (offset, gap) of x, of values and of the gradient
    "one behind another": ((0, 0), (0, 0), (0, 0)),
    "behind an offset": ((3, 0), (3, 0), (3, 0)),
    "apart by vectors": ((0, 8), (8, 16), (0, 8)),
    "each tensor otherwise": ((1, 1), (6, 0), (5, 3)),
}
