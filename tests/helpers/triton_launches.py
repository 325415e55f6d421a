"""Records launches of Triton kernels: Triton binds their arguments, but nothing is compiled or run."""

from __future__ import annotations

from contextlib import AbstractContextManager

from moe_kernels.precompile import Launch, record_launches


def recorded(capability: int = 80) -> AbstractContextManager[list[Launch]]:
    return record_launches(capability)
