"""Benchmarks of the experts: the grouped GEMM, the expert MLP and expert norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import moe_kernels as mk
from bench.entry import Entry, Inputs, Shape, entry
from bench.routing import logits
from bench.shapes import AIMED, LLM, PAPERS, fewer_tokens, routed, sizes

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


def _inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    tokens, dim, hidden, experts = (shape[name] for name in "TDHE")
    routed_shape = {"K": 1, "routing": "uniform", **shape}
    weights, chosen = mk.topk_gate(logits(routed_shape, device), routed_shape["K"], backend="reference")
    plan = mk.make_plan(chosen, experts, backend="reference")
    sizes = {
        "x": (tokens, dim),
        "w_in": (experts, dim, hidden),
        "w_out": (experts, hidden, dim),
        "grad": (tokens, dim),
        "grad_rows": (plan.num_rows, hidden),
        "grad_norms": (tokens, experts),
    }
    found: Inputs = {name: torch.randn(size, device=device).to(dtype) for name, size in sizes.items()}
    found |= {"w_in": found["w_in"] / dim**0.5, "w_out": found["w_out"] / hidden**0.5}
    leaves = {name: found[name] for name in ("x", "w_in", "w_out")} | {"weights": weights.to(dtype)}
    found |= {f"leaf_{name}": each.clone().requires_grad_() for name, each in leaves.items()}
    return found | {"plan": plan, "bounds": plan.expert_offsets.tolist()}


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
    return product(inputs["leaf_x"].index_select(0, inputs["plan"].row_token), inputs["leaf_w_in"], inputs)


def _mlp_peer(inputs: Inputs, product: Callable[..., Tensor]) -> Tensor:
    plan = inputs["plan"]
    rows = product(F.gelu(_gemm_peer(inputs, product)), inputs["leaf_w_out"], inputs)
    weighted = rows * inputs["leaf_weights"][plan.row_token, plan.row_choice][:, None]
    return torch.zeros_like(inputs["x"]).index_add(0, plan.row_token, weighted)


def _dense_norms(inputs: Inputs) -> Tensor:
    hidden = torch.relu(inputs["leaf_x"] @ inputs["leaf_w_in"])  # (E, T, H)
    return torch.linalg.vector_norm(hidden @ inputs["leaf_w_out"], dim=-1).t()


def _gemm(inputs: Inputs, backend: str) -> Tensor:
    plan = inputs["plan"]
    x, weight = inputs["leaf_x"], inputs["leaf_w_in"]
    return mk.grouped_gemm(x, weight, plan.expert_offsets, row_token=plan.row_token, backend=backend)


def _mlp(inputs: Inputs, backend: str) -> Tensor:
    x, w_in, w_out, weights = (inputs[f"leaf_{name}"] for name in ("x", "w_in", "w_out", "weights"))
    return mk.expert_mlp(x, inputs["plan"], w_in, w_out, weights=weights, backend=backend)


def _norms(inputs: Inputs, backend: str) -> Tensor:
    return mk.expert_norms(inputs["leaf_x"], inputs["leaf_w_in"], inputs["leaf_w_out"], backend=backend)


def _entry(forward: Any, peers: dict[str, Any], leaves: str, elements: Any, products: Any, **more: Any) -> Entry:
    """The entry of an operation on `_inputs`.

    leaves: names of the inputs that have gradients, then the name of the output's gradient, separated by spaces.
    elements(shape): number of elements of all inputs, and of all outputs. Backward reads the inputs and the gradients
        of the outputs, and writes a gradient for each input.
    products(shape): number of multiply-adds forward; training has three times as many.
    """
    *names, grad = leaves.split()

    def least_bytes(shape: Shape, dtype: torch.dtype, direction: str) -> int:
        inputs, outputs = elements(shape)
        return ((3 * inputs + 2 * outputs) if direction == "training" else inputs + outputs) * dtype.itemsize

    return entry(
        forward,
        peers,
        tuple(names),
        grad,
        inputs=_inputs,
        flops=lambda shape, direction: 2 * products(shape) * (3 if direction == "training" else 1),
        least_bytes=least_bytes,
        **{"shapes": SHAPES, "complete": _complete, **more},
    )


def _rows(shape: Shape) -> int:
    return shape["T"] * shape["K"]


def _matrix(shape: Shape) -> int:
    return shape["D"] * shape["H"]


ENTRIES = {
    "grouped_gemm": _entry(
        _gemm,
        {name: partial(_gemm_peer, product=product) for name, product in PRODUCTS.items()},
        "leaf_x leaf_w_in grad_rows",
        lambda shape: (shape["T"] * shape["D"] + shape["E"] * _matrix(shape), _rows(shape) * shape["H"]),
        lambda shape: _rows(shape) * _matrix(shape),
    ),
    "expert_mlp": _entry(
        _mlp,
        {name: partial(_mlp_peer, product=product) for name, product in PRODUCTS.items()},
        "leaf_x leaf_w_in leaf_w_out leaf_weights grad",
        lambda shape: (
            shape["T"] * shape["D"] + 2 * shape["E"] * _matrix(shape) + _rows(shape),
            shape["T"] * shape["D"],
        ),
        lambda shape: 2 * _rows(shape) * _matrix(shape),
    ),
    "expert_norms": _entry(
        _norms,
        {"torch dense outputs": _dense_norms},
        "leaf_x leaf_w_in leaf_w_out grad_norms",
        lambda shape: (shape["T"] * shape["D"] + 2 * shape["E"] * _matrix(shape), shape["T"] * shape["E"]),
        lambda shape: 2 * shape["T"] * shape["E"] * _matrix(shape),
        complete=_norms_complete,
        shapes={
            "quick": [{**NORMS[0], "T": 512}],
            "papers": NORMS,
            "llm": NORMS[:1],
            "scaling": [{**NORMS[0], "T": tokens} for tokens in (8, 32, 128, 1024)],
        },
    ),
}
