"""Chooses the tests of `make quick` among those of its files (Makefile): each operation's values, gradients and edges
by the definition and by the CPU backend's widest instruction set, one dtype of the calls that execute each GPU kernel's
PTX, layers, the contract of the package, examples. A test marked `slow` takes over a second and is left out.
"""

from __future__ import annotations

import pytest

from tests.helpers.targets import TARGETS
from tests.ptx import golden

WIDEST = [target.id for target in TARGETS if target.backend == "cpu"][-1]
NARROW = {target.id for target in TARGETS if target.backend == "cpu"} - {WIDEST}


def chosen(item: pytest.Item) -> bool:
    """Whether `make quick` runs this test."""
    if item.get_closest_marker("slow") is not None:
        return False
    parameters = getattr(item, "callspec", None)
    given = {} if parameters is None else parameters.params
    if "key" in given and item.nodeid.startswith("tests/machine"):
        operation, _, _, _, dtype = given["key"]
        return dtype == one_dtype()[operation]
    named = {str(getattr(each, "id", each)) for each in given.values()}
    return not named & (NARROW | {"triton", "cuda"})


def one_dtype() -> dict[str, str]:
    """For each operation of the counters the dtype whose kernels are executed: bf16 if there is one."""
    return {operation: dtypes[-1] for operation, _, _, dtypes in golden.CASES}
