"""The smooth step of a node of a tree, for the kernels of tree_gate and tree_route."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def share(t, sign, half, slope):
    """1/2 + sign * t / gamma, for |t| <= gamma / 2. sign: 1 or -1; half: gamma / 2; slope: 1 / gamma.

    A result near 0 has full precision: sign * t + gamma / 2 is then exact. At sign * t = gamma / 2 the result is 1
    except for rounding, and its smooth step is exactly 1.
    """
    return tl.fma(t, sign, half) * slope


@triton.jit
def clamp(t, half):
    """t clamped to [-half, half]; NaN stays NaN."""
    t = tl.maximum(t, -half, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(t, half, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smooth(u):
    return u * u * tl.fma(u, -2.0, 3.0)
