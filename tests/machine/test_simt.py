"""tests/simt, which runs CUDA sources under sanitizers on the CPU, finds planted bugs and accepts a correct kernel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests import simt

pytestmark = pytest.mark.skipif(simt.unavailable() is not None, reason=f"simt: {simt.unavailable()}")

ROOT = Path(__file__).resolve().parents[2]


def rotated(bug: int, n: int) -> bool:
    """Whether the kernel of simt/planted with this bug computes correct values."""
    module = simt.Module(simt.PLANTED)
    x = torch.arange(2 * n, dtype=torch.float32).view(2, n)
    y = torch.full_like(x, -1)
    module.announce(x, y)
    module.rotate(bug, x.data_ptr(), y.data_ptr(), 2, n, 0)
    return torch.equal(y, x.roll(-1, 1))


# Bugs of simt/planted/ops.h: number, a row length at which the bug shows, part of the error.
BUGS = {
    "shared overrun": (1, 24, r"heap-buffer-overflow.*rotate.cu:"),
    "global overrun": (2, 24, r"heap-buffer-overflow.*rotate.cu:"),
    "copy past the end": (3, 22, r"heap-buffer-overflow.*rotate.cu:"),
    "overflow": (4, 24, r"rotate.cu:\d+:\d+: runtime error: signed integer overflow"),
    "skipped barrier": (5, 24, r"not all threads reach the same rendezvous, thread \(31, 0, 0\) of block \(0, 0, 0\)"),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str) -> None:
    bug, n, report = BUGS[name]
    with pytest.raises(RuntimeError, match=f"(?s)rotate: .*{report}"):
        rotated(bug, n)
    assert rotated(0, n)


def test_a_call_sees_announced_buffers_only() -> None:
    x, y = torch.ones(1, 32), torch.zeros(1, 32)
    module = simt.Module(simt.PLANTED)
    module.announce(x)
    with pytest.raises(RuntimeError, match="none of the announced buffers"):
        module.rotate(0, x.data_ptr(), y.data_ptr(), 1, 32, 0)
    wide = torch.ones(2, 200)[:, :32]  # a strided view: its last row ends before element 232
    module.announce(wide, y)
    with pytest.raises(RuntimeError, match="heap-buffer-overflow"):
        module.rotate(0, wide.data_ptr() + 4 * 204, y.data_ptr(), 1, 32, 0)
    with pytest.raises(RuntimeError, match="5 arguments, 6 expected"):
        module.rotate(0, 0, 0, 1, 32)


def test_only_headers_have_ptx_and_shared_memory() -> None:
    sources = [*(ROOT / "csrc").rglob("*.cu"), *(ROOT / "tests").rglob("*.cu")]
    assert sources
    for file in sources:
        text = re.sub(r"//.*", "", file.read_text())
        assert not re.search(r"\basm\b", text), f"{file}: only headers may have inline PTX"
        assert "__shared__" not in text, f"{file}: use SHARED or DYNAMIC_SHARED of moe/cuda/shared.cuh instead"
