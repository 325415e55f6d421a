"""Fast kernels for mixtures of experts that are not the textbook kind, each verified against its definition."""

from moe_kernels._version import __version__
from moe_kernels.backends import BackendError, available_backends, explain, use_backend
from moe_kernels.ops.kwta import k_from_fraction, kwta, kwta_mask


__all__ = [
    "BackendError",
    "__version__",
    "available_backends",
    "explain",
    "k_from_fraction",
    "kwta",
    "kwta_mask",
    "use_backend",
]
