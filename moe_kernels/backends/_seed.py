"""The quantile from which kWTA's search for a threshold starts."""

from functools import cache
from statistics import NormalDist


@cache
def normal_quantile(k: int, n: int) -> float:
    """The threshold that k of n normal values exceed, in standard deviations above the mean; 0 if k is 0 or n."""
    return NormalDist().inv_cdf(1 - (k - 0.5) / n) if 0 < k < n else 0.0
