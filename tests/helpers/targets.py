"""The targets of fixture `target`: each instruction set of the CPU backend, Triton and CUDA.

Without a GPU, tensors are on the CPU, and tests/ptx executes the PTX that Triton and nvcc compile for sm_80. If
TRITON_INTERPRET=1 is also set, Triton's interpreter runs Triton's kernels, and CUDA's do not run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from moe_kernels import backends
from moe_kernels.backends import cpu
from tests.ptx import build as ptx
from tests.ptx import cuda_launch

HAS_GPU = torch.cuda.is_available()
INTERPRET = not HAS_GPU and os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads the variable at each @triton.jit


@dataclass(frozen=True)
class Target:
    """A backend and the device of its tensors; for backend "cpu", `id` also names an instruction set."""

    id: str
    backend: str
    device: str

    @property
    def executed(self) -> bool:
        """Whether GPU kernels run on CPU tensors."""
        return self.device == "cpu" and self.backend != "cpu"

    @property
    def compiles(self) -> bool:
        """Whether Triton runs on CPU tensors."""
        return self.executed and self.backend == "triton"

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernels: slowly, so tests use small shapes. CUDA's are skipped then."""
        return self.executed and INTERPRET


TARGETS = [Target(f"cpu-{isa}", "cpu", "cpu") for isa in cpu.module.isas] + [
    Target(name, name, "cuda" if HAS_GPU else "cpu") for name in ("triton", "cuda")
]


def reason_to_skip(target: Target, op: str = "kwta") -> str | None:
    unavailable = None
    if target.interpreted:
        unavailable = "TRITON_INTERPRET=1 interprets Triton's kernels only" if target.backend == "cuda" else None
    elif target.executed:
        unavailable = ptx.unavailable() or (cuda_launch.unavailable() if target.backend == "cuda" else None)
    return unavailable or backends.missing(target.backend, op)


@contextlib.contextmanager
def running(target: Target) -> Iterator[Target]:
    """Inside the block, the target's kernels take tensors on its device; a CPU target uses its instruction set."""
    with contextlib.ExitStack() as stack:
        if target.backend == "cuda" and target.executed:
            stack.enter_context(cuda_launch.use())
        if target.backend == "cpu":
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(cpu, "isa", cpu.module.isas.index(target.id.removeprefix("cpu-")))
        yield target


REFERENCE = Target("reference", "reference", "cpu")


def on_every_target(op: str):
    @pytest.fixture(params=[REFERENCE, *TARGETS], ids=lambda target: target.id)
    def target(request):
        reason = backends.missing(request.param.backend, op)
        if reason is None and request.param is not REFERENCE:
            reason = reason_to_skip(request.param, op)
        if reason is not None:
            pytest.skip(f"{request.param.id}: {reason}")
        with running(request.param):
            yield request.param

    return target


def nvcc_or_skip() -> str:
    found = shutil.which("nvcc")
    if found is None:
        pytest.skip("no nvcc on this machine")
    return found
