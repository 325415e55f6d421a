"""Hashes of the code that a result of a recipe or a study was made with.

Kernels are not part of them: moe_kernels/nn and ops, whose results of their own (bench/results) carry hashes too.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

from moe_kernels._source import python_code

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "moe_kernels.papers"

# Trains every recipe.
TRAINING = (f"{PACKAGE}.train.loop", f"{PACKAGE}.train.comparison")

# Prints, draws and stores what was computed, and changes no number.
PRESENTS = (
    "train",
    *(f"train.{name}" for name in ("agreement", "checkpoint", "contents", "grids", "heatmaps", "plotting", "report")),
)
PRESENTS += ("train.sweeps", "train.trained", "sources", "")


def digest(kind: str, name: str, root: Path = ROOT) -> str:
    """12 hexadecimal digits: the hash of `files` without comments and docstrings. kind: "recipes" or "studies"."""
    found = hashlib.sha256()
    for path in files(kind, name, root):
        code = _code(path.read_text())
        found.update(f"{path.relative_to(root).as_posix()} {len(code)}\n{code}".encode())
    return found.hexdigest()[:12]


def files(kind: str, name: str, root: Path = ROOT) -> list[Path]:
    """The files of moe_kernels/papers whose changes make a result stale.

    The recipe's or study's module and, for a recipe, TRAINING; and what these import from moe_kernels.papers, directly
    or through others, without PRESENTS.
    """
    left = [f"{PACKAGE}.{kind}.{name}", *(TRAINING if kind == "recipes" else ())]
    found: dict[str, Path] = {}
    while left:
        module = left.pop()
        path = _path(module, root)
        if module in found or path is None or module.removeprefix(PACKAGE).removeprefix(".") in PRESENTS:
            continue
        found[module] = path
        left += _imported(path.read_text())
    return sorted(found.values())


def _path(module: str, root: Path) -> Path | None:
    place = root / module.replace(".", "/")
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


@cache
def _imported(text: str) -> list[str]:
    """Names of PACKAGE that a file imports: modules, and names in modules, which `_path` does not find."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            found += [str(node.module), *(f"{node.module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name.startswith(PACKAGE)]
    return found


@cache  # of each version of a file, since a run asks once for every side and seed
def _code(text: str) -> str:
    return python_code(text)
