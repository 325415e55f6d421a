"""The bench reduced to one operation with tiny shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import console, registry, runs, timing
from moe_kernels.verify import verify
from tests.helpers.bench import ENTRY
from tests.helpers.measured import tree  # noqa: F401


@pytest.fixture(autouse=True)
def _silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine, too, commands print no lines of the kind "5 s so far"."""
    monkeypatch.setattr(console, "SILENT_SECONDS", 3600.0)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduces the bench to kWTA with one shape in "quick" and two in "scaling", all with 4 rows, and to small cases of
    verify. The ceilings are constants instead of measured ones."""
    shapes = {"quick": [{"N": 100, "p": 0.5}], "scaling": [{"R": 4, "N": n, "p": 0.5} for n in (10, 1000)]}
    entry = replace(ENTRY, shapes=shapes, complete=lambda shape, device: {"R": 4, **shape})
    monkeypatch.setitem(registry.ENTRIES, "kwta", entry)
    operations = verify.__globals__["OPERATIONS"]
    monkeypatch.setitem(verify.__globals__, "OPERATIONS", {"kwta": operations["kwta"]})
    monkeypatch.setattr(runs, "verify", lambda ops, names, small: verify(ops, names, small=True))
    monkeypatch.setattr(runs, "OPERATIONS", verify.__globals__["OPERATIONS"])
    monkeypatch.setattr(timing, "ceilings", lambda *args: {"copy": 10.0, "float32": 100.0})
