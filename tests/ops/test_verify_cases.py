"""The cases with which `verify` compares kernels with their definitions, and what it compares."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import torch

from moe_kernels import verify


def described(name: str, value: object) -> str:
    if is_dataclass(value):
        return " ".join(described(f"{name}.{each.name}", getattr(value, each.name)) for each in fields(value))
    if not isinstance(value, torch.Tensor):
        return f"{name}={value!r}"
    text = f"{name}={str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}".replace(" ", "")
    if not value.is_contiguous():
        text += f"@{value.stride()}".replace(" ", "")
    if not value.numel():
        return text
    size = value.double().nan_to_num(0, 0, 0).clamp(-1e3, 1e3)
    return f"{text}: {size.abs().mean():.4g} {size.flatten()[-1]:.4g}"


def test_every_case_of_verify(stored) -> None:
    """Inputs of the small cases in float32; names, which have the sizes, of the others."""
    lines = []
    for op, operation in verify.OPERATIONS.items():
        lines.append(f"{op}: exact {', '.join(sorted(operation.exact))}; floor {operation.floor:g}")
        names: dict[str, None] = {}
        for case in verify.cases(op, torch.float32, small=True):
            lines.append(f"  {case.name}: {' '.join(described(*each) for each in case.inputs.items())}")
        for small in (True, False):
            for dtype in (torch.float32, torch.bfloat16, torch.float64)[small:]:
                names |= dict.fromkeys(case.name for case in verify.cases(op, dtype, small=small))
        lines += [f"  {name}" for name in names]
    stored("verify_cases", "\n".join(lines), tolerance=2e-3)
