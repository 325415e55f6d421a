"""What torch knows of the operations: schemas, fakes (shapes without data) and FLOP formulas.

torch.compile, opcheck and torch.utils.flop_counter all read these. An operation is one schema, one implementation that
hands over to the backend named in its last argument, and one fake. Autograd stands in ops/<op>.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moe_kernels import backends

_library = torch.library.Library("moe_kernels", "DEF")


def _define(schema: str, implementation, fake, flops) -> None:
    name = schema[: schema.index("(")]
    _library.define(schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moe_kernels::{name}", fake, lib=_library)
    register_flop_formula(getattr(torch.ops.moe_kernels, name))(flops)


def rows(x: Tensor) -> Tensor:
    """x (R, N) with a contiguous last dimension, copied only if it has none."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def words(n: int) -> int:
    """int32 words that hold a packed mask of n elements."""
    return (n + 31) // 32


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


_define(
    "kwta_fwd(Tensor x, Tensor? values, SymInt k, str ties, bool save_bits, str backend) -> (Tensor, Tensor)",
    _kwta_fwd,
    _kwta_fwd_fake,
    _one_per_element,
)
_define(
    "kwta_bwd(Tensor grad, Tensor bits, str backend) -> Tensor",
    _kwta_bwd,
    lambda grad, bits, backend: grad.new_empty(grad.shape),
    _one_per_element,
)
_define(
    "kwta_mask(Tensor x, SymInt k, str ties, str backend) -> Tensor",
    _kwta_mask,
    lambda x, k, ties, backend: x.new_empty(x.shape, dtype=torch.bool),
    lambda *args, **kwargs: 0,
)
