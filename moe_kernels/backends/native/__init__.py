"""Functions of the backends "cpu" and "cuda": they allocate results and call C++ functions that compute them.

The argument `native` is the backend's module: backends/cpu.py or backends/cuda.py. `native.call(name, work, ...)` calls
the C++ function `name`, declared in csrc/cpu/ops.h or csrc/cuda/ops.h. `work` is a tensor with as many elements as the
function works on; on the CPU it may be their number instead (see backends/cpu.py). The arguments after `work` are
numbers, dtypes and arrays. An array is a tuple (tensor or None, required dtype): C++ gets the tensor's
address, or 0 for None.
"""

from __future__ import annotations

import inspect
from functools import partial
from importlib import import_module
from types import ModuleType


def bind(native: ModuleType, *names: str) -> None:
    """Gives the backend's module the functions of the named files here that have a parameter `native`, without it.

    Such a function has one name everywhere: as the operator of torch, here, and in C++.
    """
    for file in (import_module(f"{__name__}.{name}") for name in names):
        for name, function in inspect.getmembers(file, inspect.isfunction):
            own = function.__module__ == file.__name__ and not name.startswith("_")
            if own and "native" in inspect.signature(function).parameters:
                setattr(native, name, partial(function, native))
