"""Fuzzed cases of grouped_gemm, expert_mlp and expert_norms."""

from __future__ import annotations

import random
from typing import Any

import torch

from moe_kernels.ops.grouped_gemm import ACTIVATIONS, HALVING
from moe_kernels.sizes import CLAMPED
from moe_kernels.verify.operation import Inputs
from tests.fuzz.operation import Fuzzed
from tests.fuzz.routing import draw_routing, has_experts, plan_of
from tests.fuzz.values import Spec, describe, make, size

KINDS = ("normal", "ties", "constant", "zeros", "tiny")


def _draw(draw: random.Random, *names: str) -> Spec:
    spec = draw_routing(draw, tokens=40, max_experts=9, k=3)
    spec |= {"experts": min(spec["experts"], 12), "tokens": min(spec["tokens"], 100)}
    spec |= {"dim": size(draw, 65), "hidden": size(draw, 65), "out": size(draw, 40)}
    if draw.random() < 0.02:
        spec |= {"dim": size(draw, 200, 100), "hidden": size(draw, 200, 100), "experts": 2}
    spec |= {"activation": draw.choice((None, *ACTIVATIONS)), "bias": draw.random() < 0.5}
    return spec | describe(draw, "x", "w_in", "w_out", "grad", *names, kinds=KINDS)


def _weights(spec: Spec, *names: str) -> Inputs:
    count, dim, hidden, out = (spec[name] for name in ("experts", "dim", "hidden", "out"))
    columns = 2 * hidden if spec["activation"] in HALVING else hidden
    found = {}
    for name, rows, width in (("w_in", dim, columns), ("w_out", hidden, out)):
        weight, scale = make(spec, name, count, rows, width), 1 / max(rows, 1) ** 0.5
        # mul_ keeps the layout, but fails if elements share memory.
        found[name] = weight * scale if _overlaps(weight) else weight.mul_(scale)
    if spec["bias"]:
        found |= {"b_in": make(spec, "b_in", count, columns), "b_out": make(spec, "b_out", count, out)}
    return {name: found[name] for name in names if name in found}


def _overlaps(x: torch.Tensor) -> bool:
    return any(stride == 0 and n > 1 for n, stride in zip(x.shape, x.stride(), strict=True))


def _draw_gemm(draw: random.Random) -> Spec:
    return _draw(draw) | {"gathered": draw.random() < 0.5}


def _build_gemm(spec: Spec) -> Inputs:
    plan, weights = plan_of(spec), _weights(spec, "w_in", "b_in")
    inputs: dict[str, Any] = {"weight": weights["w_in"], "bias": weights.get("b_in"), "activation": spec["activation"]}
    if spec["gathered"]:
        inputs |= {"rows": make(spec, "x", plan.num_tokens, spec["dim"]), "row_token": plan.row_token}
    else:
        inputs |= {"rows": make(spec, "x", plan.num_rows, spec["dim"])}
    grad = make(spec, "grad", plan.num_rows, spec["hidden"])
    return inputs | {"expert_offsets": plan.expert_offsets, "grad": grad}


def _draw_mlp(draw: random.Random) -> Spec:
    return _draw(draw, "weights") | {"weights": draw.random() < 0.8}


def _build_mlp(spec: Spec) -> Inputs:
    plan, weights = plan_of(spec), None
    if spec["weights"]:
        weights = make(spec, "weights", plan.num_tokens, spec["k"])
    inputs = {"x": make(spec, "x", plan.num_tokens, spec["dim"]), "plan": plan, "weights": weights}
    inputs |= _weights(spec, "w_in", "w_out", "b_in", "b_out")
    return inputs | {"activation": spec["activation"], "grad": make(spec, "grad", plan.num_tokens, spec["out"])}


def _build_norms(spec: Spec) -> Inputs:
    inputs = {"x": make(spec, "x", spec["tokens"], spec["dim"])} | _weights(spec, "w_in", "w_out", "b_in", "b_out")
    grad = make(spec, "grad", spec["tokens"], spec["experts"])
    return inputs | {"activation": spec["activation"], "grad": grad}


def _fits_norms(spec: Spec) -> bool:
    return has_experts(spec) and spec["activation"] != CLAMPED


def _loose(spec: Spec) -> float:
    """Factor of `Operation.floor`: 16 for tanh, whose derivative 1 - tanh^2 cancels near tanh = 1."""
    return 16.0 if spec["activation"] == "tanh" else 1.0


OPERATIONS = {
    "grouped_gemm": Fuzzed(_draw_gemm, _build_gemm, has_experts, _loose, weight=2),
    "expert_mlp": Fuzzed(_draw_mlp, _build_mlp, has_experts, _loose, weight=2),
    "expert_norms": Fuzzed(_draw, _build_norms, _fits_norms, _loose),
}
