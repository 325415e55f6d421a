"""The launchers of a build by name, and their use in place of a backend's extension module."""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Iterator
from typing import Any

import torch


def _word(value: float, kind: str) -> int:
    if kind in "fd":
        return int.from_bytes(struct.pack(f"<{kind}", value), "little")
    return int(value) & 0xFFFFFFFFFFFFFFFF


class Launchers:
    """The launchers of a build (C++ functions that run kernels) as attributes. Arguments are ints (addresses, sizes, a
    stream) and floats.

    A call may access only tensors that were announced since the previous call, each from its first to its last element.
    """

    def __init__(self, signatures: str) -> None:
        self._types = dict(line.split(" ", 1) for line in signatures.splitlines())
        # Keeps the tensors alive until the call ends. The memory of a freed tensor could belong to another one.
        self._announced: list[torch.Tensor] = []

    def _run(self, name: str, words: list[int]) -> str | None:
        """Runs a call; returns the text of its error, or None."""
        raise NotImplementedError

    def announce(self, *tensors: torch.Tensor) -> None:
        self._announced += tensors

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in self._types:
            raise AttributeError(f"ops.h of this build lists no launcher {name}")
        return functools.partial(self._call, name, self._types[name])

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._types]

    def _call(self, name: str, types: str, *arguments: float) -> None:
        if len(arguments) != len(types):
            raise RuntimeError(f"{name}: {len(arguments)} arguments, {len(types)} expected")
        try:
            error = self._run(name, [_word(value, kind) for value, kind in zip(arguments, types, strict=True)])
        finally:
            self._announced.clear()
        if error:
            raise RuntimeError(f"{name}: {error}")


@contextlib.contextmanager
def replace_module(backend: Any, module: Launchers, **attributes: Any) -> Iterator[Any]:
    """Inside the block, `module` replaces backend.module, and `attributes` replace other attributes of the backend."""
    from moe_kernels.backends import _addresses, reconsider

    attributes["module"] = module
    saved = {name: getattr(backend, name) for name in attributes}
    saved_hook, _addresses.on_pointer = _addresses.on_pointer, module.announce
    for name, value in attributes.items():
        setattr(backend, name, value)
    reconsider()
    try:
        yield module
    finally:
        for name, value in saved.items():
            setattr(backend, name, value)
        _addresses.on_pointer = saved_hook
        reconsider()
