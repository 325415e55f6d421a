"""Functions for layers under torch.utils.checkpoint, which repeats a forward in the backward pass."""

from __future__ import annotations

import inspect

import torch
from torch.compiler import is_compiling
from torch.utils.checkpoint import CheckpointFunction

from moe_kernels.nn._compile import on_the_host


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward pass, where checkpoints repeat it; False under torch.compile."""
    return not is_compiling() and torch._C._current_graph_task_id() != -1


def refuse_reentrant(name: str) -> None:
    """Raises RuntimeError if the calling module is the function that checkpoint(use_reentrant=True) runs.

    The module returns a dataclass. Such a checkpoint passes gradients only to a tensor or a tuple of tensors, so that
    the dataclass would get none. A checkpointed function that calls the module and returns a tensor is allowed.
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
            f"a dataclass; use use_reentrant=False, or an MoE with output='tensor'"
        )


def noise_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """`generator`; RuntimeError if it is not None and a checkpoint repeats the forward.

    The repeated forward would draw other numbers than the first one and could choose other experts.
    """
    if generator is not None:
        _refuse_recomputing()
    return generator


@on_the_host("gate: torch.compile cannot trace a generator, nor whether a checkpoint repeats the forward")
def _refuse_recomputing() -> None:
    if is_recomputing():
        raise RuntimeError(
            "gate: torch.utils.checkpoint restores only the state of torch's own generator; the gate's generator would "
            "draw other numbers when the forward runs again; use generator=None"
        )
