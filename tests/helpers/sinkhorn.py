"""sinkhorn in float64."""

from __future__ import annotations

import torch

from tests.helpers.targets import Target


def taken(target: Target, n: int) -> int:
    """n, or the largest n that the target's kernels take if that is smaller."""
    return min(n, 64) if target.backend == "cuda" else n


def oracle(scores: torch.Tensor, iterations: int, tau: float) -> torch.Tensor:
    """exp(scores / tau - f - g) in float64; f and g normalise rows and columns."""
    z = scores.double() / tau
    g = torch.zeros_like(z[..., :1, :])
    f = torch.zeros_like(z[..., :1])
    for _ in range(iterations):
        f = torch.logsumexp(z - g, -1, keepdim=True)
        g = torch.logsumexp(z - f, -2, keepdim=True)
    return torch.exp(z - f - g)
