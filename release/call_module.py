"""Loads moe_kernels._cpu without torch and calls k-winner-take-all on every instruction set of this machine.

python call_module.py FOLDER, the folder of the installed package.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from typing import Any


def load(folder: Path) -> Any:
    file = folder / f"_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"
    loader = ExtensionFileLoader("_cpu", str(file))
    module = importlib.util.module_from_spec(ModuleSpec("_cpu", loader, origin=str(file)))
    loader.exec_module(module)
    return module


def largest_two(module: Any, isa: int) -> list[float]:
    """[1, 4, 2, 3] with all but its two largest elements replaced by 0, as kwta_fwd of csrc/cpu/ops.h computes it."""
    x, y = (ctypes.c_float * 4)(1, 4, 2, 3), (ctypes.c_float * 4)(*[-1] * 4)
    rows, n, k, float32, ties, quantile, threads = 1, 4, 2, 0, 0, 0.0, 1
    places = ctypes.addressof(x), n, 0, 0, ctypes.addressof(y), 0, 0  # no values, bits or mask
    module.kwta_fwd(isa, False, float32, *places, rows, n, k, ties, quantile, threads)
    return list(y)


if __name__ == "__main__":
    cpu = load(Path(sys.argv[1]))
    for number, name in enumerate(cpu.isas):
        got = largest_two(cpu, number)
        if got != [0, 4, 0, 3]:
            sys.exit(f"kwta_fwd on {name}: expected [0, 4, 0, 3], got {got}")
    print(*cpu.isas)
