"""Layers under torch.utils.checkpoint, which runs a forward a second time in the backward pass."""

from __future__ import annotations

import inspect

import torch
from torch.compiler import is_compiling
from torch.utils.checkpoint import CheckpointFunction


def is_recomputing() -> bool:
    """Whether this forward is one that the backward pass runs a second time."""
    return not is_compiling() and torch._C._current_graph_task_id() != -1


def refuse_reentrant(name: str) -> None:
    """Raises if torch.utils.checkpoint(use_reentrant=True) calls the forward of a module that returns a dataclass.

    That checkpoint gives gradients only to a tensor or a tuple of tensors; gradients of a dataclass would be lost. A
    layer inside a checkpointed block that returns a tensor works, so only a direct call raises.

    Raises:
        RuntimeError: the checkpoint calls the module directly.
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


def noise_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """Returns `generator`, which draws a gate's noise; None is torch's own generator.

    Raises:
        RuntimeError: under recomputation `generator` would draw other noise than before, and the choice would differ.
    """
    if generator is not None and is_recomputing():
        raise RuntimeError(
            "gate: torch.utils.checkpoint restores only the state of torch's own generator; another generator would "
            "draw other noise when the forward runs again; use generator=None"
        )
    return generator
