"""The documentation: its code runs, and it builds without a warning and without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moe_kernels as mk
from moe_kernels import nn

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "```python" in page.read_text()]
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def program(page: Path) -> str:
    """All python blocks of a page."""
    return "\n".join(CODE.findall(page.read_text()))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name == "tutorials"], ids=lambda page: page.stem
)
def test_the_code_of_a_tutorial_runs(page: Path, tmp_path: Path) -> None:
    """In an empty folder, in a process of its own."""
    program_file = tmp_path / "tutorial.py"
    program_file.write_text(program(page))
    run = [sys.executable, str(program_file)]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=_environment())
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name != "tutorials"], ids=lambda page: page.stem
)
def test_the_examples_of_a_page_run(page: Path) -> None:
    exec(compile(program(page), page.name, "exec"), {"__name__": "example"})


def test_every_public_function_has_a_page() -> None:
    other = {"BackendError", "available_backends", "explain", "use_backend", "__version__"}
    assert _documented("operations/*.md") == set(mk.__all__) - other
    other = {"ACTIVATIONS", "convert", "schedules"}  # a table, and modules whose functions the page lists
    assert _documented("guide/layers.md") == set(nn.__all__) - other


def _documented(pages: str) -> set[str]:
    text = "".join(page.read_text() for page in DOCS.glob(pages))
    return set(re.findall(r"^\.\. auto(?:function|class):: (\w+)$", text, re.MULTILINE))


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
