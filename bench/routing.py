"""Benchmarks of gate, plan, dispatch and combine, on uniform, Zipf and adversarial routing."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.entry import Inputs, Shape, entry, label
from bench.shapes import AIMED, LLM, PAPERS, ROUTINGS, fewer_tokens, routed, sizes
from moe_kernels.cases.combine import COMBINE
from moe_kernels.cases.dispatch import DISPATCH
from moe_kernels.cases.plan import MAKE_PLAN
from moe_kernels.cases.routing import logits
from moe_kernels.cases.topk_gate import TOPK_GATE

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


def loads(shape: Shape = QUICK[0]) -> dict[str, Any]:
    """For each kind of routing the number of choices of each expert, the busiest expert first."""
    found = {}
    for kind in ROUTINGS:
        experts = logits({**shape, "routing": kind}, "cpu").topk(shape["K"], -1).indices
        found[kind] = experts.flatten().bincount(minlength=shape["E"]).sort(descending=True).values.tolist()
    return {"shape": label(shape), "tokens": found}


def _row_choices(inputs: Inputs) -> Inputs:
    """Slot (token K + choice) and expert of every row, which megablocks reads."""
    plan = inputs["plan"]
    expert = torch.arange(plan.num_experts, device=plan.kept.device)
    return {
        "row_slot": plan.row_token * inputs["k"] + plan.row_choice,
        "row_expert": expert.repeat_interleave(plan.kept).to(torch.int32),
    }


def _plan(inputs: Inputs, backend: str) -> object:
    made = MAKE_PLAN.run(inputs, backend)
    return made.expert_offsets, made.row_token, made.row_choice, made.slot_row


def _torch_plan(inputs: Inputs) -> object:
    """The plan's arrays by torch's stable sort; an expert's rows of first choices come before those of second ones."""
    experts, num_experts = inputs["experts"], inputs["num_experts"]
    tokens, k = experts.shape
    requested = experts.T.flatten()
    order = torch.argsort(requested, stable=True)
    offsets = torch.cat([requested.new_zeros(1), torch.bincount(requested, minlength=num_experts).cumsum(0)])
    row = torch.empty_like(order)
    row[order] = torch.arange(tokens * k, device=requested.device)
    return offsets, order % tokens, order // tokens, row.view(k, tokens).T.contiguous()


def _torch_combine(inputs: Inputs) -> Tensor:
    plan = inputs["plan"]
    weights = inputs["weights"][plan.row_token, plan.row_choice][:, None]
    zeros = inputs["rows"].new_zeros(plan.num_tokens, inputs["rows"].shape[1])
    return zeros.index_add(0, plan.row_token, inputs["rows"] * weights)


def _torch_gate(inputs: Inputs) -> Tensor:
    return inputs["logits"].topk(inputs["k"], dim=-1).values.softmax(-1)


_on_shapes = partial(entry, shapes=SHAPES, complete=fewer_tokens)
ENTRIES = {
    "topk_gate": _on_shapes(TOPK_GATE, {"torch topk+softmax": _torch_gate}),
    "make_plan": _on_shapes(
        MAKE_PLAN, {"torch argsort+bincount+cumsum": _torch_plan}, forward=_plan, dtypes=(torch.float32,)
    ),
    "dispatch": _on_shapes(
        DISPATCH,
        {"torch index_select": lambda inputs: inputs["x"].index_select(0, inputs["plan"].row_token)},
        more=_row_choices,
    ),
    "combine": _on_shapes(COMBINE, {"torch index_add": _torch_combine}, more=_row_choices),
}
