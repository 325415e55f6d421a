"""Tensor maps for bulk copies, in the layout of executor/bulk.cpp, not in that of cuTensorMapEncodeTiled."""

from __future__ import annotations

import struct
from collections.abc import Sequence

_MAGIC = 0x50414D524F534E54  # the bytes "TNSORMAP", by which bulk.cpp recognises a map
_SPANS = {1: 32, 2: 64, 3: 128}  # CUtensorMapSwizzle -> bytes of a row of the box
BYTES = 128


def encode(
    address: int, element: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int
) -> bytes:
    """The 128 bytes of a map.

    element: bytes of an element. sizes, strides, box: in elements, the contiguous dimension last. swizzle: a number of
    CUtensorMapSwizzle.
    """
    if swizzle not in _SPANS or box[-1] * element != _SPANS[swizzle]:
        raise NotImplementedError(
            "encode: expected box rows of 32, 64 or 128 bytes for swizzle 1, 2 or 3; "
            f"got swizzle {swizzle} and {box[-1] * element} bytes"
        )
    steps = [element * stride for stride in strides[:-1]]
    if address % 16 or strides[-1] != 1 or any(step % 16 or step <= 0 for step in steps) or max(box) > 256:
        raise ValueError(
            "encode: expected an address and positive strides in multiples of 16 bytes, a contiguous last dimension, "
            f"box sizes up to 256; got address {address:#x}, strides of {steps} bytes, last stride {strides[-1]} "
            f"elements, box {list(box)}"
        )
    rank = len(sizes)

    def padded(values: Sequence[int], count: int) -> list[int]:
        return [*reversed(values), *[0] * (count - len(values))]

    fields = [_MAGIC, address, rank, element, _SPANS[swizzle], 0]
    fields += [*padded(sizes, 5), *padded(steps, 4), *padded(box, 5)]
    return struct.pack("<2Q4I5Q4Q5I", *fields).ljust(BYTES, b"\0")
