"""The normal quantile from which kernels of k-winner-take-all guess their first threshold."""

from functools import cache
from statistics import NormalDist


@cache
def normal_quantile(k: int, n: int) -> float:
    """The value that about k of n standard normal values exceed; 0 if k is 0 or n."""
    return NormalDist().inv_cdf(1 - (k - 0.5) / n) if 0 < k < n else 0.0
