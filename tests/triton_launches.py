"""Records launches of Triton kernels: Triton binds their arguments, but nothing is compiled or run."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import moe_kernels.backends.triton as kernels
from moe_kernels.backends.triton import _grouped_configs

_devices = itertools.count(1000)


@dataclass(frozen=True)
class NoDevice:
    """Driver of an absent GPU. Every instance has a new device number, as Triton caches compiled kernels by device."""

    capability: int
    number: int = field(default_factory=lambda: next(_devices))

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def recorded(capability: int = 80) -> Iterator[list[dict[str, Any]]]:
    """Yields a list, to which each launch of a Triton kernel in the block adds a dictionary: kernel (name), grid,
    options, source (what Triton would compile), key (of Triton's cache), compiles (whether this kernel and key are new
    in the block). Launches take CPU tensors."""
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

    with contextlib.ExitStack() as changed:
        changed.enter_context(patch.object(driver, "_active", NoDevice(capability)))
        changed.enter_context(patch.object(JITFunction, "run", record))
        changed.enter_context(patch.object(knobs.runtime, "jit_cache_hook", hook))
        changed.enter_context(patch.object(kernels, "device_type", "cpu"))
        changed.enter_context(patch.object(_grouped_configs, "loop", lambda device: capability))
        yield launches
