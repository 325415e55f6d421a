"""Warns if the sources of a checkout, which are not compiled, hide an installed package."""

from __future__ import annotations

import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


def warn_if_hiding() -> None:
    """Python that is run in a checkout imports its sources, whatever is installed."""
    if _compiled(Path(__file__).parent):
        return
    from importlib import metadata

    for installed in metadata.distributions(name="moe_kernels"):
        if _compiled(Path(str(installed.locate_file("moe_kernels")))):
            warnings.warn(
                "this is moe_kernels of a checkout, which has no compiled kernels and hides the installed package: "
                "run Python in another folder, or build in the checkout with pip install -e .",
                stacklevel=3,
            )
            return


def _compiled(folder: Path) -> bool:
    return any((folder / f"_cpu{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)
