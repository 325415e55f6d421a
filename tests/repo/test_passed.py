"""How many files of the package a call passes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("interpret", "most"), [("0", {"kwta": 8, "nn.MoE": 22}), ("1", {"nn.MoE": 24})], ids=["cpu", "interpreter"]
)
def test_a_call_passes_few_files(interpret: str, most: dict[str, int]) -> None:
    if interpret == "1":
        pytest.importorskip("triton", reason="Triton is not installed")
    command = [sys.executable, "-m", "tests.helpers.passed"]
    environment = os.environ | {"TRITON_INTERPRET": interpret}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    counts = {name: int(count) for name, count in re.findall(r"^([\w.]+) .*: (\d+) files$", done.stdout, re.MULTILINE)}
    assert counts.keys() == most.keys()
    assert all(count <= most[name] for name, count in counts.items()), done.stdout
