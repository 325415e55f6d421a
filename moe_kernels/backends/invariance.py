"""The mode in which a token's bits do not depend on the other tokens of a call: batch_invariant.

A public function reads the mode and marks the backend that it passes to an operator: "cpu" becomes "cpu:invariant". So
the mode of a forward is that of its backward, in any thread, and a compiled or exported program keeps it. While a
marked operator runs, `is_fixed` is True for the code that would choose among orders of sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.compiler import is_compiling

from moe_kernels.backends import fixed_bits, process


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
        before = process.on, process.off
        process.on, process.off = enabled, not enabled
        try:
            yield
        finally:
            process.on, process.off = before
        return
    outer = fixed_bits.get()
    token = fixed_bits.set(enabled)
    with process.lock:
        process.add(outer, -1)
        process.add(enabled, 1)
    try:
        yield
    finally:
        fixed_bits.reset(token)
        with process.lock:
            process.add(enabled, -1)
            process.add(outer, 1)
