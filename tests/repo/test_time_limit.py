"""A test that never returns fails, in Python and in C. Under pytest-xdist the tests after it still run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The endless loops sleep, which leaves the core to other tests. A call through PyDLL holds the lock all the while.
TESTS = """
import ctypes
import time

import pytest


def test_before():
    pass


def test_python_spins():
    while True:
        time.sleep(0.001)


def test_cpp_spins_and_holds_the_lock():
    ctypes.PyDLL("./spin.so").spin()


@pytest.mark.timeout(0.5)
def test_cpp_spins_under_its_own_limit():
    ctypes.CDLL("./spin.so").spin()


def test_after():
    pass
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_an_endless_loop_is_a_failure(tmp_path, workers):
    (tmp_path / "test_endless.py").write_text(TESTS)
    (tmp_path / "spin.c").write_text("#include <unistd.h>\nvoid spin(void) { for (;;) usleep(1000); }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "spin.so", "spin.c"], cwd=tmp_path, check=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.helpers.time_limit",
        "-c",
        ROOT / "pyproject.toml",
        "--rootdir=.",
    ]
    options = ["-n", str(workers), "--timeout=1", "-p", "no:cacheprovider", "test_endless.py"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    ran = subprocess.run([*command, *options], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "in test_cpp_spins_and_holds_the_lock" in ran.stderr  # the stack that the watchdog printed
    if workers:
        assert "Timeout (>1.0s) from pytest-timeout" in ran.stdout
        assert "3 failed, 2 passed" in ran.stdout
        for name in ("test_cpp_spins_and_holds_the_lock", "test_cpp_spins_under_its_own_limit"):
            assert f"crashed while running 'test_endless.py::{name}'" in ran.stdout
