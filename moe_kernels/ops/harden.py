"""The permutation nearest to a soft one: linear assignment, computed on the host by scipy."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

import python_ref.harden as reference
from moe_kernels import backends
from moe_kernels.ops._checks import FLOATING, check_square, check_tensor
from moe_kernels.ops._define import define, no_flops, operators


def _harden(soft: Tensor) -> Tensor:
    if importlib.util.find_spec("scipy") is None:
        raise ImportError("harden: linear assignment needs scipy: pip install moe_kernels[assignment]")
    if bool((soft.isnan() | soft.isposinf()).any()):
        raise ValueError(f"harden: soft must hold neither NaN nor +inf, got shape {tuple(soft.shape)} with some")
    try:
        return reference.harden(soft)
    except ValueError as error:
        raise ValueError(f"harden: every permutation uses a forbidden pair ({error})") from None


def _check(op: str, soft: Tensor) -> None:
    check_tensor(op, "soft", soft, FLOATING)
    check_square(op, "soft", soft)


define(
    "harden(Tensor soft) -> Tensor",
    _harden,
    lambda soft: soft.new_empty(soft.shape[:-1], dtype=torch.int64),
    no_flops,
    check=_check,
)


def harden(soft: Tensor, *, backend: str | None = None) -> Tensor:
    """The permutation c with the largest sum over i of soft[i, c_i], as the column c_i of each row i.

    Args:
        soft: (..., n, n), float32, bfloat16, float16 or float64; -inf forbids a pair (i, j).
        backend: "reference" or None.

    Returns:
        int64 (..., n), on the device of soft, a permutation of 0 .. n-1 for every matrix. If several permutations have
        the largest sum, scipy determines which one is returned. Not differentiable. The host waits for a GPU and takes
        O(n^3) time a matrix: meant for one call per training, not for every step.

    Raises:
        TypeError: a tensor has another dtype or layout, or torch.func or forward-mode AD is used.
        ValueError: soft is not (..., n, n), holds NaN or +inf, or forbids every permutation.
        ImportError: scipy is missing: pip install moe_kernels[assignment].
        BackendError: the named backend cannot run this.

    Source: COMET trees, section 4.3: the end of stage one of the local search.

    Example:
        >>> mk.harden(torch.tensor([[0.9, 0.1], [0.8, 0.2]]))  # 0.9 + 0.2 is more than 0.1 + 0.8
        tensor([0, 1])
    """
    _check("harden", soft)
    backends.choose("harden", backend, soft)
    return operators.harden(soft.detach())
