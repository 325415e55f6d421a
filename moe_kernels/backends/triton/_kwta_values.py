"""Keys of k-winner-take-all and the float32 values that they represent.

A key is an integer in the order of the elements: the bits of the magnitude, negated for a negative element. NaN has the
key INF + 1. INF: the bits of +inf. FORMAT: 0 for float32, 1 for bfloat16, 2 for float16.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def value_of(key, INF: tl.constexpr, FORMAT: tl.constexpr):
    """A key's value in float32."""
    magnitude = tl.where(key < 0, -key, key)
    if FORMAT == 0:
        value = magnitude.to(tl.float32, bitcast=True)
    elif FORMAT == 1:
        value = (magnitude << 16).to(tl.float32, bitcast=True)
    else:
        # The exponent biases of float16 and float32 differ by 112, so the factor is 2^112. The product is exact for
        # subnormals too, and maps inf to 65536, above every finite float16.
        value = (magnitude << 13).to(tl.float32, bitcast=True) * 5192296858534827628530496329220096.0
    return tl.where(key < 0, -value, value)


@triton.jit
def key_near(value, INF: tl.constexpr, FORMAT: tl.constexpr):
    """A key close to a float32 value; any key for a NaN."""
    magnitude = tl.abs(value)
    if FORMAT == 0:
        key = magnitude.to(tl.int32, bitcast=True)
    elif FORMAT == 1:
        key = magnitude.to(tl.int32, bitcast=True) >> 16
    else:
        scaled = tl.minimum(magnitude, 65536.0) * 1.925929944387236e-34
        key = scaled.to(tl.int32, bitcast=True) >> 13
    return tl.where(value < 0, -key, key)
