"""Fuzzed cases of grouped_gemm, expert_mlp and expert_norms."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import torch

from moe_kernels.cases import grouped_gemm
from moe_kernels.cases.call import Call, Inputs
from moe_kernels.cases.expert_mlp import EXPERT_MLP
from moe_kernels.cases.expert_norms import EXPERT_NORMS
from moe_kernels.cases.grouped_gemm import GROUPED_GEMM
from moe_kernels.ops.grouped_gemm import ACTIVATIONS
from moe_kernels.sizes import CLAMPED
from tests.fuzz.operation import Fuzzed
from tests.fuzz.routing import draw_routing, has_experts, plan_of
from tests.fuzz.values import Spec, describe, size, tensors

KINDS = ("normal", "ties", "constant", "zeros", "tiny")


def _draw(draw: random.Random, call: Call) -> Spec:
    spec = draw_routing(draw, tokens=40, max_experts=9, k=3)
    spec |= {"experts": min(spec["experts"], 12), "tokens": min(spec["tokens"], 100)}
    spec |= {"dim": size(draw, 65), "hidden": size(draw, 65), "out": size(draw, 40)}
    if draw.random() < 0.02:
        spec |= {"dim": size(draw, 200, 100), "hidden": size(draw, 200, 100), "experts": 2}
    spec |= {"activation": draw.choice((None, *ACTIVATIONS)), "bias": draw.random() < 0.5}
    spec |= {"gathered": draw.random() < 0.5, "weights": draw.random() < 0.8}
    return spec | describe(draw, *call.leaves, *call.grads, kinds=KINDS)


def _build(spec: Spec, call: Call) -> Inputs:
    plan = plan_of(spec)
    sizes = {"T": plan.num_tokens, "R": plan.num_rows, "K": spec["k"], "E": spec["experts"]}
    sizes |= {"D": spec["dim"], "H": spec["hidden"], "O": spec["out"]}
    shapes = grouped_gemm.shapes(sizes | {name: spec[name] for name in ("activation", "bias")})
    if call is GROUPED_GEMM and not spec["gathered"]:
        shapes["x"] = (plan.num_rows, spec["dim"])
    if not spec["weights"]:
        del shapes["weights"]
    found = tensors(spec, call, shapes)
    for name in {"w_in", "w_out"} & found.keys():
        weight, scale = found[name], 1 / max(found[name].shape[1], 1) ** 0.5
        # mul_ keeps the layout, but fails if elements share memory.
        found[name] = weight * scale if _overlaps(weight) else weight.mul_(scale)
    given = {"weights": None, "plan": plan, "activation": spec["activation"], "gathered": spec["gathered"]}
    return given | found


def _overlaps(x: torch.Tensor) -> bool:
    return any(stride == 0 and n > 1 for n, stride in zip(x.shape, x.stride(), strict=True))


def _fits_norms(spec: Spec) -> bool:
    return has_experts(spec) and spec["activation"] != CLAMPED


def _loose(spec: Spec) -> float:
    """Factor of `Operation.floor`: 16 for tanh, whose derivative 1 - tanh^2 cancels near tanh = 1."""
    return 16.0 if spec["activation"] == "tanh" else 1.0


def _fuzzed(call: Call, fits: Callable[[Spec], bool], weight: int) -> Fuzzed:
    return Fuzzed(partial(_draw, call=call), partial(_build, call=call), fits, _loose, weight=weight)


OPERATIONS = {
    "grouped_gemm": _fuzzed(GROUPED_GEMM, has_experts, 2),
    "expert_mlp": _fuzzed(EXPERT_MLP, has_experts, 2),
    "expert_norms": _fuzzed(EXPERT_NORMS, _fits_norms, 1),
}
