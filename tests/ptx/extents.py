"""The extents that a launch may access: of each of its tensors the bytes from the first to the last element."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def merged(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Address and number of bytes of each extent; overlapping extents are merged."""
    spans = set()
    for tensor in tensors:
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans.add((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
    found: list[list[int]] = []
    for start, end in sorted(spans):
        if found and start < found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return [(start, end - start) for start, end in found]
