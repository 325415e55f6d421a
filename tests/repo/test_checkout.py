"""A checkout that is not compiled and hides the installed package says so."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

from tests.helpers import forked

ROOT = Path(__file__).parents[2]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("moe_kernels", "python_ref"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    # What pip install . leaves behind in a checkout.
    describe(folder / "moe_kernels.egg-info" / "PKG-INFO")
    return folder


def describe(file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text("Metadata-Version: 2.4\nName: moe_kernels\nVersion: 0.2.0\n")


def test_a_checkout_that_hides_the_installed_package_says_so(checkout: Path, tmp_path: Path) -> None:
    describe(tmp_path / "moe_kernels-0.2.0.dist-info" / "METADATA")
    compiled = tmp_path / "moe_kernels" / f"_cpu{SUFFIX}"
    compile_it = f"from pathlib import Path; p = Path({str(compiled)!r}); p.parent.mkdir(); p.touch()"
    load = "import sys; sys.stderr = sys.stdout; import moe_kernels"
    programs = [load, f"{compile_it}; {load}"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    nothing, said = forked.outputs("import torch", programs, cwd=checkout, env=environment)
    assert nothing == ""  # the installed package is not compiled for this Python either
    assert "which has no compiled kernels and hides the installed package" in said
    assert "run Python in another folder, or build in the checkout with pip install -e ." in said
