"""Inputs and shapes of the measured and counted calls, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
from bench import counting, experts, kwta, layer, layer_models, registry, routing
from bench.shapes import LLM, fewer_tokens, sizes
from moe_kernels import make_plan


@pytest.mark.parametrize(
    ("shape", "tokens", "kept"),
    [
        ({"T": 9000, "D": 2048, "H": 4096, "E": 64, "K": 2}, 8192, 4),  # 2^25 elements of rows, and of weights
        ({"T": 9000, "D": 2048, "H": 4096, "E": 64, "K": 8}, 2048, 8),  # a token needs eight experts
        ({"T": 9000, "D": 4096, "H": 16384, "E": 64}, 8192, 1),
        ({"T": 100, "D": 2048, "H": 4096, "E": 3, "K": 2}, 100, 3),
    ],
)
def test_experts_on_a_cpu_have_32_million_elements(shape: dict[str, int], tokens: int, kept: int) -> None:
    assert experts._complete(shape, "cpu") == {**shape, "T": tokens, "E": kept}
    assert experts._norms_complete(shape, "cpu") == {**shape, "T": min(1024, shape["T"]), "E": kept}
    for complete in (experts._complete, experts._norms_complete):
        assert complete(shape, "cuda") == shape


def test_rows_on_a_cpu_have_32_million_elements() -> None:
    shape = {"T": 10**6, "D": 512, "E": 64, "K": 2, "routing": "zipf"}
    assert fewer_tokens(shape, "cpu") == {**shape, "T": 2**15}
    assert fewer_tokens(shape, "cuda") == shape
    assert kwta._complete({"N": 2**12, "p": 0.5}, "cpu") == {"R": 2**9, "N": 2**12, "p": 0.5}
    assert kwta._complete({"N": 2**22, "p": 0.5}, "cpu")["R"] == 1
    assert kwta._complete({"N": 2**22, "p": 0.5}, "cuda")["R"] == 8192
    assert kwta._complete({"R": 3, "N": 100, "p": 0.5}, "cpu")["R"] == 3


def test_shapes_of_a_table_have_the_named_sizes_once() -> None:
    assert sizes({name: LLM[name] for name in ("Qwen3-30B", "OLMoE")}, "ETD") == [
        {"E": 128, "T": 32768, "D": 2048},
        {"E": 64, "T": 32768, "D": 2048},
    ]
    assert sizes(LLM, "D") == [{"D": size} for size in (2048, 4096, 7168, 2880)]


def test_the_grouped_product_of_torch_is_a_peer_where_torch_has_it() -> None:
    grouped = ["torch grouped_mm"] * hasattr(torch.nn.functional, "grouped_mm")
    assert list(experts.PRODUCTS) == ["torch loop of mm", *grouped]
    for op in ("grouped_gemm", "expert_mlp"):
        assert list(registry.ENTRIES[op].peers) == list(experts.PRODUCTS)


def test_rows_know_their_choice_and_expert() -> None:
    """Rows of an expert: first choices of all tokens, then second ones."""
    chosen = torch.tensor([[2, 0], [0, 2], [2, 3]])
    found = routing._row_choices({"plan": make_plan(chosen, 5), "k": 2})
    assert found["row_slot"].tolist() == [2, 1, 0, 4, 3, 5]
    assert found["row_expert"].tolist() == [0, 0, 2, 2, 2, 3]
    assert found["row_expert"].dtype == torch.int32


def test_the_loads_of_the_experts_are_those_of_the_choices() -> None:
    found = routing.loads({"T": 50, "D": 4, "E": 6, "K": 2})
    assert found["shape"] == "T=50 D=4 E=6 K=2"
    assert list(found["tokens"]) == ["uniform", "zipf", "adversarial"]
    for each in found["tokens"].values():
        assert (len(each), sum(each)) == (6, 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_calls_that_are_counted_alone_have_inputs_of_their_own(dtype: torch.dtype) -> None:
    shape = {"T": 6, "D": 4, "H": 10, "E": 8, "K": 3, "B": 2, "n": 5, "R": 7, "tau": 0.5, "routing": "uniform"}

    def of(name: str) -> dict[str, Any]:
        given = shape if name != "gelu" else {key: value for key, value in shape.items() if key != "R"}
        return counting.EXTRA[name].inputs(given, dtype, "cpu")

    gelu = of("gelu")
    assert (gelu["b_in"].shape, gelu["b_in"].dtype, gelu["activation"]) == ((8, 10), dtype, "gelu")
    assert gelu["b_in"].requires_grad
    assert gelu["b_in"].is_leaf
    assert (gelu["x"].shape, gelu["w_in"].shape, gelu["x"].dtype) == ((6, 4), (8, 4, 10), dtype)
    assert counting.EXTRA["gelu"].leaves == ("x", "w_in", "b_in")
    sums = of("sums")
    for name in ("rows", "columns"):
        assert sums[name].shape == (2, 5)
        assert ((sums[name] >= 0.5) & (sums[name] < 1.5)).all()
    assert not torch.equal(sums["rows"], sums["columns"])
    assert (sums["tolerance"], sums["iterations"], sums["tau"]) == (1e-9, 7, 0.5)
    scored = of("scored")
    rule = {"scores": "sigmoid", "groups": (8, 4), "renormalise": True, "scale": 2.5}
    assert {name: scored[name] for name in rule} == rule
    assert (scored["bias"].shape, scored["bias"].dtype) == ((8,), torch.float32)
    assert torch.equal(scored["bias"], of("scored")["bias"])
    assert 0.01 < scored["bias"].std() < 0.3


@pytest.mark.parametrize("name", ["priority", "choice"])
def test_a_plan_of_scores_is_counted_without_a_gradient(name: str) -> None:
    assert counting.EXTRA[name].directions == ("forward",)
    assert counting.EXTRA["scored"].directions == ("forward", "training")


def test_the_second_count_has_twice_the_first_unit() -> None:
    case = next(each for each in counting.cases() if each.units == ("T", "E"))
    assert case.twice.counted_shape == {**case.counted_shape, "T": 2 * case.counted_shape["T"]}
    assert case.scale() == (24576 / 256) * (16 / 2)
    assert replace(case.twice, small=case.small) == case


@pytest.mark.parametrize(("activation", "width"), [("gelu", 96), ("swiglu", 192)])
def test_inputs_of_a_layers_steps_have_the_scale_of_their_sums(monkeypatch, activation: str, width: int) -> None:
    """Products with weights keep a variance of one; they are on the device of the setting."""
    given = layer_models.Sizes(64, 256, 96, 4, 2, activation)
    names = ("x", "w_in", "w_out", "hidden", "rows", "grad_weights")
    shapes = [(64, 256), (4, 256, width), (4, 96, 256), (128, 96), (128, 256), (64, 2)]
    setting = layer.Setting(given, torch.bfloat16, "cpu")
    torch.manual_seed(0)
    found = layer._inputs(setting, names, ("x", "w_in"))
    assert [tuple(found[name].shape) for name in names] == shapes
    for name, scale in (("x", 1.0), ("w_in", 256**-0.5), ("w_out", 96**-0.5), ("hidden", 1.0), ("rows", 1.0)):
        assert float(found[name].detach().float().std()) == pytest.approx(scale, rel=0.05)
        assert (found[name].dtype, found[name].requires_grad) == (torch.bfloat16, name in ("x", "w_in"))
    assert found["grad_weights"].dtype == torch.float32
    monkeypatch.setattr(layer, "_routing", lambda setting: {"plan": "made"})
    found = layer._inputs(replace(setting, device="meta"), names, ())
    assert found.pop("plan") == "made"
    assert {each.device.type for each in found.values()} == {"meta"}
