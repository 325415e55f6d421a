"""Cases of the top-k gate: normal logits, ties, forbidden experts (logit -inf), and each option of scores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch

from moe_kernels.cases.topk_gate import TOPK_GATE
from moe_kernels.ops import topk_gate
from moe_kernels.verify.operation import Case, Operation, differentiated, random_rows


def _cases(dtype: torch.dtype, device: str, small: bool) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for tokens, experts in ((2, 7), (3, 33)) if small else ((1, 1), (9, 7), (5, 100), (3, 1024), (300, 64)):
        for kind in ("normal", "ties", "masked"):
            logits = random_rows("ties" if kind == "ties" else "normal", tokens, experts, dtype, generator)
            if kind == "masked":
                logits[:, 1::2] = -math.inf
            for k in sorted({1, min(2, experts), (experts + 1) // 2}):
                for order in topk_gate.ORDERS:
                    grad = torch.randn(tokens, k, generator=generator).to(dtype)
                    inputs = {"logits": logits.to(device), "k": k, "order": order, "grad": grad.to(device)}
                    yield Case(f"{kind} {tokens} x {experts}, k={k}, {order}", inputs)
    yield from _scored(dtype, device, small, generator)


def _scored(dtype: torch.dtype, device: str, small: bool, generator: torch.Generator) -> Iterator[Case]:
    """Logits are multiples of 1/8, shifted, so that scores do not nearly tie: each backend rounds its own."""
    for tokens, experts, groups in ((3, 12, 3),) if small else ((9, 12, 3), (70, 64, 8), (33, 256, 8), (5, 384, 4)):
        for scores in topk_gate.SCORES:
            logits = random_rows("normal", tokens, experts, torch.float32, generator)
            logits = (logits.clamp(-6, 6) * 8).round() / 8 + 0.037
            bias = torch.randn(experts, generator=generator)
            k = min(8, experts // groups)
            forced = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k].to(torch.int16)
            forced = forced.where(torch.rand(tokens, k, generator=generator) < 0.3, -1)
            grad = torch.randn(tokens, k, generator=generator).to(dtype)
            inputs = {"logits": logits.to(dtype).to(device), "k": k, "grad": grad.to(device), "scores": scores}
            scored = {"bias": bias.to(device), "groups": (groups, 2), "renormalise": True, "scale": 2.5}
            yield Case(f"{scores}, bias, {groups} groups {tokens} x {experts}, k={k}", inputs | scored)
            yield Case(f"{scores}, forced {tokens} x {experts}, k={k}", inputs | {"forced": forced.to(device)})


OPERATION = Operation(_cases, partial(differentiated, call=TOPK_GATE), exact=frozenset({"experts"}), floor=2.0)
