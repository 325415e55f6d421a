"""Fixture `target`: runs a test once for each CPU instruction set of this machine, once for Triton, once for CUDA."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

# Waiting OpenMP threads then sleep instead of spinning, which leaves the core to other pytest workers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Otherwise g++ tries each vector instruction set before torch's inductor compiles: 5 s.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest
import torch

from tests.helpers import quick
from tests.helpers.stored import pictures, stored  # noqa: F401
from tests.helpers.targets import HAS_GPU, INTERPRET, TARGETS, Target, reason_to_skip, running
from tests.helpers.time_limit import (  # noqa: F401
    pytest_configure,
    pytest_enter_pdb,
    pytest_runtest_protocol,
    pytest_unconfigure,
)
from tests.ptx import triton_launch
from tests.ptx.summary import pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown  # noqa: F401

if not HAS_GPU and not INTERPRET:
    triton_launch.install()

# With the default thresholds garbage collection slows tests down.
gc.set_threshold(100_000, 20, 20)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="few of the tests, as tests/helpers/quick.py chooses")
    parser.addoption("--store", action="store_true", help="write what tests compare with the files of tests/stored")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        items[:] = [item for item in items if quick.chosen(item)]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Excludes the objects made so far from garbage collection: most of them live until the end."""
    gc.collect()
    gc.freeze()
    session.config.add_cleanup(gc.unfreeze)


# Makes torch.empty fill floating-point tensors with NaN and integer tensors with their largest value. The public
# function, use_deterministic_algorithms, also imports torch._inductor, for which each worker takes a second.
torch._C._set_deterministic_algorithms(True, warn_only=True)


@pytest.fixture(params=TARGETS, ids=lambda target: target.id)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    reason = reason_to_skip(request.param, getattr(request.module, "OP", "kwta"))  # OP: the operation a file tests
    if reason is not None:
        pytest.skip(f"{request.param.id}: {reason}")
    with running(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _seeded() -> None:
    if HAS_GPU:
        torch.manual_seed(0)
    else:  # torch.manual_seed would store a stack trace for each kind of accelerator that is not there: .8 ms a test
        torch.default_generator.manual_seed(0)


@pytest.fixture
def tf32() -> Iterator[None]:
    """torch allows products of TF32."""
    matmul = torch.backends.cuda.matmul
    name, value = ("fp32_precision", "tf32") if hasattr(matmul, "fp32_precision") else ("allow_tf32", True)
    before = getattr(matmul, name)
    setattr(matmul, name, value)
    yield
    setattr(matmul, name, before)
