"""Benchmarks of gate, plan, dispatch and combine, on uniform, Zipf and adversarial routing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import moe_kernels as mk
from bench.entry import Entry, Inputs, Shape, entry, label
from bench.shapes import AIMED, LLM, PAPERS, ROUTINGS, fewer_tokens, routed, sizes

QUICK: list[Shape] = [{"T": 8192, "D": 512, "E": 64, "K": 2}]
SHAPES = {
    "quick": routed(QUICK),
    "papers": routed(QUICK + sizes(PAPERS, "TDEK")),
    "llm": routed(sizes(LLM, "TDEK")),
    "aims": routed(sizes(AIMED, "TDEK")[:1], ("uniform", "zipf")),
    "scaling": [
        {**QUICK[0], "T": tokens, "D": 128, "routing": "uniform"} for tokens in (512, 2048, 8192, 32768, 65536)
    ],
}


def logits(shape: Shape, device: str) -> Tensor:
    """Logits (T, E): the K largest of a row are K draws without replacement from a distribution over the experts.

    zipf: the probability of expert i is proportional to (i + 1)^-1.2. adversarial: expert 0 has probability 1/2, the
    last quarter of the experts has 0. uniform: all are equal.
    """
    experts = shape["E"]
    share = torch.ones(experts)
    if shape["routing"] == "zipf":
        share = torch.arange(1, experts + 1) ** -1.2
    if shape["routing"] == "adversarial":
        share[experts - experts // 4 :] = 0
        share[0] = share[1:].sum()
    noise = -torch.log(-torch.log(torch.rand(shape["T"], experts, device=device).clamp(1e-20, 1 - 1e-7)))
    return (share.to(device).log() + noise).clamp(min=-1e4)


def loads(shape: Shape = QUICK[0]) -> dict[str, Any]:
    """For each kind of routing the number of choices of each expert, the busiest expert first."""
    found = {}
    for kind in ROUTINGS:
        experts = logits({**shape, "routing": kind}, "cpu").topk(shape["K"], -1).indices
        found[kind] = experts.flatten().bincount(minlength=shape["E"]).sort(descending=True).values.tolist()
    return {"shape": label(shape), "tokens": found}


def _inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    scores = logits(shape, device)
    weights, experts = mk.topk_gate(scores, shape["K"], backend="reference")
    plan = mk.make_plan(experts.to(torch.int32), shape["E"], backend="reference")
    rows = {"x": shape["T"], "rows": plan.num_rows}
    found: Inputs = {name: torch.randn(count, shape["D"], device=device).to(dtype) for name, count in rows.items()}
    leaves = {"leaf_x": found["x"], "leaf_rows": found["rows"], "leaf_weights": weights.to(dtype)}
    leaves |= {"leaf_logits": scores.to(dtype)}
    found |= {name: each.clone().requires_grad_() for name, each in leaves.items()}
    found |= {"experts": experts.to(torch.int32), "plan": plan, "k": shape["K"], "E": shape["E"]}
    found |= {"row_slot": plan.row_token * shape["K"] + plan.row_choice}
    found |= {"row_expert": torch.arange(shape["E"], device=device).repeat_interleave(plan.kept).to(torch.int32)}
    return found | {"gate_grad": torch.randn(shape["T"], shape["K"], device=device).to(dtype)}


def _plan(inputs: Inputs, backend: str) -> object:
    made = mk.make_plan(inputs["experts"], inputs["E"], backend=backend)
    return made.expert_offsets, made.row_token, made.row_choice, made.slot_row


def _torch_plan(inputs: Inputs) -> object:
    """The plan's arrays by torch's stable sort; an expert's rows of first choices come before those of second ones."""
    experts, num_experts = inputs["experts"], inputs["E"]
    tokens, k = experts.shape
    requested = experts.T.flatten()
    order = torch.argsort(requested, stable=True)
    offsets = torch.cat([requested.new_zeros(1), torch.bincount(requested, minlength=num_experts).cumsum(0)])
    row = torch.empty_like(order)
    row[order] = torch.arange(tokens * k, device=requested.device)
    return offsets, order % tokens, order // tokens, row.view(k, tokens).T.contiguous()


