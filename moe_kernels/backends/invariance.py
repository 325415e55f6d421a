"""The mode in which a token's bits do not depend on the other tokens of a call: batch_invariant.

A public function reads the mode and marks the backend that it passes to an operator: "cpu" becomes "cpu:invariant". So
the mode of a forward is that of its backward, in any thread, and a compiled or exported program keeps it. While a
marked operator runs, `is_fixed` is True for the code that would choose among orders of sums.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

VARIABLE = "MOE_KERNELS_BATCH_INVARIANT"
MARK = ":invariant"

_requested: ContextVar[bool | None] = ContextVar("moe_kernels_batch_invariant", default=None)
_fixed: ContextVar[bool] = ContextVar("moe_kernels_fixed_order", default=False)


class _Process:
    """What the blocks of all threads ask for; torch.compile guards `on` and `off`, but cannot trace a ContextVar."""

    def __init__(self) -> None:
        self.on = self.off = False  # whether any thread is in a block with enabled=True, or with enabled=False
        self.counts = {True: 0, False: 0}
        self.lock = threading.Lock()

    def add(self, enabled: bool | None, change: int) -> None:
        if enabled is not None:
            self.counts[enabled] += change
            self.on, self.off = self.counts[True] > 0, self.counts[False] > 0


_process = _Process()


@contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Inside the block a token's outputs and input gradients have the same bits whatever other tokens are in the call.

    This holds for every operation and layer, on one backend ("cpu", "triton" or "cuda"), machine and version of torch,
    for any number of tokens, and for one process as for several ranks of nn.parallel. docs/guide/batch_invariance.md
    says what it costs and what it cannot hold for, such as gradients of weights. The environment variable
    MOE_KERNELS_BATCH_INVARIANT=1 sets the mode outside of all blocks.

    Blocks may be nested, and a block applies only to its own thread; enabled=False leaves the mode. The mode of a
    forward is that of its backward. If torch.utils.checkpoint repeats the forward, call backward inside the block too.
    torch.compile compiles again where the mode changes; while any thread is in the mode, compiled functions are in it
    in all threads.

    Raises inside, by name: RuntimeError for gates and layers that draw random numbers, and for policies that compare
    tokens (a capacity that may drop requests, expert choice, priority routing); BackendError for an operation whose
    definition would run ("reference"), unless it only chooses or copies.

    Example:
        >>> gate, x = TopKGate(16, 4, 2), torch.randn(100, 16)
        >>> with mk.batch_invariant():
        ...     whole, one = gate(x).weights, gate(x[7:8]).weights
        >>> torch.equal(whole[7:8], one)
        True
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"batch_invariant: enabled must be a bool, got {type(enabled).__name__}")
    if is_compiling():
        before = _process.on, _process.off
        _process.on, _process.off = enabled, not enabled
        try:
            yield
        finally:
            _process.on, _process.off = before
        return
    outer = _requested.get()
    token = _requested.set(enabled)
    with _process.lock:
        _process.add(outer, -1)
        _process.add(enabled, 1)
    try:
        yield
    finally:
        _requested.reset(token)
        with _process.lock:
            _process.add(enabled, -1)
            _process.add(outer, 1)


def is_batch_invariant() -> bool:
    """Whether this code runs in the mode."""
    if is_compiling():
        return _process.on or (_from_environment() and not _process.off)
    requested = _requested.get()
    if requested is None and torch._C._current_graph_task_id() != -1:
        # A recomputation on one of autograd's threads, which do not inherit context variables.
        requested = _process.on or None
    return _from_environment() if requested is None else requested


def _from_environment() -> bool:
    return os.environ.get(VARIABLE, "0") not in ("", "0")


_from_environment._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as backends.constant


def mark(backend: str) -> str:
    """The backend argument of an operator: `backend`, marked in the mode."""
    return backend + MARK if is_batch_invariant() else backend


def plain(backend: str) -> str:
    return backend.removesuffix(MARK)


@contextmanager
def fixed_order() -> Iterator[None]:
    """While a marked operator runs. Entered by ops._define."""
    token = _fixed.set(True)
    try:
        yield
    finally:
        _fixed.reset(token)


def is_fixed() -> bool:
    """Whether the operator that runs must add in an order that does not depend on its other rows."""
    return _fixed.get()


def ordered_sum(x: Tensor, dim: int) -> Tensor:
    """x.sum(dim), by adding halves of the dimension: elementwise additions, which give the same bits everywhere.

    torch's reductions choose an order by the sizes of all dimensions and by the number of threads. 16-bit elements are
    added in float32.
    """
    narrow = x.dtype in (torch.bfloat16, torch.float16)
    sums = x.float() if narrow else x
    if sums.shape[dim] == 0:
        return x.sum(dim)
    while (size := sums.shape[dim]) > 1:
        half = size // 2
        added = sums.narrow(dim, 0, half) + sums.narrow(dim, half, half)
        sums = torch.cat([added, sums.narrow(dim, 2 * half, 1)], dim) if size % 2 else added
    return sums.squeeze(dim).to(x.dtype)


def sum_tiles(partial: Tensor, dim: int) -> Tensor:
    """partial.sum(dim), for the operator that runs: sums over the tiles of columns of a row."""
    return ordered_sum(partial, dim) if is_fixed() else partial.sum(dim)
