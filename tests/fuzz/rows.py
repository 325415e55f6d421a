"""Fuzzed cases of kwta, kwta_linear, topk_gate, tree_gate, tree_route, sinkhorn and harden."""

from __future__ import annotations

import random

import torch

import moe_kernels as mk
from moe_kernels.cases.call import Inputs
from moe_kernels.cases.kwta_linear import KWTA_LINEAR, masks
from moe_kernels.cases.kwta_linear import shapes as linear_shapes
from moe_kernels.cases.tree_gate import TREE_GATE, shapes
from moe_kernels.ops.kwta import TIES
from moe_kernels.ops.topk_gate import ORDERS
from moe_kernels.verify.operation import Outputs
from tests.fuzz.operation import Fuzzed, without_kernels
from tests.fuzz.routing import FINITE
from tests.fuzz.values import Spec, describe, make, size, tensors

MODEST = ("normal", "ties", "constant", "zeros", "tiny")


def _draw_kwta(draw: random.Random) -> Spec:
    n = size(draw, 130) if draw.random() < 0.95 else size(draw, 5000)
    spec = {"rows": size(draw, 9), "n": n, "k": draw.randint(0, n), "values": draw.random() < 0.5}
    return spec | {"ties": draw.choice(TIES), "batch": draw.random() < 0.2} | describe(draw, "x", "values", "grad")


def _build_kwta(spec: Spec) -> Inputs:
    shape = (2, spec["rows"], spec["n"]) if spec["batch"] else (spec["rows"], spec["n"])
    values = make(spec, "values", *shape) if spec["values"] else None
    tensors = {"x": make(spec, "x", *shape), "values": values, "grad": make(spec, "grad", *shape)}
    return tensors | {"k": spec["k"], "ties": spec["ties"]}


def _draw_linear(draw: random.Random) -> Spec:
    width = size(draw, 140)
    spec = {"tokens": size(draw, 40), "dim": size(draw, 70), "width": width, "k": draw.randint(0, width)}
    if draw.random() < 0.1:
        spec |= {"dim": draw.randint(500, 1100), "tokens": size(draw, 5)}
    return spec | {"bias": draw.random() < 0.5} | describe(draw, *KWTA_LINEAR.tensors, kinds=MODEST)


def _build_linear(spec: Spec) -> Inputs:
    found = tensors(spec, KWTA_LINEAR, linear_shapes({"T": spec["tokens"], "D": spec["dim"], "N": spec["width"]}))
    found["weight"] = found["weight"] / max(spec["dim"], 1) ** 0.5
    if not spec["bias"]:
        del found["bias"]
    generator = torch.Generator().manual_seed(spec["seed"])
    return {**found, "bits": masks(spec["tokens"], spec["width"], spec["k"], generator), "k": spec["k"]}


# Of each expert. Sums of two of them differ, so that scores of groups tie by rounding nearly never.
BIASES = torch.randn(130, generator=torch.Generator().manual_seed(0)) / 2


