"""Functions for layers under torch.utils.checkpoint, which repeats a forward in the backward pass."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.compiler import is_compiling
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

from moe_kernels.nn._compile import on_the_host

Value = TypeVar("Value")
_MARK = "_moe_kernels_values"


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward pass, where checkpoints repeat it; False under torch.compile."""
    return not is_compiling() and torch._C._current_graph_task_id() != -1


class Remembered:
    """What each forward of a module took, such as the number of its step, so that a forward that a checkpoint repeats
    takes the same again, also if other forwards ran in between.

    A value is kept with the checkpoint's own object for the forward, and goes with it. Where that object is not found,
    as in checkpoints of other packages and in nested ones, the last value is the only candidate, and is refused if
    several forwards ran since one was repeated. A second backward through such a graph (retain_graph) takes the newest
    forward's value.
    """

    def __init__(self) -> None:
        self.last: Any = None
        self.open = 0  # forwards since the last one that was repeated

    def __deepcopy__(self, memo: dict[int, Any]) -> Remembered:
        return Remembered()  # the copy has run no forward

    def __getstate__(self) -> dict[str, Any]:
        return {"last": None, "open": 0}

    def take(self, name: str, fresh: Callable[[], Value]) -> Value:
        """fresh() in a forward; in a repeated forward, what the forward that it repeats got from it.

        Raises RuntimeError, with `name`, if a forward is repeated and it is not known which one.
        """
        call, repeats = _checkpointed_call()
        if not is_recomputing():
            self.last = fresh()
            self.open += 1
            if call is not None:
                _values(call).setdefault(self, []).append(self.last)
            return self.last
        if call is not None and repeats and (values := _values(call).get(self)):
            return values[self._place(call, len(values))]
        if self.open > 1:
            raise RuntimeError(
                f"{name}: a checkpoint repeats a forward in backward, {self.open} forwards ran before, and it is not "
                "known which of them it repeats; use torch.utils.checkpoint.checkpoint, not nested in another, or run "
                "each backward before the next forward"
            )
        self.open = 0
        if call is not None:  # a checkpoint inside one that is repeated
            _values(call).setdefault(self, []).append(self.last)
        return self.last

    def _place(self, call: Any, count: int) -> int:
        """How many values this module already took in this repetition of `call`."""
        task = torch._C._current_graph_task_id()
        places = vars(call).setdefault(_MARK + "_places", weakref.WeakKeyDictionary())
        seen, place = places.get(self, (None, 0))
        place = 0 if seen != task or place >= count else place
        places[self] = task, place + 1
        return place


def _values(call: Any) -> Any:
    return vars(call).setdefault(_MARK, weakref.WeakKeyDictionary())


def _checkpointed_call() -> tuple[Any, bool]:
    """The object that torch.utils.checkpoint has for the innermost checkpointed call that runs, and whether the call is
    repeated; (None, False) if there is none, or if torch keeps it elsewhere."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack = hooks[0] if hooks else None
    pack = getattr(pack, "_torchdynamo_orig_callable", pack)  # of a repeated forward, torch disables compilation
    for cell in getattr(pack, "__closure__", None) or ():
        held = cell.cell_contents
        found = held() if isinstance(held, weakref.ref) else held
        if isinstance(found, _CheckpointFrame):
            return found, held is not found
    # use_reentrant=True: `ctx` of CheckpointFunction, in forward and in backward.
    codes = {CheckpointFunction.forward.__code__: False, CheckpointFunction.backward.__code__: True}
    frame = inspect.currentframe()
    while frame and frame.f_code not in codes:
        frame = frame.f_back
    return (None, False) if frame is None else (frame.f_locals["ctx"], codes[frame.f_code])


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
