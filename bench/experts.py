"""Benchmarks of the experts: the grouped GEMM, the expert MLP and expert norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.entry import Inputs, Shape, entry
from bench.shapes import AIMED, LLM, PAPERS, fewer_tokens, routed, sizes
from moe_kernels.cases.expert_mlp import EXPERT_MLP
from moe_kernels.cases.expert_norms import EXPERT_NORMS
from moe_kernels.cases.grouped_gemm import GROUPED_GEMM

QUICK: list[Shape] = [{"T": 4096, "D": 128, "H": 128, "E": 64, "K": 1}]
SHAPES = {
    "quick": routed(QUICK),
    "papers": routed(QUICK + sizes(PAPERS, "TDHEK")),
    "llm": routed(sizes(LLM, "TDHEK")),
    "aims": routed(sizes(AIMED, "TDHEK"), ("uniform",)) + routed(sizes(AIMED, "TDHEK")[:1], ("zipf",)),
    "scaling": [{**QUICK[0], "T": tokens, "routing": "uniform"} for tokens in (512, 2048, 8192, 32768, 65536)],
}
NORMS = sizes(PAPERS, "TDHE")


def _complete(shape: Shape, device: str) -> Shape:
    fewer = fewer_tokens({"K": 1, **shape}, device)
    max_experts = max(shape.get("K", 1), 2**25 // (shape["D"] * shape["H"]))
    return {**shape, "T": fewer["T"], "E": min(shape["E"], max_experts)} if device == "cpu" else shape


def _norms_complete(shape: Shape, device: str) -> Shape:
    return {**_complete(shape, device), "T": min(shape["T"], 1024)} if device == "cpu" else shape


def _bounds(inputs: Inputs) -> Inputs:
    return {"bounds": inputs["plan"].expert_offsets.tolist()}


def _loop(rows: Tensor, weight: Tensor, inputs: Inputs) -> Tensor:
    """One product for each expert. The host has the offsets of the experts' rows, so it need not wait for a GPU."""
    sizes = [last - first for first, last in zip(inputs["bounds"], inputs["bounds"][1:], strict=False)]
    return torch.cat([part @ each for part, each in zip(rows.split(sizes), weight.unbind(), strict=True)])


def _grouped_mm(rows: Tensor, weight: Tensor, inputs: Inputs) -> Tensor:
    return F.grouped_mm(rows, weight, offs=inputs["plan"].expert_offsets[1:])


PRODUCTS = {"torch loop of mm": _loop}
if hasattr(F, "grouped_mm"):
    PRODUCTS["torch grouped_mm"] = _grouped_mm


def _gemm_peer(inputs: Inputs, product: Callable[..., Tensor]) -> Tensor:
    return product(inputs["x"].index_select(0, inputs["plan"].row_token), inputs["w_in"], inputs)


def _mlp_peer(inputs: Inputs, product: Callable[..., Tensor]) -> Tensor:
    plan = inputs["plan"]
    rows = product(F.gelu(_gemm_peer(inputs, product)), inputs["w_out"], inputs)
    weighted = rows * inputs["weights"][plan.row_token, plan.row_choice][:, None]
    return torch.zeros_like(inputs["x"]).index_add(0, plan.row_token, weighted)


def _dense_norms(inputs: Inputs) -> Tensor:
    hidden = torch.relu(inputs["x"] @ inputs["w_in"])  # (E, T, H)
    return torch.linalg.vector_norm(hidden @ inputs["w_out"], dim=-1).t()


def _by_products(peer: Callable[..., Tensor]) -> dict[str, Callable[[Inputs], Tensor]]:
    return {name: partial(peer, product=product) for name, product in PRODUCTS.items()}


ENTRIES = {
    "grouped_gemm": entry(GROUPED_GEMM, _by_products(_gemm_peer), more=_bounds, shapes=SHAPES, complete=_complete),
    "expert_mlp": entry(EXPERT_MLP, _by_products(_mlp_peer), more=_bounds, shapes=SHAPES, complete=_complete),
    "expert_norms": entry(
        EXPERT_NORMS,
        {"torch dense outputs": _dense_norms},
        complete=_norms_complete,
        shapes={
            "quick": [{**NORMS[0], "T": 512}],
            "papers": NORMS,
            "llm": NORMS[:1],
            "scaling": [{**NORMS[0], "T": tokens} for tokens in (8, 32, 128, 1024)],
        },
    ),
}
