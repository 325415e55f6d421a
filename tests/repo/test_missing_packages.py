"""The package needs torch alone. Without numpy Triton's kernels run; a missing package is named, and no other one."""

from __future__ import annotations

import functools

import pytest

from moe_kernels import backends
from tests.helpers import forked

OTHERS = ("triton", "sklearn", "rich", "typer", "matplotlib", "numpy.testing", "scipy", "pybind11")
REASON = "from moe_kernels import backends; print(backends.missing('triton', 'kwta'))"
INTERPRET = "import os; os.environ['TRITON_INTERPRET'] = '{}'; " + REASON
KWTA = "import moe_kernels as mk, torch; print(mk.kwta(torch.tensor([1.0, 3.0, 2.0]), 2).tolist())"
INFO = "from moe_kernels.__main__ import main; print('status', main(['info']))"


def without(names: tuple[str, ...], program: str) -> str:
    return f"import sys; sys.modules.update(dict.fromkeys({names}))\n{program}"


@functools.cache
def printed() -> list[str]:
    """What each program prints. torch is imported without numpy, and must not import any of OTHERS either."""
    shared = without(("numpy",), "import warnings; warnings.simplefilter('ignore'); import torch")
    shared += f"\nassert not set({OTHERS}) & set(sys.modules)"
    programs = [without(OTHERS, KWTA), without(OTHERS, INFO), without(OTHERS, REASON)]
    return forked.outputs(shared, [*programs, *(INTERPRET.format(each) for each in "01")])


def test_importing_needs_torch_alone() -> None:
    kwta, info, reason, *_ = printed()
    assert kwta == "[0.0, 3.0, 2.0]\n"
    assert info.endswith("status 0\n"), info
    assert reason == "Triton is not installed\n"


@pytest.mark.skipif(backends.missing("triton", "kwta") is not None, reason="Triton is not installed")
def test_a_missing_package_is_named() -> None:
    *_, compiled, interpreted = printed()
    assert compiled == "None\n"
    assert interpreted == "Triton is installed, but needs the package numpy, which is not: install it\n"
