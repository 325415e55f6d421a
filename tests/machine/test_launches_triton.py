"""Tests of how Triton kernels are launched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.helpers.targets import INTERPRET

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(INTERPRET, reason="Triton's interpreter compiles no kernel")

STEPS = 300


def launches(case: Callable[[], None]) -> list[dict[str, Any]]:
    """The launches of Triton kernels that case() makes; none of them runs."""
    from tests.helpers.triton_launches import recorded

    with recorded() as found:
        case()
    return found


def each_kernel() -> None:
    """Calls most of the functions that launch Triton kernels."""
    from moe_kernels.backends.triton import combine, dispatch, grouped_gemm, kwta, plan, sinkhorn, topk_gate, tree_gate

    tokens, k, num_experts, dim = 32, 2, 8, 64
    x, grad = torch.randn(tokens, dim), torch.randn(tokens, dim)
    _, bits = kwta.kwta_fwd(x, None, 5, "index", True)
    kwta.kwta_bwd(grad, bits)
    weights, experts = topk_gate.topk_gate_fwd(torch.randn(tokens, num_experts), k, "softmax_topk")
    logits = torch.randn(tokens, num_experts)
    topk_gate.topk_gate_bwd(torch.randn(tokens, k), weights, experts, logits, num_experts, torch.float32)
    experts = torch.randint(0, num_experts, (tokens, k), dtype=torch.int32)
    offsets, row_token, _, slot_row, *_ = plan.make_plan_fwd(experts, num_experts, None, None, "token")
    plan.plan_priority_fwd(torch.randn(tokens, num_experts), 4)
    rows = dispatch.dispatch_fwd(x, row_token, slot_row, offsets)
    combine.combine_fwd(rows, torch.rand(tokens, k), slot_row)
    combine.combine_bwd(grad, rows, torch.rand(tokens, k), slot_row, offsets)
    weight, hidden = torch.randn(num_experts, dim, dim), torch.randn(rows.shape)
    _, pre = grouped_gemm.grouped_gemm_fwd(rows, weight, offsets, None, None, "gelu", True)
    grouped_gemm.grouped_gemm_bwd_weight(rows, hidden, offsets, None, None, True)
    grouped_gemm.expert_mlp_bwd_hidden(grad, weight, offsets, row_token, torch.rand(rows.shape[0]), pre, "gelu")
    grouped_gemm.activation_bwd(hidden, pre, "gelu")
    for n in (4, 128):
        scores = torch.randn(2, n, n)
        for taus in ([1.0, 0.5], [1.0, 1.0]):
            sinkhorn.sinkhorn_fwd(scores, taus, None, None, -1.0)
            sinkhorn.sinkhorn_bwd(scores, scores, taus, None, None, -1.0)
    split, leaf = torch.randn(tokens, 1, num_experts - 1), torch.randn(tokens, 1, num_experts)
    gates, _ = tree_gate.tree_gate_fwd(split, leaf, 1.0, "")
    tree_gate.tree_gate_bwd(gates, None, split, leaf, 1.0, "")
    trees = torch.randn(1, num_experts - 1, dim).bfloat16(), torch.randn(1, num_experts, dim).bfloat16()
    tree_gate.tree_gate_fused_fwd(x.bfloat16(), *trees, None, None, 1.0, "")


def test_no_kernel_leaves_contraction_to_the_compiler():
    found = launches(each_kernel)
    assert len({each["kernel"] for each in found}) >= 19
    assert not [each["kernel"] for each in found if each["options"]["enable_fp_fusion"]]


def plans() -> None:
    from moe_kernels.backends.triton import plan

    for tokens in (1, 100, 5000):
        experts = torch.randint(0, 128, (tokens, 8), dtype=torch.int32)
        plan.make_plan_fwd(experts, 128, None, None, "token")


def test_a_plan_takes_three_launches():
    names = ["_plan_count", "_plan_scan", "_plan_rank"]
    found = launches(plans)
    assert [each["kernel"] for each in found] == 3 * names
    assert {each["options"]["num_warps"] for each in found if each["kernel"] == "_plan_rank"} == {1}


def many_experts() -> None:
    from moe_kernels.backends.triton import grouped_gemm

    num_experts = 70000
    x, weight = torch.randn(8, 16), torch.empty(1, 16, 16).expand(num_experts, 16, 16)
    offsets, grad = torch.zeros(num_experts + 1, dtype=torch.int32), torch.randn(8, 16)
    grouped_gemm.grouped_gemm_fwd(x, weight, offsets, None, None, "", False)
    grouped_gemm.grouped_gemm_bwd_weight(x, grad, offsets, None, None, False)


def test_grids_of_many_experts_stay_within_their_limits():
    found = launches(many_experts)
    assert len(found) == 2
    for each in found:
        assert each["grid"][0] < 2**31
        assert all(size < 65536 for size in each["grid"][1:]), each
    assert "131072" not in found[0]["key"], "BLOCK_E holds all experts: compilation takes more than a minute"


def iterations() -> None:
    from moe_kernels.backends.triton import sinkhorn

    for count in (5, 1, 16):
        for n in (4, 70):
            scores, taus, sums = torch.randn(3, n, n), [1.0] * count, torch.ones(3, n).double()
            for given in ((None, None, -1.0), (sums, sums, 0.1)):
                sinkhorn.sinkhorn_fwd(scores, taus, *given)
                sinkhorn.sinkhorn_bwd(scores, scores, taus, *given)


def test_sinkhorn_compiles_once_for_any_number_of_iterations():
    found = launches(iterations)
    compiled = [index for index, each in enumerate(found) if each["compiles"]]
    assert {found[index]["kernel"] for index in compiled} == {each["kernel"] for each in found}
    assert max(compiled) < len(found) // 3


def steps() -> None:
    """Training steps of a gate and experts, each with a random number of tokens."""
    from moe_kernels.backends.triton import combine, grouped_gemm, plan, topk_gate

    num_experts, k, dim, hidden = 16, 2, 64, 128
    w_in, w_out = torch.randn(num_experts, dim, hidden).bfloat16(), torch.randn(num_experts, hidden, dim).bfloat16()
    for _ in range(STEPS):
        tokens = int(torch.randint(1000, 2000, ()))
        x, y = torch.randn(2, tokens, dim).bfloat16()
        weights, _ = topk_gate.topk_gate_fwd(torch.randn(tokens, num_experts), k, "topk_softmax")
        experts = torch.randint(0, num_experts, (tokens, k), dtype=torch.int32)
        capacity = tokens * k // num_experts * 5 // 4
        offsets, row_token, _, slot_row, *_ = plan.make_plan_fwd(experts, num_experts, capacity, None, "token")
        h, pre = grouped_gemm.grouped_gemm_fwd(x, w_in, offsets, row_token, None, "gelu", True)
        rows, _ = grouped_gemm.grouped_gemm_fwd(h, w_out, offsets, None, None, "", False)
        combine.combine_fwd(rows, weights, slot_row)
        row_weight = torch.rand(row_token.shape[0])
        dpre, weighted, _ = grouped_gemm.expert_mlp_bwd_hidden(y, w_out, offsets, row_token, row_weight, pre, "gelu")
        grouped_gemm.grouped_gemm_bwd_weight(weighted, y, offsets, None, row_token, False)
        grouped_gemm.grouped_gemm_fwd(dpre, w_in.transpose(1, 2), offsets, None, None, "", False)
        topk_gate.topk_gate_bwd(torch.rand(tokens, k), weights, experts, None, num_experts, torch.float32)


def policies() -> None:
    """Expert choice and priority routing, with a random number of tokens in each step."""
    from moe_kernels.backends.triton import plan

    for _ in range(STEPS):
        tokens = int(torch.randint(1, 3000, ()))
        plan.plan_expert_choice_fwd(torch.rand(tokens, 16), tokens // 16 + 1)
        plan.plan_priority_fwd(torch.rand(tokens, 16), tokens // 8 + 1)


def layers(dtype: torch.dtype) -> None:
    import moe_kernels as mk
    from moe_kernels.nn import ExpertMLP, MoE, TopKGate

    layer = MoE(TopKGate(32, 8, 2), ExpertMLP(8, 32, 32, activation="swiglu")).to(dtype)
    # No kernel runs, so outputs keep their first values: zeros, which are valid indices of experts and rows.
    with patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros), mk.use_backend("triton"):
        for _ in range(STEPS):
            x = torch.randn(int(torch.randint(1, 1500, ())), 32, dtype=dtype, requires_grad=True)
            layer(x).y.sum().backward()


CASES = {
    "steps": steps,
    "policies": policies,
    "float32 layers": partial(layers, torch.float32),
    "bfloat16 layers": partial(layers, torch.bfloat16),
}


@pytest.mark.parametrize("case", CASES)
def test_random_sizes_compile_no_more_after_the_first_steps(case):
    found = launches(CASES[case])
    per_step = len(found) // STEPS
    compiled = [index // per_step for index, each in enumerate(found) if each["compiles"]]
    assert len(compiled) <= 12, len(compiled)
    assert max(compiled) < 20


def test_a_stage_that_leaves_an_invalid_program_is_named():
    from triton._C.libtriton import ir

    from tests.ptx.triton_launch import verified

    context = ir.context()
    ir.load_dialects(context)
    builder = ir.builder(context)
    module = builder.create_module()
    function = builder.get_or_insert_function(module, "f", builder.get_function_ty([], []), "private", False)
    module.push_back(function)
    assert verified("ttir", lambda module, _: module)(module, {}) is module
    with pytest.raises(RuntimeError, match="ttgir: after"):
        verified("ttgir", lambda module, _: function.add_entry_block())(module, {})  # a block without a terminator
