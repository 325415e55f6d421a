"""Cases of the top-k gate: normal logits, ties, and forbidden experts (logit -inf)."""

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


OPERATION = Operation(_cases, partial(differentiated, call=TOPK_GATE), exact=frozenset({"experts"}), floor=2.0)
