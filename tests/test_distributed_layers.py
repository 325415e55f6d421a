"""Layers inside torch's DistributedDataParallel and fully_shard: the gradients of one process, or what is promised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")

CASES = ["permuted", "tasks", "stable", "staged", "competition"]
CASES = [f"ddp {name}" for name in CASES] + ["root", "experts and root", "tasks", "competition"]
CASES += ["narrowed", "made on meta"]


@pytest.fixture(scope="module")
def found():
    """Case -> the traceback, empty for a case that passed."""
    pytest.importorskip("scipy", reason="hardening needs scipy")
    program = Path(__file__).with_name("distributed_layers.py")
    environment = os.environ | {"PYTHONPATH": str(program.parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_layers_train_as_in_one_process(found, case):
    assert not found[case], found[case]


def test_every_case_is_looked_at(found):
    assert sorted(found) == sorted(CASES)
