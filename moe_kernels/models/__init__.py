"""The papers' networks, put together from moe_kernels.nn."""

from moe_kernels.models.mlp import comet_mlp, dense_twin

__all__ = ["comet_mlp", "dense_twin"]
