"""What is measured of the routing: gate, plan, dispatch and combine, on uniform, Zipf and adversarial choices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import moe_kernels as mk
from bench.entry import Calls, Entry, Inputs, Shape

# (T, D, E, K) of the design, the last one of paper 004 (CompeteSMoE).
SIZES = ((8192, 512, 64, 2), (32768, 256, 128, 8), (24576, 352, 16, 2))
ROUTINGS = ("uniform", "zipf", "adversarial")


def _shapes(sizes: tuple[tuple[int, ...], ...], routings: tuple[str, ...]) -> list[Shape]:
    return [dict(zip("TDEK", each, strict=True)) | {"routing": kind} for each in sizes for kind in routings]


SHAPES = {"quick": _shapes(SIZES[:1], ROUTINGS), "papers": _shapes(SIZES, ROUTINGS)}


def logits(shape: Shape, device: str) -> Tensor:
    """(T, E) whose top-k are K draws without replacement (Gumbel) from the kind's distribution over the experts.

    zipf: probability ~ rank^-1.2. adversarial: one expert takes half, a quarter of the experts take nothing.
    """
    experts = shape["E"]
    share = torch.ones(experts)
    if shape["routing"] == "zipf":
        share = torch.arange(1, experts + 1) ** -1.2
    if shape["routing"] == "adversarial":
        share[experts - experts // 4 :] = 0
        share[0] = share[1:].sum()
    noise = -torch.log(-torch.log(torch.rand(shape["T"], experts).clamp(1e-20, 1 - 1e-7)))
    return (share.log() + noise).clamp(min=-1e4).to(device)


def _inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    scores = logits(shape, device)
    weights, experts = mk.topk_gate(scores, shape["K"], backend="reference")
    plan = mk.make_plan(experts.to(torch.int32), shape["E"], backend="reference")
    tensors = {"x": torch.randn(shape["T"], shape["D"]), "rows": torch.randn(plan.num_rows, shape["D"])}
    found: Inputs = {name: each.to(device, dtype) for name, each in tensors.items()}
    leaves = {"leaf_x": found["x"], "leaf_rows": found["rows"], "leaf_weights": weights.to(dtype)}
    leaves |= {"leaf_logits": scores.to(dtype)}
    found |= {name: each.clone().requires_grad_() for name, each in leaves.items()}
    found |= {"experts": experts.to(torch.int32), "plan": plan, "k": shape["K"], "E": shape["E"]}
    return found | {"gate_grad": torch.randn(shape["T"], shape["K"], device=device).to(dtype)}


def _both(forward: Any, leaves: tuple[str, ...], grad: str) -> Calls:
    """Forward without autograd, and training through it."""

    def infer(inputs: Inputs) -> object:
        with torch.no_grad():
            return forward(inputs)

    def train(inputs: Inputs) -> object:
        return torch.autograd.grad(forward(inputs), [inputs[name] for name in leaves], inputs[grad])

    return {"forward": infer, "training": train}


def _gate(backend: str) -> Calls:
    return _both(lambda i: mk.topk_gate(i["leaf_logits"], i["k"], backend=backend)[0], ("leaf_logits",), "gate_grad")


def _plan(backend: str) -> Calls:
    def forward(inputs: Inputs) -> object:
        made = mk.make_plan(inputs["experts"], inputs["E"], backend=backend)
        return made.expert_offsets, made.row_token, made.row_choice, made.slot_row

    return {"forward": forward}


def _dispatch(backend: str) -> Calls:
    return _both(lambda i: mk.dispatch(i["leaf_x"], i["plan"], backend=backend), ("leaf_x",), "rows")


def _combine(backend: str) -> Calls:
    leaves = ("leaf_rows", "leaf_weights")
    return _both(lambda i: mk.combine(i["leaf_rows"], i["plan"], i["leaf_weights"], backend=backend), leaves, "x")


def _torch_plan(inputs: Inputs) -> object:
    """The plan's arrays from torch's sort: every first choice, then every second one."""
    experts, num_experts = inputs["experts"], inputs["E"]
    tokens, k = experts.shape
    asked = experts.T.flatten()
    arrival = torch.argsort(asked, stable=True)
    offsets = torch.cat([asked.new_zeros(1), torch.bincount(asked, minlength=num_experts).cumsum(0)])
    row = torch.empty_like(arrival)
    row[arrival] = torch.arange(tokens * k, device=asked.device)
    return offsets, arrival % tokens, arrival // tokens, row.view(k, tokens).T.contiguous()


def _torch_combine(inputs: Inputs) -> Tensor:
    plan = inputs["plan"]
    weights = inputs["leaf_weights"][plan.row_token, plan.row_choice][:, None]
    zeros = inputs["leaf_rows"].new_zeros(plan.num_tokens, inputs["leaf_rows"].shape[1])
    return zeros.index_add(0, plan.row_token, inputs["leaf_rows"] * weights)


def _torch_gate(inputs: Inputs) -> Tensor:
    return inputs["leaf_logits"].topk(inputs["k"], dim=-1).values.softmax(-1)


def _bytes(once: Any, backward: Any) -> Any:
    """least_bytes of an entry from the elements that move forward and backward: (elements, index words) each."""

    def least(shape: Shape, dtype: torch.dtype, direction: str) -> int:
        t, d, e, k = (shape[name] for name in "TDEK")
        parts = [once(t, d, e, k)] + ([backward(t, d, e, k)] if direction == "training" else [])
        return sum(elements * dtype.itemsize + words * 4 for elements, words in parts)

    return least


def _entry(kernel: Any, peer: dict[str, Calls], once: Any, backward: Any, flops: tuple[int, int], **more: Any) -> Entry:
    """flops: per element of the (R, D) rows, forward and in all."""
    return Entry(
        shapes=SHAPES,
        complete=lambda shape, device: shape,
        inputs=_inputs,
        kernel=kernel,
        peers=peer,
        flops=lambda shape, direction: shape["T"] * shape["K"] * shape["D"] * flops[direction == "training"],
        least_bytes=_bytes(once, backward),
        **{"directions": ("forward", "training"), "dtypes": (torch.float32, torch.bfloat16), **more},
    )


ENTRIES = {
    "topk_gate": _entry(
        _gate,
        {"torch topk+softmax": _both(_torch_gate, ("leaf_logits",), "gate_grad")},
        lambda t, d, e, k: (t * e + t * k, t * k),
        lambda t, d, e, k: (2 * t * k + t * e, t * k),
        (0, 0),
    ),
    "make_plan": _entry(
        _plan,
        {"torch argsort+bincount+cumsum": {"forward": _torch_plan}},
        lambda t, d, e, k: (0, 4 * t * k + 3 * e),
        lambda t, d, e, k: (0, 0),
        (0, 0),
        directions=("forward",),
        dtypes=(torch.float32,),
    ),
    "dispatch": _entry(
        _dispatch,
        {"torch index_select": _both(lambda i: i["leaf_x"].index_select(0, i["plan"].row_token), ("leaf_x",), "rows")},
        lambda t, d, e, k: (t * d + t * k * d, t * k),
        lambda t, d, e, k: (t * d + t * k * d, t * k),
        (0, 1),
    ),
    "combine": _entry(
        _combine,
        {"torch index_add": _both(_torch_combine, ("leaf_rows", "leaf_weights"), "x")},
        lambda t, d, e, k: (t * d + t * k * d + t * k, t * k),
        lambda t, d, e, k: (t * d + 2 * t * k * d + 2 * t * k, t * k),
        (2, 5),
    ),
}