def _torch_combine(inputs: Inputs) -> Tensor:
    plan = inputs["plan"]
    weights = inputs["leaf_weights"][plan.row_token, plan.row_choice][:, None]
    zeros = inputs["leaf_rows"].new_zeros(plan.num_tokens, inputs["leaf_rows"].shape[1])
    return zeros.index_add(0, plan.row_token, inputs["leaf_rows"] * weights)


def _torch_gate(inputs: Inputs) -> Tensor:
    return inputs["leaf_logits"].topk(inputs["k"], dim=-1).values.softmax(-1)


def _bytes(forward: Any, backward: Any) -> Any:
    """least_bytes of an entry; both functions take T, D, E, K and return numbers of elements and of 4-byte indices."""

    def least(shape: Shape, dtype: torch.dtype, direction: str) -> int:
        t, d, e, k = (shape[name] for name in "TDEK")
        parts = [forward(t, d, e, k)] + ([backward(t, d, e, k)] if direction == "training" else [])
        return sum(elements * dtype.itemsize + words * 4 for elements, words in parts)

    return least


def _without_rows(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    """Inputs with D = 1, for gates and plans, which do not read the rows."""
    return _inputs({**shape, "D": 1}, dtype, device)


def _entry(
    forward: Any,
    leaves: str,
    peers: dict[str, Any],
    forward_moves: Any,
    backward_moves: Any,
    flops: tuple[int, int] = (0, 0),
    inputs: Callable[[Shape, torch.dtype, str], Inputs] = _inputs,
) -> Entry:
    """The entry of a routing operation.

    leaves: names of the inputs that have gradients, then the name of the output's gradient.
    forward_moves, backward_moves: see `_bytes`.
    flops: for each element of the rows (T K, D), forward and in training.
    """
    *names, grad = leaves.split()
    return entry(
        forward,
        peers,
        tuple(names),
        grad,
        shapes=SHAPES,
        complete=fewer_tokens,
        inputs=inputs,
        flops=lambda shape, direction: shape["T"] * shape["K"] * shape["D"] * flops[direction == "training"],
        least_bytes=_bytes(forward_moves, backward_moves),
        dtypes=(torch.float32, torch.bfloat16) if names else (torch.float32,),
    )


ENTRIES = {
    "topk_gate": _entry(
        lambda i, backend: mk.topk_gate(i["leaf_logits"], i["k"], backend=backend)[0],
        "leaf_logits gate_grad",
        {"torch topk+softmax": _torch_gate},
        lambda t, d, e, k: (t * e + t * k, t * k),
        lambda t, d, e, k: (2 * t * k + t * e, t * k),
        inputs=_without_rows,
    ),
    "make_plan": _entry(
        _plan,
        "unused",  # a plan has no gradient, so nothing reads this name
        {"torch argsort+bincount+cumsum": _torch_plan},
        lambda t, d, e, k: (0, 4 * t * k + 3 * e),
        lambda t, d, e, k: (0, 0),
        inputs=_without_rows,
    ),
    "dispatch": _entry(
        lambda i, backend: mk.dispatch(i["leaf_x"], i["plan"], backend=backend),
        "leaf_x rows",
        {"torch index_select": lambda i: i["leaf_x"].index_select(0, i["plan"].row_token)},
        lambda t, d, e, k: (t * d + t * k * d, t * k),
        lambda t, d, e, k: (t * d + t * k * d, t * k),
        (0, 1),
    ),
    "combine": _entry(
        lambda i, backend: mk.combine(i["leaf_rows"], i["plan"], i["leaf_weights"], backend=backend),
        "leaf_rows leaf_weights x",
        {"torch index_add": _torch_combine},
        lambda t, d, e, k: (t * d + t * k * d + t * k, t * k),
        lambda t, d, e, k: (t * d + 2 * t * k * d + 2 * t * k, t * k),
        (2, 5),
    ),
}
