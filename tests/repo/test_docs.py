"""The documentation: its code runs, it builds without a warning, and its links resolve."""

from __future__ import annotations

import html
import importlib
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import moe_kernels as mk
from bench import ledger
from moe_kernels import nn
from tests.helpers import forked
from tests.helpers.operators import pool

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "```python" in page.read_text()]
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def program(page: Path) -> str:
    return "\n".join(CODE.findall(page.read_text()))


# Ended by something else, a program has not printed END.
RUN = """import os, runpy
os.chdir({0!r})
runpy.run_path("tutorial.py", run_name="__main__")
print("END")"""


def test_the_code_of_the_tutorials_runs(tmp_path: Path) -> None:
    pages = [page for page in PAGES if page.parent.name == "tutorials"]
    programs = []
    for page in pages:
        folder = tmp_path / page.stem
        folder.mkdir()
        (folder / "tutorial.py").write_text(program(page))
        programs.append(RUN.format(str(folder)))
    # torch's optimizers import torch._dynamo: a second, in each program.
    printed = forked.outputs("import torch._dynamo, moe_kernels", programs, timeout=280, env=_environment())
    failed = [
        f"{page.stem}: {text[-4000:]}" for page, text in zip(pages, printed, strict=True) if not text.endswith("END\n")
    ]
    assert not failed, "\n".join(failed)
    assert len(pages) > 4


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name != "tutorials"], ids=lambda page: page.stem
)
def test_the_examples_of_a_page_run(page: Path) -> None:
    exec(compile(program(page), page.name, "exec"), {"__name__": "example"})


def test_every_public_function_has_a_page() -> None:
    other = {"BackendError", "available_backends", "batch_invariant", "explain", "use_backend", "__version__"}
    assert _documented("operations/*.md") == set(mk.__all__) - other
    other = {"ACTIVATIONS", "convert", "schedules"}  # a dict, and two modules whose functions the page lists
    assert _documented("guide/layers.md") == set(nn.__all__) - other


def test_every_environment_variable_has_a_row() -> None:
    root, page = DOCS.parent, (DOCS / "guide" / "environment.md").read_text()
    files = [path for name in ("moe_kernels", "bench", "tests") for path in root.glob(f"{name}/**/*.py")]
    read = {
        name for path in (*files, root / "setup.py") for name in re.findall(r"MOE_KERNELS_[A-Z_]+", path.read_text())
    }
    assert read == set(re.findall(r"^\| `(MOE_KERNELS_\w+)` \|", page, re.MULTILINE))


def test_a_page_shows_which_results_of_recipes_are_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    extension = importlib.import_module("figures")
    page = [(DOCS / "guide" / "results.md").read_text()]
    assert extension.RECIPES in page[0]
    extension._insert(None, "guide/results", page)
    for path in (DOCS.parent / "bench/results/recipes").glob("*.csv"):
        assert f"\n| `{path.name}` | " in page[0]
    assert re.search(r"\n\| `manual.csv` \| made before results had a hash of their code \|", page[0])


def test_a_page_shows_the_figures_of_fresh_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    figures = importlib.import_module("figures").figures
    monkeypatch.setattr(ledger, "is_stale", lambda entry, root=None: False)
    assert re.match(r"Measured on .*\n\n\| operation \| backend ", figures(["kwta"]))
    monkeypatch.setattr(ledger, "is_stale", lambda entry, root=None: True)
    assert figures(["kwta"]).startswith("No measurement of the present sources.\n\nPredicted, not measured; ")


def _documented(pages: str) -> set[str]:
    text = "".join(page.read_text() for page in DOCS.glob(pages))
    return set(re.findall(r"^\.\. auto(?:function|class):: (\w+)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the documentation, built with warnings as errors."""
    folder = tmp_path_factory.mktemp("html")
    log = folder / "log"

    def build() -> str | None:
        from sphinx.cmd.build import main

        words = ["-q", "-W", "--keep-going", "-w", str(log), "-b", "html", str(DOCS), str(folder)]
        return f"status {status}: {log.read_text()[-4000:]}" if (status := main(words)) else None

    assert pool.run([build], seconds=240) == [None]  # in a fork, as Sphinx changes the process; it shares the imports
    return folder


class _Links(HTMLParser):
    """The targets of a page's links, and the anchors in the page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.names: set[str] = {""}
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.names.add(found.get("id") or "")
        self.targets.add((found.get("href") if tag in ("a", "link") else found.get("src")) or "")


def test_the_links_of_the_documentation_resolve(site: Path) -> None:
    pages = {path: _Links(path) for path in site.rglob("*.html")}
    broken = []
    for page, links in pages.items():
        for target in links.targets:
            place, _, name = target.partition("#")
            if not target or re.match(r"[a-z]+:|//", target):
                continue  # the link has no target, or leaves the documentation
            path = (page.parent / unquote(place.partition("?")[0])).resolve() if place else page
            if not path.exists() or (path in pages and unquote(name) not in pages[path].names):
                broken.append(f"{page.relative_to(site)}: {target}")
    assert not broken


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_the_links_of_the_files_at_the_root_resolve(name: str) -> None:
    root = DOCS.parent
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", (root / name).read_text())
    assert not [each for each in targets if not each.startswith("http") and not (root / each).exists()]


def test_formulas_of_docstrings_keep_their_lines(site: Path) -> None:
    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "operations" / "topk_gate.html").read_text()))
    assert "\nrenormalise        weights = weights / (their sum + 1e-20)\n" in text


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(DOCS.parent), "OMP_NUM_THREADS": "1"}
