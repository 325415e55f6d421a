"""A few tests with Triton's interpreter. They run in another process, since Triton reads TRITON_INTERPRET when it
decorates a kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.targets import HAS_GPU, INTERPRET

ROOT = Path(__file__).resolve().parents[2]

TESTS = [
    "tests/ops/test_grouped_gemm_tiles.py::test_tensor_descriptors",
    "tests/ops/test_kwta.py::test_long_rows[triton-1000]",
    "tests/ops/test_combine.py::test_float32_gates_weigh_bfloat16_rows",
    "tests/ops/test_dispatch.py::test_views_are_read_in_place",
    "tests/ops/test_plan.py::test_the_docstring_example",
    "tests/ops/test_tree_route.py::test_route_by_hand",
    "tests/ops/test_expert_mlp.py::test_float32_gates_weigh_bfloat16_experts",
]


@pytest.mark.skipif(HAS_GPU or INTERPRET, reason="the kernels run on a GPU, or are interpreted already")
def test_sources():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "triton or descriptors", *TESTS],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "no tests ran" not in done.stdout
