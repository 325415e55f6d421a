"""Fixture `target`: runs a test once for each CPU instruction set of this machine, once for Triton, once for CUDA.

Without a GPU, tensors are on the CPU, and tests/ptx executes the PTX that Triton and nvcc compile for sm_80. If
TRITON_INTERPRET=1 is also set, Triton's interpreter runs Triton's kernels, and CUDA's do not run.
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

# Waiting OpenMP threads then sleep instead of spinning, which leaves the core to other pytest workers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

HAS_GPU = torch.cuda.is_available()
INTERPRET = not HAS_GPU and os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads the variable at each @triton.jit

import pytest

from moe_kernels import backends
from moe_kernels.backends import cpu

sys.path.insert(0, str(Path(__file__).parent))
from ptx import build as ptx
from ptx import cuda_launch, triton_launch
from ptx.summary import pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown  # noqa: F401
from time_limit import pytest_configure, pytest_enter_pdb, pytest_runtest_protocol, pytest_unconfigure  # noqa: F401

if not HAS_GPU and not INTERPRET:
    triton_launch.install()

# With the default thresholds garbage collection slows tests down.
gc.set_threshold(100_000, 20, 20)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Excludes the objects made so far from garbage collection: most of them live until the end."""
    gc.collect()
    gc.freeze()
    session.config.add_cleanup(gc.unfreeze)


# Makes torch.empty fill floating-point tensors with NaN and integer tensors with their largest value.
torch.use_deterministic_algorithms(True, warn_only=True)


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


@pytest.fixture(params=TARGETS, ids=lambda target: target.id)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    reason = reason_to_skip(request.param, getattr(request.module, "OP", "kwta"))  # OP: the operation a file tests
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
