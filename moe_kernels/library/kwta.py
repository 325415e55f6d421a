"""kWTA: forward with the packed mask, backward from it, and the mask by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import backends
from moe_kernels.library._define import define, no_flops, rows, words


def refuse_bad_samples(samples: Tensor | None, num_samples: int) -> None:
    """ValueError for samples outside [0, S), on the CPU; for a GPU one would wait."""
    if samples is None or not samples.is_cpu or samples.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(samples))
    if low < 0 or high >= num_samples:
        raise ValueError(f"masked_mlp: samples must be from 0 to {num_samples - 1}; got {low} to {high}")


def _kwta_fwd(x: Tensor, values: Tensor | None, k: int, ties: str, save_bits: bool, backend: str):
    return backends.load(backend, "kwta").kwta_fwd(x, values, k, ties, save_bits)


def _kwta_fwd_fake(x: Tensor, values: Tensor | None, k: int, ties: str, save_bits: bool, backend: str):
    bits = x.new_empty((x.shape[0], words(x.shape[1]) if save_bits else 0), dtype=torch.int32)
    return x.new_empty(x.shape), bits


def _kwta_bwd(grad: Tensor, bits: Tensor, backend: str) -> Tensor:
    return backends.load(backend, "kwta").kwta_bwd(rows(grad), bits)


def _kwta_mask(x: Tensor, k: int, ties: str, backend: str) -> Tensor:
    return backends.load(backend, "kwta").kwta_mask(x, k, ties)


def _one_per_element(x_shape, *args, out_shape=None, **kwargs) -> int:
    return x_shape[0] * x_shape[1]


define(
    "kwta_fwd(Tensor x, Tensor? values, SymInt k, str ties, bool save_bits, str backend) -> (Tensor, Tensor)",
    _kwta_fwd,
    _kwta_fwd_fake,
    _one_per_element,
)
define(
    "kwta_bwd(Tensor grad, Tensor bits, str backend) -> Tensor",
    _kwta_bwd,
    lambda grad, bits, backend: grad.new_empty(grad.shape),
    _one_per_element,
)
define(
    "kwta_mask(Tensor x, SymInt k, str ties, str backend) -> Tensor",
    _kwta_mask,
    lambda x, k, ties, backend: x.new_empty(x.shape, dtype=torch.bool),
    no_flops,
)
