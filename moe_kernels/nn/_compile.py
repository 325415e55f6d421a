"""A decorator for functions that torch.compile must not trace."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


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
