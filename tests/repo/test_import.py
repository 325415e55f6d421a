"""Importing the package loads few modules besides those of torch, and none that are slow to import."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("name", "most"), [("moe_kernels", 100), ("moe_kernels.nn", 150)])
def test_an_import_adds_few_modules(name, most):
    code = f"import sys, json, torch; before = set(sys.modules); import {name}; "
    code += "print(json.dumps(sorted(set(sys.modules) - before)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    added = json.loads(done.stdout)
    assert len(added) <= most, added
    heavy = ["torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "triton", "scipy", "transformers"]
    heavy += ["torch.testing"]
    assert not [each for each in added if each.startswith(tuple(heavy))]
