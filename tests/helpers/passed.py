"""Counts the files of the package that a call passes: python -m tests.helpers.passed

A file counts if a function of it runs in a second call, when modules are imported and caches are filled.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import moe_kernels as mk
from moe_kernels import nn

ROOTS = tuple(str(Path(mk.__file__).parents[1] / name) for name in ("moe_kernels", "python_ref"))


def files(call: Callable[[], object]) -> list[str]:
    """Files of moe_kernels and python_ref whose functions run in `call`, in the order of their first function."""
    found: dict[str, None] = {}

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_filename.startswith(ROOTS):
            found[os.path.relpath(frame.f_code.co_filename, Path(ROOTS[0]).parent)] = None

    call()
    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


def kwta_with_gradients() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    mk.kwta(x, 8).sum().backward()


def layer(backend: str | None) -> Callable[[], None]:
    """nn.MoE with a top-k gate and 4 experts, forward and backward."""
    moe = nn.MoE(nn.TopKGate(16, 4, 2), nn.ExpertMLP(4, 16, 8))

    def call() -> None:
        with mk.use_backend(backend) if backend else contextlib.nullcontext():
            moe(torch.randn(6, 16, requires_grad=True)).y.sum().backward()

    return call


def main() -> None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    calls = {"kwta with gradients": kwta_with_gradients, "nn.MoE forward and backward": layer(None)}
    if interpreted:
        calls = {"nn.MoE forward and backward on Triton's interpreter": layer("triton")}
    for name, call in calls.items():
        passed = files(call)
        print(f"{name}: {len(passed)} files", *passed, sep="\n    ")


if __name__ == "__main__":
    main()
