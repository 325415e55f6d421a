"""Every public name with its arguments and their defaults, against a file of tests/stored."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import moe_kernels as mk

MODULES = ("moe_kernels", "moe_kernels.nn", "moe_kernels.nn.schedules", "moe_kernels.nn.parallel", "moe_kernels.verify")
EXTRA = (
    "integrations.transformers",
    "integrations.bert",
    "papers.data",
    "papers.models.comparison",
    "papers.models.gpt",
)
EXTRA += tuple(f"papers.models.{name}" for name in ("mixer", "mlp", "mmoe", "moe", "transformer", "vit"))


def arguments(call: Any) -> str:
    """Names, kinds and defaults of a call's arguments; annotations look different from Python to Python."""
    found = []
    for each in inspect.signature(call).parameters.values():
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        kind = " (by name)" if each.kind is each.KEYWORD_ONLY else ""
        default = each.default
        shown = getattr(
            default, "__name__", default if isinstance(default, str | int | float | tuple) else str(default)
        )
        found.append(f"{stars}{each.name}{'' if default is each.empty else f'={shown}'}{kind}")
    return ", ".join(found)


def described(module: Any) -> Iterator[str]:
    public = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    for name in sorted(public):
        thing = getattr(module, name)
        ours = str(getattr(thing, "__module__", "")).startswith("moe_kernels")
        if not callable(thing) or not ours or ("__all__" not in vars(module) and thing.__module__ != module.__name__):
            continue
        if not inspect.isclass(thing):
            yield f"{module.__name__}.{name}({arguments(thing)})"
            continue
        yield f"class {module.__name__}.{name}({', '.join(base.__name__ for base in thing.__bases__)})"
        for member, value in sorted(vars(thing).items()):
            function = getattr(value, "__func__", value)
            if inspect.isfunction(function) and (not member.startswith("_") or member == "__init__"):
                yield f"  {member}({arguments(function)})"
            elif isinstance(value, property):
                yield f"  {member}"


def test_public_names_and_their_arguments(stored) -> None:
    pytest.importorskip("transformers")
    names = (*MODULES, *(f"{mk.__name__}.{name}" for name in EXTRA))
    lines = [line for name in names for line in described(importlib.import_module(name))]
    stored("signatures", "\n".join(lines))
