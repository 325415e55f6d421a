"""What nn.record_routing and nn.replay_routing give to a gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from moe_kernels.nn._recompute import Remembered, is_recomputing

Routes = dict[str, Any]
INT16_MAX = 2**15 - 1


class Recording:
    """Puts the choices of one gate into the routes, in the order of its calls."""

    def __init__(self, routes: Routes, name: str, num_experts: int) -> None:
        self.routes, self.name = routes, name
        self.dtype = torch.int16 if num_experts - 1 <= INT16_MAX else torch.int32

    def add(self, experts: Tensor) -> None:
        if is_recomputing():
            return
        choices, before = experts.to(self.dtype), self.routes.get(self.name)
        if before is None:
            self.routes[self.name] = choices
        elif isinstance(before, list):
            before.append(choices)
        else:
            self.routes[self.name] = [before, choices]


class Replay:
    """The recorded choices of one gate, handed out in the order of its calls; a forward that a checkpoint repeats gets
    those that it got before."""

    def __init__(self, name: str, entries: Sequence[Tensor]) -> None:
        self.name, self.entries, self.calls, self.ended = name, entries, 0, False
        self.remembered = Remembered()

    def take(self, logits: Tensor, k: int) -> Tensor | None:
        """(T, K), to be used as topk_gate's `forced`; None after the context has ended."""
        entry: Tensor | None
        if not is_compiling():
            entry = self.remembered.take("replay_routing", self._next)
        elif len(self.entries) == 1:  # torch.compile refuses to count calls inside a checkpoint
            entry = self.entries[0]
        else:
            entry = self._next()
        if entry is None:
            return None
        if self.ended:
            raise RuntimeError(
                f"replay_routing: a checkpoint repeats a forward of {self.name!r} after the context has ended, where "
                "it would choose other experts; call backward inside the context"
            )
        if entry.shape != (logits.shape[0], k):
            raise ValueError(
                f"replay_routing: the record of {self.name!r} must be (T, K) = {(logits.shape[0], k)} for this call; "
                f"got {tuple(entry.shape)}"
            )
        return entry if entry.device == logits.device else entry.to(logits.device)

    def end(self) -> None:
        self.ended, self.entries = True, ()

    def _next(self) -> Tensor | None:
        if self.ended:
            return None
        if self.calls == len(self.entries):
            raise ValueError(
                f"replay_routing: {self.name!r} runs more often than it was recorded, {len(self.entries)} times"
            )
        self.calls += 1
        return self.entries[self.calls - 1]
