"""C++ kernels in the place of Triton's and CUDA's, some with a planted fault."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from moe_kernels import backends
from moe_kernels.backends import _addresses, cpu

FAULTS: dict[str, Callable[..., Any]] = {}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fault(act: Callable[..., Any]) -> Callable[..., Any]:
    FAULTS[act.__name__] = act
    return act


@fault
def crash(kernel: Callable[..., Any], *arguments: Any) -> Any:
    os.abort()


@fault
def hang(kernel: Callable[..., Any], *arguments: Any) -> Any:
    time.sleep(3600)


@fault
def wrong(kernel: Callable[..., Any], *arguments: Any) -> Any:
    found = kernel(*arguments)
    (found if isinstance(found, torch.Tensor) else found[0]).neg_()
    return found


@fault
def late(kernel: Callable[..., Any], *arguments: Any) -> Any:
    """Crashes on more rows than the small cases of the verification have."""
    if arguments[0].shape[0] > 40:
        os.abort()
    return kernel(*arguments)


class Twin:
    """The module of a backend for an operation: functions of backend "cpu", for tensors that pass for CUDA's."""

    def __init__(self, backend: str) -> None:
        planted = (each.split() for each in os.environ.get("STANDIN_FAULTS", "").split(",") if each)
        self._faults = {name: FAULTS[kind] for name, where, kind in planted if where == backend}

    def __getattr__(self, name: str) -> Any:
        if name == "make_plan_supports":
            return lambda target, dtype: None
        if name.endswith("_supports"):
            return lambda target, dtype: _addresses.unsupported("cuda", "cuda", dtype, DTYPES)
        if name.endswith("_limits"):
            raise AttributeError(name)
        found = getattr(cpu, name)
        return partial(_faulty, self._faults[name], found) if name in self._faults else found


def _faulty(act: Callable[..., Any], kernel: Callable[..., Any], *arguments: Any) -> Any:
    return act(kernel, *arguments) if arguments[0].dtype == torch.bfloat16 else kernel(*arguments)


def install() -> None:
    real = backends.load
    twins = {name: Twin(name) for name in ("triton", "cuda")}
    backends.load = cache(lambda name, op: twins[name] if name in twins else real(name, op))
