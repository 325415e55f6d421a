"""What eager code may do and a recorded graph may not: a decorator for functions that torch.compile must not trace, and
whether values can be read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

Function = TypeVar("Function", bound=Callable[..., Any])
_PROXY = torch._C._TorchDispatchModeKey.PROXY  # the mode in which make_fx records


def on_the_host(reason: str) -> Callable[[Function], Function]:
    """The decorator torch.compiler.disable(reason=reason), applied at the first call after torch._dynamo was imported.

    torch's decorator imports torch._dynamo when it decorates, which would add seconds to the import of this package.
    """

    def decorate(function: Function) -> Function:
        disabled: list[Callable[..., Any]] = []

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            if not disabled:
                disabled.append(torch.compiler.disable(function, reason=reason))
            return disabled[0](*args, **kwargs)

        # torch.compiler.disable sets these attributes; they make torch.compile break its graph at the call.
        call._torchdynamo_disable = True  # type: ignore[attr-defined]
        call._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return cast(Function, call)

    return decorate


def has_values(x: Tensor) -> bool:
    """Whether code may depend on the values of x: x is on the CPU, where reading waits for no device, and no graph is
    recorded, which would keep these values for every input. Tensors of another class, as a FakeTensor, have none."""
    recorded = is_compiling() or torch.jit.is_tracing()
    return type(x) is Tensor and x.is_cpu and not recorded and torch._C._get_dispatch_mode(_PROXY) is None
