"""Functions of the backends "cpu" and "cuda": they allocate results and call C++ functions that compute them.

The argument `native` is the backend's module: backends/cpu.py or backends/cuda.py. `native.call(name, work, ...)` calls
the C++ function `name`, declared in csrc/cpu/ops.h or csrc/cuda/ops.h. `work` is a tensor with as many elements as the
function works on; on the CPU it may be their number instead (see backends/cpu.py). The arguments after `work` are
numbers, dtypes and arrays. An array is a tuple (tensor or None, required dtype, required rank): C++ gets the tensor's
address, or 0 for None.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import ModuleType


def bind(native: ModuleType, *files: ModuleType) -> None:
    """Gives the backend's module the functions of `files` whose first parameter is `native`, without this parameter.

    Such a function has one name everywhere: as the operator of torch, here, and in C++.
    """
    for file in files:
        for name, function in vars(file).items():
            if inspect.isfunction(function) and function.__module__ == file.__name__ and not name.startswith("_"):
                parameters = inspect.signature(function).parameters
                if "native" in parameters:
                    setattr(native, name, partial(function, native))
