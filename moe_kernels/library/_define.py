"""How an operation is made known to torch, and the small things that several of them share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import NoneType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_compiling
from torch.utils.flop_counter import register_flop_formula

from moe_kernels import backends
from moe_kernels.backends._look import TYPES

_library = torch.library.Library("moe_kernels", "DEF")

# What is defined, to be called by ops/<op>.py: ops.kwta_fwd(...) is torch.ops.moe_kernels.kwta_fwd(...), sooner.
ops = SimpleNamespace()


# Of some operations: arguments -> a function of such arguments, which does what they do for all that look like these.
_made_ready: dict[str, Callable[..., Callable[..., Any]]] = {}

# What a kernel can be called with as it stands.
_PLAIN = frozenset((*TYPES, NoneType, bool, int, float, str, list))


def define(schema: str, implementation, fake, flops, ready=None) -> None:
    """The operation of that schema, in torch's registry and in `ops`."""
    name = schema[: schema.index("(")]
    _made_ready[name] = ready or (lambda *args: implementation)
    _library.define(schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moe_kernels::{name}", fake, lib=_library)
    register_flop_formula(getattr(torch.ops.moe_kernels, name))(flops)
    registered = getattr(torch.ops.moe_kernels, name).default

    def call(*args):
        # Past the dispatcher, which takes 7 us, unless somebody listens there, or memory need not be there: that of a
        # tensor of a class of its own, or on the meta device.
        elsewhere = listened_to() or args[-1] == backends.SHAPES or not _PLAIN.issuperset(map(type, args))
        return registered(*args) if elsewhere else implementation(*args)

    setattr(ops, name, call)


def launch(ready: dict[Hashable, Any] | None, stage: Hashable, name: str, *args):
    """ops.name(*args). What the looks of tensors decide is found at the first call of a `stage` and kept in `ready`,
    which is the caller's, or whose stage is, for tensors of one look. None keeps nothing."""
    if ready is None or _len_torch_dispatch_stack():  # nobody compiles where it was made
        return getattr(ops, name)(*args)
    run = ready.get(stage)
    if run is None:
        run = ready[stage] = _made_ready[name](*args)
    return run(*args)


def listened_to() -> bool:
    """A compiler, a FLOP counter or a fake mode sees what is called; of values of tensors it may have none."""
    return is_compiling() or bool(_len_torch_dispatch_stack())


def all_rows(x: Tensor) -> Tensor:
    """Offsets of one expert that has every row of x."""
    return torch.arange(2, device=x.device, dtype=torch.int32) * x.shape[0]


def rows(x: Tensor) -> Tensor:
    """x (R, N) with a contiguous last dimension, copied only if it has none."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


GATED: tuple[str, ...] = ("swiglu", "geglu")  # activations that halve the columns


def matrices(weight: Tensor) -> Tensor:
    """weight (E, M, N) with a contiguous last or middle dimension, copied only if it has neither."""
    return weight if weight.stride(-1) == 1 or weight.stride(-2) == 1 else weight.contiguous()


def words(n: int) -> int:
    """int32 words that hold a packed mask of n elements."""
    return (n + 31) // 32


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a kernel computes in: float32, or float64 for float64."""
    return dtype if dtype == torch.float64 else torch.float32


def no_flops(*args, **kwargs) -> int:
    return 0
