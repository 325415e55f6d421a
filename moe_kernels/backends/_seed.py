"""Where a search for a threshold starts."""

from functools import cache
from statistics import NormalDist


@cache
def normal_quantile(k: int, n: int) -> float:
    """Standard deviations above the mean at which k of n normal values lie above; 0 where there is nothing to find."""
    return NormalDist().inv_cdf(1 - (k - 0.5) / n) if 0 < k < n else 0.0
