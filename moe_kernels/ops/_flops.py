"""Registers FLOP formulas with torch.utils.flop_counter as soon as that module is imported.

`import moe_kernels` does not import flop_counter, since flop_counter imports Triton. An import hook registers the
formulas right after the import of flop_counter, before the first FlopCounterMode copies the registered formulas.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

COUNTER = "torch.utils.flop_counter"

_formulas: list[tuple[Any, Callable[..., int]]] = []


def register(packet: Any, formula: Callable[..., int]) -> None:
    """Registers the formula of an operator: now, or when torch.utils.flop_counter is imported."""
    counter = sys.modules.get(COUNTER)
    if counter is not None:
        counter.register_flop_formula(packet)(formula)
        return
    if not _formulas:
        sys.meta_path.insert(0, _Finder())
    _formulas.append((packet, formula))


class _Finder(MetaPathFinder):
    def find_spec(self, fullname, path, target=None) -> ModuleSpec | None:
        if fullname != COUNTER:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]  # a copy of this package may have a finder there
        spec = next(filter(None, (each.find_spec(fullname, path, target) for each in later)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        for packet, formula in _formulas:
            module.register_flop_formula(packet)(formula)
