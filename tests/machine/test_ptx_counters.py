"""Counters of the kernels in the calls that ptx/golden.py lists, executed from PTX on the CPU.

No counter may exceed 1.01 times its number in ptx_counters.json, plus 4.
"""

from __future__ import annotations

import pytest

from tests.helpers.targets import INTERPRET
from tests.ptx import build, cuda_launch, golden

pytest.importorskip("triton", reason="Triton is not installed")
TABLE = golden.load()
UPDATE = "if the change is intended, run python -m tests.ptx --update"

pytestmark = pytest.mark.skipif(
    bool(build.unavailable()) or INTERPRET, reason=build.unavailable() or "TRITON_INTERPRET=1: no PTX is compiled"
)


@pytest.mark.parametrize("key", golden.keys(), ids=golden.name)
def test_counters(key):
    backend = key[3]
    if backend == "cuda" and cuda_launch.unavailable():
        pytest.skip(str(cuda_launch.unavailable()))
    here, then = golden.compilers()[backend], TABLE["compilers"][backend]
    if here != then:
        pytest.skip(f"ptx_counters.json holds counters of {backend} {then}, installed is {here}")
    measured, allowed = golden.measure(key) or {}, TABLE.get(golden.name(key), {})
    assert sorted(measured) == sorted(allowed), (
        f"the call launches other kernels than ptx_counters.json lists; {UPDATE}"
    )
    over = {
        f"{kernel}: {column}": f"{got}, in ptx_counters.json {most}"
        for kernel, row in measured.items()
        for column, got, most in zip(golden.COLUMNS, row, allowed[kernel], strict=True)
        if got > 1.01 * most + 4
    }
    assert not over, f"counters above their limits: {over}; {UPDATE}"
