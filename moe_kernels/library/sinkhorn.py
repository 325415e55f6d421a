"""Sinkhorn iterations; `sums` have marginals and a tolerance."""

from __future__ import annotations

from torch import Tensor

from moe_kernels import backends
from moe_kernels.library._define import define


def _sinkhorn_fwd(scores: Tensor, taus: list[float], backend: str) -> Tensor:
    return backends.load(backend, "sinkhorn").sinkhorn_fwd(scores, taus)


def _sinkhorn_bwd(grad: Tensor, scores: Tensor, taus: list[float], backend: str) -> Tensor:
    return backends.load(backend, "sinkhorn").sinkhorn_bwd(grad, scores, taus)


define(
    "sinkhorn_fwd(Tensor scores, float[] taus, str backend) -> Tensor",
    _sinkhorn_fwd,
    lambda scores, taus, backend: scores.new_empty(scores.shape),
    lambda scores, taus, *rest, out_shape=None, **kwargs: 4 * len(taus) * scores[0] * scores[1] * scores[2],
)
define(
    "sinkhorn_bwd(Tensor grad, Tensor scores, float[] taus, str backend) -> Tensor",
    _sinkhorn_bwd,
    lambda grad, scores, taus, backend: scores.new_empty(scores.shape),
    lambda grad, scores, taus, *rest, out_shape=None, **kwargs: 12 * len(taus) * scores[0] * scores[1] * scores[2],
)


def _sinkhorn_sums_fwd(
    scores: Tensor, taus: list[float], rows: Tensor, columns: Tensor, tolerance: float, backend: str
) -> Tensor:
    return backends.load(backend, "sinkhorn").sinkhorn_sums_fwd(scores, taus, rows, columns, tolerance)


def _sinkhorn_sums_bwd(
    grad: Tensor, scores: Tensor, taus: list[float], rows: Tensor, columns: Tensor, tolerance: float, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return backends.load(backend, "sinkhorn").sinkhorn_sums_bwd(grad, scores, taus, rows, columns, tolerance)


define(
    "sinkhorn_sums_fwd(Tensor scores, float[] taus, Tensor rows, Tensor columns, float tolerance, str backend) -> "
    "Tensor",
    _sinkhorn_sums_fwd,
    lambda scores, *rest: scores.new_empty(scores.shape),
    lambda scores, taus, *rest, out_shape=None, **kwargs: 4 * len(taus) * scores[0] * scores[1] * scores[2],
)
define(
    "sinkhorn_sums_bwd(Tensor grad, Tensor scores, float[] taus, Tensor rows, Tensor columns, float tolerance, "
    "str backend) -> (Tensor, Tensor, Tensor)",
    _sinkhorn_sums_bwd,
    lambda grad, scores, taus, rows, columns, *rest: tuple(x.new_empty(x.shape) for x in (scores, rows, columns)),
    lambda grad, scores, taus, *rest, out_shape=None, **kwargs: 12 * len(taus) * scores[0] * scores[1] * scores[2],
)
