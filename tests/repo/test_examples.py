"""Examples in docstrings print the output shown there. Each function and class that moe_kernels or moe_kernels.nn
exports, and each public function of nn.convert and nn.schedules, has one."""

from __future__ import annotations

import doctest
import inspect
from types import ModuleType
from typing import Any

import pytest
import torch

import moe_kernels as mk
from moe_kernels import nn
from moe_kernels.nn import convert, schedules

# The names that are defined before an example runs.
NAMES = {"torch": torch, "mk": mk, **{name: getattr(nn, name) for name in nn.__all__}}


def public() -> dict[str, Any]:
    found = {f"mk.{name}": getattr(mk, name) for name in mk.__all__}
    found |= {f"nn.{name}": getattr(nn, name) for name in nn.__all__}
    for module in (convert, schedules):
        found |= {f"{module.__name__}.{name}": each for name, each in vars(module).items() if _own(module, name, each)}
    return {name: each for name, each in found.items() if getattr(each, "__module__", "").startswith("moe_kernels")}


def _own(module: ModuleType, name: str, each: Any) -> bool:
    return inspect.isfunction(each) and each.__module__ == module.__name__ and not name.startswith("_")


@pytest.mark.parametrize("name", sorted(public()))
def test_the_example_prints_the_output_shown(name: str) -> None:
    torch.manual_seed(0)
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(public()[name]), dict(NAMES), name, None, None)
    assert example.examples, f"{name}: the docstring has no example"
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)
