"""The cases with which `verify` compares kernels with their definitions, and what it compares."""

from __future__ import annotations

import torch

from moe_kernels import verify
from tests.helpers.stored import input_line


def test_every_case_of_verify(stored) -> None:
    """Inputs of the small cases in float32; names, which have the sizes, of the others."""
    lines = []
    for op, operation in verify.OPERATIONS.items():
        lines.append(f"{op}: exact {', '.join(sorted(operation.exact))}; floor {operation.floor:g}")
        names: dict[str, None] = {}
        for case in verify.cases(op, torch.float32, small=True):
            lines.append(f"  {case.name}: {' '.join(input_line(*each) for each in case.inputs.items())}")
        for small in (True, False):
            for dtype in (torch.float32, torch.bfloat16, torch.float64)[small:]:
                names |= dict.fromkeys(case.name for case in verify.cases(op, dtype, small=small))
        lines += [f"  {name}" for name in names]
    stored("verify_cases", "\n".join(lines), tolerance=2e-3)