def _draw_topk(draw: random.Random) -> Spec:
    groups, by_score = draw.choice((1, 1, 2, 4, 8)), draw.random() < 0.4
    experts = groups * size(draw, 130 // groups, 1)
    spec = {"tokens": size(draw, 40), "experts": experts, "groups": groups if by_score else 0}
    spec |= {"best": draw.randint(1, groups), "bias": by_score and draw.random() < 0.7}
    spec |= {"k": draw.randint(1, min(experts // groups * spec["best"], 16))}
    spec |= {"order": draw.choice(ORDERS), "scores": draw.choice(("softmax", "softmax", "sigmoid"))}
    spec |= {"noise": not by_score and draw.random() < 0.3, "renormalise": draw.random() < 0.3}
    spec |= {"forced": draw.choice((0.0, 0.0, 0.5, 1.0)), "factor": draw.choice((1.0, 1.0, 2.5))}
    spec |= {"scale": 1.0 if by_score else draw.choice((1.0, 1.0, 30.0, 1e3, 1e5))}
    return spec | describe(draw, "logits", "noise", "grad", kinds=FINITE)


def _build_topk(spec: Spec) -> Inputs:
    tokens, experts, k = spec["tokens"], spec["experts"], spec["k"]
    noise = make(spec, "noise", tokens, experts) if spec["noise"] else None
    logits = make(spec, "logits", tokens, experts)
    if spec["groups"]:
        # Multiples of 1/8, shifted, tie exactly or not nearly: each backend rounds its own exponentials.
        logits = ((logits.double().clamp(-6, 6) * 8).round() / 8 + 0.037).to(logits.dtype)
    elif spec["scale"] != 1.0:
        logits = (logits.double() * spec["scale"]).clamp(-6e4, 6e4).to(logits.dtype)
    found = {"logits": logits, "noise": noise, "k": k, "grad": make(spec, "grad", tokens, k)}
    found |= {"scores": spec["scores"], "renormalise": spec["renormalise"], "scale": spec["factor"]}
    if spec["scores"] == "softmax":
        found["order"] = spec["order"]
    generator = torch.Generator().manual_seed(spec["seed"])
    if spec["bias"]:
        found["bias"] = BIASES[:experts]
    if spec["groups"] > 1:
        found["groups"] = (spec["groups"], spec["best"])
    if spec["forced"]:
        chosen = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k]
        found["forced"] = chosen.where(torch.rand(tokens, k, generator=generator) < spec["forced"], -1)
    return found


def _fits_topk(spec: Spec) -> bool:
    groups = max(spec["groups"], 1)
    room = spec["experts"] // groups * min(spec["best"], groups)
    return spec["experts"] % groups == 0 and 1 <= spec["best"] <= groups and 1 <= spec["k"] <= room


def _draw_tree(draw: random.Random) -> Spec:
    spec = {"tokens": size(draw, 20), "dim": size(draw, 65), "trees": size(draw, 4, 1), "experts": size(draw, 40, 2)}
    spec |= {"bias": draw.random() < 0.5, "gamma": draw.choice((1.0, 0.1, 3.0, 10.0))}
    return spec | describe(draw, "x", "split_weight", "leaf_weight", "grad_gates", "grad_leaf_probs", kinds=MODEST)


def _build_tree(spec: Spec) -> Inputs:
    sizes = {"T": spec["tokens"], "P": spec["dim"], "K": spec["trees"], "E": spec["experts"], "bias": spec["bias"]}
    found = tensors(spec, TREE_GATE, shapes(sizes))
    found["split_weight"] = found["split_weight"] * 0.5 / max(spec["dim"], 1) ** 0.5
    return {**found, "gamma": spec["gamma"]}


def _draw_sinkhorn(draw: random.Random) -> Spec:
    spec = {"batch": size(draw, 4), "n": size(draw, 33), "iterations": draw.randint(0, 20)}
    spec |= {"tau": draw.choice((1.0, 0.2, 0.5)), "sums": draw.random() < 0.2, "noise": draw.random() < 0.2}
    spec |= {"cooling": draw.random() < 0.2}
    return spec | describe(draw, "scores", "grad", kinds=MODEST)


def _build_sinkhorn(spec: Spec) -> Inputs:
    shape = spec["batch"], spec["n"], spec["n"]
    inputs = {"scores": make(spec, "scores", *shape), "grad": make(spec, "grad", *shape)}
    inputs |= {"iterations": spec["iterations"], "tau": spec["tau"]}
    if spec["sums"]:
        rows = make({**spec, "rows.kind": "normal"}, "rows", *shape[:2]).abs() + 0.5
        inputs |= {"rows": rows, "columns": rows.flip(1)}
    if spec["noise"]:
        inputs["noise"] = make(spec, "noise", *shape)
    if spec["cooling"]:
        inputs["anneal_from"] = 2.0
    return inputs


def _draw_harden(draw: random.Random) -> Spec:
    return {"batch": size(draw, 3), "n": size(draw, 9)} | describe(draw, "soft", kinds=FINITE)


def _run_harden(inputs: Inputs, backend: str) -> Outputs:
    """valid: whether `harden` returns permutations. best: whether no exchange of two rows' columns raises the sum of
    the chosen elements of `soft` by more than rounding."""
    soft = inputs["soft"]
    columns = mk.harden(soft)
    n = soft.shape[-1]
    valid = columns.sort(-1).values.eq(torch.arange(n)).all().reshape(1)
    if backend == "reference":
        return {"valid": torch.ones_like(valid), "best": torch.ones_like(valid)}
    chosen = soft.double().gather(-1, columns[..., None])[..., 0]
    swapped = soft.double().gather(-1, columns[..., None, :].expand(soft.shape))
    gain = swapped + swapped.mT - chosen[..., None] - chosen[..., None, :]
    size = soft.double().abs().amax().item() if soft.numel() else 0.0
    return {"valid": valid, "best": (gain <= 1e-12 * size).all().reshape(1)}


def _has_trees(spec: Spec) -> bool:
    return bool(spec["experts"] >= 2 and spec["trees"] >= 1)


OPERATIONS = {
    "kwta": Fuzzed(_draw_kwta, _build_kwta, lambda spec: spec["k"] <= spec["n"], weight=3),
    "kwta_linear": Fuzzed(_draw_linear, _build_linear, lambda spec: spec["k"] <= spec["width"]),
    "topk_gate": Fuzzed(_draw_topk, _build_topk, _fits_topk, weight=3),
    "tree_gate": Fuzzed(_draw_tree, _build_tree, _has_trees),
    "tree_route": Fuzzed(
        # Other kinds of x and split_weight could give pre-activations so near 0 that rounding decides the branch.
        lambda draw: _draw_tree(draw) | {"gamma": 1e-6, "x.kind": "normal", "split_weight.kind": "normal"},
        _build_tree,
        lambda spec: _has_trees(spec) and spec["gamma"] == 1e-6,
        dtypes=("float32", "float64"),
    ),
    "sinkhorn": Fuzzed(_draw_sinkhorn, _build_sinkhorn, weight=2),
    "harden": Fuzzed(
        _draw_harden,
        lambda spec: {"soft": make(spec, "soft", spec["batch"], spec["n"], spec["n"])},
        own=without_kernels(_run_harden, "valid", "best"),
    ),
}
