"""The bytes that a launch may access: from the first to the last element of each of its tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .machine import Extent


def extents(tensors: Iterable[torch.Tensor]) -> list[Extent]:
    """Extents of the tensors, not of their whole storages. Overlapping ones are merged."""
    spans = []
    for tensor in tensors:
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
    merged: list[list[int]] = []
    for start, end in sorted(set(spans)):
        if merged and start < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [Extent(start, end - start) for start, end in merged]
