"""Conversion between the keys of k-winner-take-all and float32 values.

Keys are integers in the order of the elements. A key is the bits of an element's magnitude, negated if the element is
negative; every NaN has the key INF + 1. INF: the bits of +inf in the format of the elements. FORMAT: 0 for float32,
1 for bfloat16, 2 for float16.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def value_of(key, INF: tl.constexpr, FORMAT: tl.constexpr):
    """The float32 value of a key. For float16, infinity becomes 65536 and NaN 65600, above all finite elements."""
    magnitude = tl.where(key < 0, -key, key)
    if FORMAT == 0:
        value = magnitude.to(tl.float32, bitcast=True)
    elif FORMAT == 1:
        value = (magnitude << 16).to(tl.float32, bitcast=True)
    else:
        # The factor is 2^112: the exponent biases of float32 and float16 differ by 112. Subnormals are exact too.
        value = (magnitude << 13).to(tl.float32, bitcast=True) * 5192296858534827628530496329220096.0
    return tl.where(key < 0, -value, value)


@triton.jit
def key_near(value, INF: tl.constexpr, FORMAT: tl.constexpr):
    """The key of a float32 value, or of an element close to it; an arbitrary number for NaN."""
    magnitude = tl.abs(value)
    if FORMAT == 0:
        key = magnitude.to(tl.int32, bitcast=True)
    elif FORMAT == 1:
        key = magnitude.to(tl.int32, bitcast=True) >> 16
    else:
        scaled = tl.minimum(magnitude, 65536.0) * 1.925929944387236e-34
        key = scaled.to(tl.int32, bitcast=True) >> 13
    return tl.where(value < 0, -key, key)
