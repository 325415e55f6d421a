"""Records what Triton would compile and launch: its real argument binder, a driver that runs nothing.

A process of its own: a kernel that was decorated for the interpreter cannot be launched. `triton_launches.py CASE`
calls the launchers as the function CASE of test_launches_triton.py does and prints the launches as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).parents[1]))

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import moe_kernels.backends.triton as kernels
from moe_kernels.backends.triton import _grouped_configs


@dataclass(frozen=True)
class NoDevice:
    """A driver for a GPU that is not there."""

    capability: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def recorded(capability: int = 80) -> Iterator[list[dict[str, Any]]]:
    """Within the block launches of Triton kernels are appended to the list: kernel, grid, options, what the compiler
    would get, and whether the arguments need a compilation that no launch before them needed."""
    launches: list[dict[str, Any]] = []
    known: set[tuple[str, str]] = set()
    run = JITFunction.run

    def hook(key: Any, repr: str, fn: Any, compile: dict[str, Any], **rest: Any) -> bool:
        this = (fn.name, str(compile["key"]))
        options = {name: compile[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], *compile["configs"])
        launches[-1] |= {"options": options, "compiles": this not in known, "key": this[1], "source": source}
        known.add(this)
        return True  # neither compiles nor launches

    def record(self: JITFunction, *arguments: Any, grid: Any, **named: Any) -> None:
        launches.append({"kernel": self.fn.__name__, "grid": list(grid)})
        run(self, *arguments, grid=grid, **named)

    driver.set_active(NoDevice(capability))
    with contextlib.ExitStack() as changed:
        changed.enter_context(patch.object(JITFunction, "run", record))
        changed.enter_context(patch.object(knobs.runtime, "jit_cache_hook", hook))
        changed.enter_context(patch.object(kernels, "device_type", "cpu"))
        changed.enter_context(patch.object(_grouped_configs, "loop", lambda device: capability))
        yield launches


if __name__ == "__main__":
    import test_launches_triton

    with recorded() as found:
        getattr(test_launches_triton, sys.argv[1])(*map(int, sys.argv[2:]))
    print(json.dumps([{name: value for name, value in each.items() if name != "source"} for each in found]))
