"""Counters of one call of each operation exceed those in ptx_counters.json by at most 1 %: instructions, sectors, bank
passes, barriers.

After an intended increase:  PYTHONPATH=tests python -m ptx --update
"""

from __future__ import annotations

import pytest
from conftest import INTERPRET
from ptx import build, cuda_launch, golden

pytest.importorskip("triton", reason="Triton is not installed")
TABLE = golden.load()
SLACK = 1.01  # one percent; small counts have a little more
UPDATE = "if that is meant: PYTHONPATH=tests python -m ptx --update"

pytestmark = pytest.mark.skipif(
    bool(build.unavailable()) or INTERPRET, reason=build.unavailable() or "Triton interprets in this process"
)


@pytest.mark.parametrize("key", golden.keys(), ids=golden.name)
def test_counters(key):
    backend = key[3]
    if backend == "cuda" and cuda_launch.unavailable():
        pytest.skip(str(cuda_launch.unavailable()))
    here, then = golden.compilers()[backend], TABLE["compilers"][backend]
    if here != then:
        pytest.skip(f"the table was made with {backend} {then}, this is {here}")
    measured, allowed = golden.measure(key) or {}, TABLE.get(golden.name(key), {})
    assert sorted(measured) == sorted(allowed), f"other kernels: {UPDATE}"
    over = {
        f"{kernel}: {column}": f"{got}, allowed {most}"
        for kernel, row in measured.items()
        for column, got, most in zip(golden.COLUMNS, row, allowed[kernel], strict=True)
        if got > SLACK * most + 4
    }
    assert not over, f"{over}; {UPDATE}"
