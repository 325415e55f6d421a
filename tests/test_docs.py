"""The documentation: its code runs, and it builds without a warning and without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
TUTORIALS = sorted(DOCS.glob("tutorials/*.md"))
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_code_of_a_tutorial_runs(page: Path, tmp_path: Path) -> None:
    """All python blocks of a page are one program, run in an empty folder by a process of its own."""
    blocks = CODE.findall(page.read_text())
    assert blocks, "a tutorial without code"
    program = tmp_path / "tutorial.py"
    program.write_text("\n".join(blocks))
    run = [sys.executable, str(program)]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=_environment())
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    build = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-b",
        "html",
        str(DOCS),
        str(tmp_path / "html"),
    ]
    done = subprocess.run(build, capture_output=True, text=True, timeout=240, env=_environment())
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "html" / "index.html").exists()


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(DOCS.parent), "OMP_NUM_THREADS": "1"}
