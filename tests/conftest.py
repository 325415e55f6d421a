"""Fixture `target`: runs a kernel's test on every backend of this machine.

A test that takes `target` runs once for every instruction set of the CPU, once for Triton and once for CUDA. Without a
GPU, the PTX that Triton and nvcc compile for sm_80 is executed on CPU tensors (tests/ptx). With TRITON_INTERPRET=1
Triton's kernels run in its interpreter and CUDA's sources on the host executor (tests/simt).
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Waiting OpenMP threads sleep, so that other pytest workers use the core: a training test then takes a third of the
# processor time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

HAS_GPU = torch.cuda.is_available()
INTERPRET = not HAS_GPU and os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it too, at each @triton.jit

import pytest

from moe_kernels import backends
from moe_kernels.backends import cpu

sys.path.insert(0, str(Path(__file__).parent))
import simt
from ptx import build as ptx
from ptx import cuda_launch, triton_launch
from ptx.summary import pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown  # noqa: F401
from time_limit import pytest_configure, pytest_enter_pdb, pytest_runtest_protocol, pytest_unconfigure  # noqa: F401

if not HAS_GPU and not INTERPRET:
    triton_launch.install()

# Compilers make many long-lived objects: with the default thresholds garbage collection takes a seventh of the time of
# test_compile.py.
gc.set_threshold(100_000, 20, 20)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Excludes all objects made so far from garbage collection, as they live until the end."""
    gc.collect()
    gc.freeze()
    session.config.add_cleanup(gc.unfreeze)


# Makes torch.empty fill its tensors with NaN, or with the largest integer.
torch.use_deterministic_algorithms(True, warn_only=True)


@dataclass(frozen=True)
class Target:
    """A backend, and the device of its tensors."""

    id: str
    backend: str
    device: str

    @property
    def executed(self) -> bool:
        """Whether GPU kernels run on CPU tensors."""
        return self.device == "cpu" and self.backend != "cpu"

    @property
    def compiles(self) -> bool:
        """Whether Triton runs on CPU tensors. Without its interpreter, a new size class, dtype or option of a kernel
        costs a compilation of 0.3 to 2 s."""
        return self.executed and self.backend == "triton"

    @property
    def interpreted(self) -> bool:
        """Whether sources run in place of PTX (Triton's interpreter, tests/simt): slowly, so shapes are small."""
        return self.executed and INTERPRET


TARGETS = [Target(f"cpu-{isa}", "cpu", "cpu") for isa in cpu.module.isas] + [
    Target(name, name, "cuda" if HAS_GPU else "cpu") for name in ("triton", "cuda")
]


def reason_to_skip(target: Target, op: str = "kwta") -> str | None:
    unavailable = None
    if target.executed:
        if target.interpreted:
            unavailable = simt.unavailable() if target.backend == "cuda" else None
        else:
            unavailable = ptx.unavailable() or (cuda_launch.unavailable() if target.backend == "cuda" else None)
    return unavailable or backends.missing(target.backend, op)


@contextlib.contextmanager
def running(target: Target) -> Iterator[Target]:
    """Inside the block, the target's backend takes tensors of its device."""
    with contextlib.ExitStack() as stack:
        if target.backend == "cuda" and target.executed:
            stack.enter_context(simt.use() if target.interpreted else cuda_launch.use())
        if target.backend == "cpu":
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(cpu, "isa", cpu.module.isas.index(target.id.removeprefix("cpu-")))
        yield target


@pytest.fixture(params=TARGETS, ids=lambda target: target.id)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    reason = reason_to_skip(request.param, getattr(request.module, "OP", "kwta"))  # OP: operation that the file tests
    if reason is not None:
        pytest.skip(f"{request.param.id}: {reason}")
    with running(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def nvcc_or_skip() -> str:
    found = shutil.which("nvcc")
    if found is None:
        pytest.skip("no nvcc on this machine")
    return found
