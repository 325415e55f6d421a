"""Launches kernels in the executor. `session` holds this process's settings and the totals over its launches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from . import machine
from .decode import Kernel
from .machine import Extent, Result, Settings

Edit = Callable[[str], str]


@dataclass
class Ran:
    """A kernel (one specialisation), with its counters summed over its launches."""

    kernel: Kernel
    backend: str
    counters: np.ndarray
    launches: int = 0


@dataclass
class Session:
    settings: Settings = field(default_factory=Settings)
    edit: Edit | None = None
    listeners: list[Callable[[Result], None]] = field(default_factory=list)
    ran: dict[int, Ran] = field(default_factory=dict)  # by id(kernel); the entry keeps the kernel alive
    launches: int = 0
    steps: int = 0
    seconds: float = 0.0


session = Session()


def launch(
    backend: str,
    kernel: Kernel,
    grid: Sequence[int],
    block: Sequence[int],
    shared: int,
    parameters: bytes,
    memory: list[Extent],
) -> Result:
    """Executes a launch and adds it to the session. Raises a PtxError if the executor found errors."""
    result = machine.run(kernel, grid, block, shared, parameters, memory, session.settings)
    session.launches += 1
    session.steps += result.steps
    session.seconds += result.seconds
    if session.edit is None:  # launches with a defect do not count as coverage
        ran = session.ran.get(id(kernel))
        if ran is None:
            ran = session.ran[id(kernel)] = Ran(kernel, backend, np.zeros_like(result.counters))
        ran.launches += 1
        for name in result.counters.dtype.names or ():
            ran.counters[name] += result.counters[name]
    for listener in session.listeners:
        listener(result)
    machine.check(result)
    return result


@contextlib.contextmanager
def seed(value: int, errors: int | None = None) -> Iterator[None]:
    """Inside the block, `value` (below 2^16) seeds the order of blocks, of warps and of the lanes in a store or atomic.
    `errors` (default: `value`) seeds the errors of .approx and div.full instructions (0: no errors) and, with `value`,
    the order."""
    before = session.settings
    session.settings = replace(before, seed=value | (value if errors is None else errors) << 16)
    try:
        yield
    finally:
        session.settings = before


@contextlib.contextmanager
def recorded() -> Iterator[list[Result]]:
    """Yields a list to which every launch inside the block appends its result."""
    found: list[Result] = []
    session.listeners.append(found.append)
    try:
        yield found
    finally:
        session.listeners.remove(found.append)


@contextlib.contextmanager
def planted(edit: Edit) -> Iterator[None]:
    """Inside the block, launches execute edit(text), where text is the PTX of their module."""
    before, session.edit = session.edit, edit
    try:
        yield
    finally:
        session.edit = before
