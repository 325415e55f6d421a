"""harden's linear assignment as an operator, since torch.compile cannot trace scipy."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

import python_ref.harden as reference
from moe_kernels.ops._define import define, no_flops


def _harden(soft: Tensor) -> Tensor:
    if importlib.util.find_spec("scipy") is None:
        raise ImportError("harden: linear assignment needs scipy: pip install moe_kernels[assignment]")
    if bool((soft.isnan() | soft.isposinf()).any()):
        raise ValueError(f"harden: soft must hold neither NaN nor +inf, got shape {tuple(soft.shape)} with some")
    try:
        return reference.harden(soft)
    except ValueError as error:
        raise ValueError(f"harden: every permutation uses a forbidden pair ({error})") from None


define(
    "harden(Tensor soft) -> Tensor",
    _harden,
    lambda soft: soft.new_empty(soft.shape[:-1], dtype=torch.int64),
    no_flops,
)
