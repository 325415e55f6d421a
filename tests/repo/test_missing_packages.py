"""Without numpy Triton's kernels run; a package that is missing is named, and no other one."""

from __future__ import annotations

import pytest

from moe_kernels import backends
from tests.helpers import forked

PRINT = "from moe_kernels import backends; print(backends.missing('triton', 'kwta'))"


def reasons(missing: str, *interpret: str) -> list[str]:
    """Why Triton's kwta is not implemented in a Python that lacks the package `missing`, for each value of
    TRITON_INTERPRET; "None" if it is."""
    shared = f"import sys; sys.modules[{missing!r}] = None; import warnings; warnings.simplefilter('ignore')\n"
    programs = [f"import os; os.environ['TRITON_INTERPRET'] = {each!r}; {PRINT}" for each in interpret]
    return [each.strip() for each in forked.outputs(f"{shared}import torch", programs)]


@pytest.mark.skipif(backends.missing("triton", "kwta") is not None, reason="Triton is not installed")
def test_a_missing_package_is_named() -> None:
    needs = "Triton is installed, but needs the package numpy, which is not: install it"
    assert reasons("numpy", "0", "1") == ["None", needs]
    assert reasons("triton", "0") == ["Triton is not installed"]
