"""What is not to happen twice where torch.utils.checkpoint calls a forward again."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling


def recomputed() -> bool:
    """Whether this forward is a second one, for the backward pass that is under way."""
    return not is_compiling() and torch._C._current_graph_task_id() != -1


def own(generator: torch.Generator | None) -> torch.Generator | None:
    """The generator to draw noise from, in no forward that is a second one.

    Raises:
        RuntimeError: it would draw other noise there, and gradients of another choice.
    """
    if generator is not None and recomputed():
        raise RuntimeError(
            "gate: torch.utils.checkpoint restores torch's own random numbers; a generator of its own draws others; "
            "expected generator=None"
        )
    return generator
