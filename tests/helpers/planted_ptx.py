"""Calls of kernels whose PTX tests/ptx executes, for tests that plant defects in it or count it."""

from __future__ import annotations

import contextlib

import pytest
import torch

import moe_kernels as mk
from tests.helpers.targets import TARGETS, reason_to_skip, running

# The targets whose PTX tests/ptx executes, by backend; none with a GPU or with TRITON_INTERPRET=1.
GPU = {target.backend: target for target in TARGETS if target.executed and not target.interpreted}
pytestmark = pytest.mark.skipif(not GPU, reason="the kernels run on a GPU or are interpreted")


def kwta(backend):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(2001, generator=generator) for _ in range(4)]
    rows[1] = rows[1].mul(2).round()
    rows[2] = rows[2].masked_fill(rows[2] < 1.5, float("-inf"))
    rows[3][::7] = float("nan")
    return mk.kwta(torch.stack(rows), 300, backend=backend)


def gemm(backend):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, 160, generator=generator).bfloat16()
    weight = torch.randn(2, 160, 136, generator=generator).bfloat16()
    offsets = torch.tensor([0, 77, 150], dtype=torch.int32)
    return mk.grouped_gemm(x, weight, offsets, backend=backend)


@contextlib.contextmanager
def on(backend):
    reason = reason_to_skip(GPU[backend])
    if reason:
        pytest.skip(reason)
    with running(GPU[backend]):
        yield
