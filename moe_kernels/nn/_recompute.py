"""Layers under torch.utils.checkpoint, which runs a forward a second time in the backward pass."""

from __future__ import annotations

import inspect

import torch
from torch.compiler import is_compiling
from torch.utils.checkpoint import CheckpointFunction


def recomputed() -> bool:
    """True in a forward that the backward pass runs a second time."""
    return not is_compiling() and torch._C._current_graph_task_id() != -1


def refuse_reentrant(name: str) -> None:
    """Refuses a forward whose dataclass torch.utils.checkpoint(use_reentrant=True) would return without gradients.

    That checkpoint gives gradients to an output that is a tensor or a tuple of tensors and to no other. A layer inside
    a checkpointed block that returns a tensor is right, so only a direct call is refused.

    Raises:
        RuntimeError: the module is itself what the checkpoint calls.
    """
    if torch.is_grad_enabled() or is_compiling():
        return
    frame = inspect.currentframe()
    frame = frame and frame.f_back and frame.f_back.f_back  # the caller of the module's forward
    while frame and frame.f_globals.get("__name__") == "torch.nn.modules.module":
        frame = frame.f_back
    if frame and frame.f_code is CheckpointFunction.forward.__code__:
        raise RuntimeError(
            f"{name}: torch.utils.checkpoint(use_reentrant=True) gives gradients to tensors alone, and {name} returns "
            f"a dataclass; use use_reentrant=False, or a layer with output='tensor'"
        )


def own(generator: torch.Generator | None) -> torch.Generator | None:
    """The generator to draw noise from.

    Raises:
        RuntimeError: a forward that runs a second time would draw other noise, and make another choice.
    """
    if generator is not None and recomputed():
        raise RuntimeError(
            "gate: torch.utils.checkpoint restores torch's own random numbers; a generator of its own draws others; "
            "expected generator=None"
        )
    return generator
