"""Slices of a batch against the whole, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import moe_kernels as mk

T = 678
SIZES = (1, 2, 3, 4, 5, 8, 17, 33, 48, 100)


def rows_that_differ(
    call: Callable[..., Sequence[Tensor]],
    *inputs: Tensor,
    sizes: Sequence[int] = SIZES,
    parts: Sequence[slice] = (),
    gradients: bool = True,
    enabled: bool = True,
) -> dict[int, int]:
    """How many rows of slices differ in a bit from those of the whole, by size of the slice; {} if none.

    sizes: of slices at the start, at row 3 and at the end. parts: slices, instead of sizes.

    call(*inputs) returns tensors with a row for each row of the inputs. Rows of the results count, and of the gradients
    to floating-point inputs, for random gradients of the results. backward runs outside of the block batch_invariant.
    """
    total, grads = len(inputs[0]), list[Tensor]()  # grads: of all rows

    def results(part: slice) -> list[Tensor]:
        given = [each[part].detach().clone().requires_grad_(gradients and each.is_floating_point()) for each in inputs]
        with mk.batch_invariant(enabled):
            found = list(call(*given))
        differentiable = [each for each in found if each.requires_grad]
        if not differentiable:
            return found
        if not grads:
            generator = torch.Generator().manual_seed(0)
            grads.extend(torch.randn(each.shape, generator=generator).to(each) for each in differentiable)
        leaves = [each for each in given if each.requires_grad]
        into = torch.autograd.grad(differentiable, leaves, [each[part] for each in grads], allow_unused=True)
        return [each.detach() for each in (*found, *into) if each is not None]

    whole, differ = results(slice(None)), {}
    with torch.no_grad(), mk.batch_invariant(enabled):
        found = call(*inputs)
    if enabled:  # as in a rollout
        assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(found, whole, strict=False))
    starts = {size: sorted({0, 3, total - size} if size < total - 3 else {0}) for size in sizes}
    for part in parts or [slice(start, start + size) for size in sizes for start in starts[size]]:
        pairs = zip(results(part), whole, strict=True)
        count = sum(_differing(one, other[part]) for one, other in pairs)
        if count:
            size = part.stop - part.start
            differ[size] = differ.get(size, 0) + count
    return differ


def _differing(one: Tensor, other: Tensor) -> int:
    equal = (one == other) | ((one != one) & (other != other))
    return int((~equal).flatten(1).any(1).sum()) if one.numel() else 0
