"""Importing the package loads few modules besides those of torch, and none that are slow to import."""

from __future__ import annotations

import json

from tests.helpers import forked

MOST = {"moe_kernels": 100, "moe_kernels.nn": 150}  # modules besides those of torch


def test_an_import_adds_few_modules():
    code = "before = set(sys.modules); import {}; print(json.dumps(sorted(set(sys.modules) - before)))"
    programs = [f"import json, sys; {code.format(name)}" for name in MOST]
    for most, printed in zip(MOST.values(), forked.outputs("import torch", programs), strict=True):
        added = json.loads(printed)
        assert 0 < len(added) <= most, added
        heavy = ["torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "triton", "scipy"]
        heavy += ["transformers", "torch.testing"]
        assert not [each for each in added if each.startswith(tuple(heavy))]
