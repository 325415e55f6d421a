"""Without numpy Triton's kernels run; a package that is missing is named, and no other one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from moe_kernels import backends


def reason(missing: str, interpret: str) -> str:
    """Why Triton's kwta is not implemented in a Python that lacks the package `missing`; "None" if it is."""
    code = f"import sys; sys.modules[{missing!r}] = None; import warnings; warnings.simplefilter('ignore'); "
    code += "from moe_kernels import backends; print(backends.missing('triton', 'kwta'))"
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(backends.missing("triton", "kwta") is not None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("missing", "interpret", "expected"),
    [
        ("numpy", "0", "None"),
        ("numpy", "1", "Triton is installed, but needs the package numpy, which is not: install it"),
        ("triton", "0", "Triton is not installed"),
    ],
)
def test_a_missing_package_is_named(missing: str, interpret: str, expected: str) -> None:
    assert reason(missing, interpret) == expected
