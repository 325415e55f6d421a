"""Settings of the documentation: `make docs` builds it into docs/_build without a network."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from moe_kernels._version import __version__  # noqa: E402 the checkout must be on the path first

project = "moe_kernels"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "figures"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
autodoc_typehints = "none"  # docstrings state shapes and dtypes, which annotations cannot
autodoc_member_order = "bysource"
html_theme = "furo"
html_title = f"moe_kernels {__version__}"
copybutton_prompt_text = r">>> |\$ "
copybutton_prompt_is_regexp = True
