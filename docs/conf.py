"""Settings of the documentation: `make docs` builds it into docs/_build without a network."""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from moe_kernels._version import __version__  # noqa: E402 the checkout must be on the path first

project = "moe_kernels"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "figures"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
default_role = "literal"  # docstrings mark names with single backticks
highlight_language = "text"
html_theme = "furo"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_show_copyright = False
html_title = f"moe_kernels {__version__}"
copybutton_prompt_text = r">>> |\$ "
copybutton_prompt_is_regexp = True


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _keep_formulas, priority=900)  # after napoleon


def _keep_formulas(app: Any, kind: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Makes literal blocks of the indented formulas in docstrings; as block quotes their lines would run together."""
    found: list[str] = []
    inside = False
    for index, line in enumerate(lines):
        indented = line.startswith("    ")
        above = lines[index - 2] if index > 1 and not lines[index - 1] else ""
        if indented and not inside and above and not above.startswith((" ", ":", "..", "*")):
            found += ["::", ""]
        inside = indented or (inside and not line)
        found.append(line)
    lines[:] = found
