"""Small cases of modules: which way a call takes, and results at the edges of their conditions."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

import moe_kernels as mk
from moe_kernels import nn as mnn
from moe_kernels.nn._invariance import spread
from moe_kernels.nn._mask import call_with_mask
from moe_kernels.nn._parameters import RouterLinear
from moe_kernels.nn.gates.gate import GateOutput
from moe_kernels.nn.moe import _expert_mask
from tests.helpers.layers import Operators

D, E, H, T = 6, 4, 5, 8


@pytest.mark.parametrize(
    ("fixed", "differentiated", "trained", "operators"),
    [
        (False, True, True, {"expert_mlp_fwd", "expert_mlp_bwd"}),
        (False, True, False, {"expert_mlp_fwd", "expert_mlp_bwd"}),
        (False, False, True, {"expert_mlp_fwd"}),
        (True, False, True, {"expert_mlp_fwd"}),
        (True, True, True, {"grouped_gemm_fwd", "grouped_gemm_bwd", "combine_fwd", "combine_bwd"}),
        (True, True, False, {"grouped_gemm_fwd", "grouped_gemm_bwd", "combine_fwd", "combine_bwd"}),
    ],
)
def test_experts_add_rows_by_themselves_where_several_processes_would(fixed, differentiated, trained, operators):
    """In the mode and with gradients; else one operator computes the experts."""
    experts = mnn.ExpertMLP(E, D, H).requires_grad_(trained)
    x, weights = torch.randn(T, D, requires_grad=True), torch.rand(T, 2)
    plan = mk.make_plan(torch.arange(2 * T).view(T, 2) % E, E)
    with Operators() as seen, mk.batch_invariant(fixed), torch.set_grad_enabled(differentiated):
        y = experts(x, plan, weights)
        if differentiated:
            y.sum().backward()
    assert {name for name in seen.names if not name.startswith("refuse_")} == operators


def test_without_anything_to_differentiate_the_mode_changes_no_operator():
    experts = mnn.ExpertMLP(E, D, H).requires_grad_(False)
    plan = mk.make_plan(torch.arange(T)[:, None] % E, E)
    with Operators() as seen, mk.batch_invariant():
        experts(torch.randn(T, D), plan, torch.rand(T, 1))
    assert "expert_mlp_fwd" in seen.names


@pytest.mark.parametrize(
    ("x_dtype", "dtype", "words"),
    [
        (torch.bfloat16, torch.float32, r"float32; got torch.bfloat16; .*, or call the layer in torch.autocast$"),
        (torch.float32, torch.bfloat16, r"bfloat16; got torch.float32; .*, or call the layer in torch.autocast$"),
        (torch.float64, torch.float32, r"float32; got torch.float64; .*; torch.autocast casts no float64$"),
        (torch.float32, torch.float64, r"float64; got torch.float32; .*; torch.autocast casts no float64$"),
    ],
)
@pytest.mark.parametrize("make", [partial(mnn.ExpertMLP, E, D, H), partial(mnn.ExpertLayer, E, D, H)])
def test_x_of_another_dtype_is_refused_by_the_layer(make, x_dtype, dtype, words):
    experts, plan = make(dtype=dtype), mk.make_plan(torch.arange(T)[:, None] % E, E)
    with pytest.raises(TypeError, match=f"^Expert.*: x must have the dtype of the parameters, torch.{words}"):
        experts(torch.randn(T, D, dtype=x_dtype), plan, None)


@pytest.mark.parametrize(("shape", "tokens"), [((T,), T), ((T, 1), T), ((2, 4), T), ((2, 2, 2), T), ((0,), 0)])
def test_each_sample_draws_its_experts(shape: tuple[int, ...], tokens: int) -> None:
    """A sample is a row of the first dimension; its tokens follow each other."""
    plan = mk.make_plan(torch.arange(2 * tokens).view(tokens, 2) % E, E)
    torch.manual_seed(3)
    kept = torch.rand(shape[0], E) >= 0.5
    torch.manual_seed(3)
    found = _expert_mask(0.5, torch.empty(*shape, D), plan)
    per_sample = tokens // shape[0] if shape[0] else 1
    expected = [[bool(kept[t // per_sample, e]) for e in row] for t, row in enumerate(plan.slot_expert.tolist())]
    assert found.tolist() == expected


@pytest.mark.parametrize("group", [None, 4, 8])
def test_gates_that_no_expert_chose_have_weight_zero_beside_a_mask(group):
    gate, mask = mnn.SoftmaxGate(D, E)(torch.randn(T, D)), torch.arange(T) % 3 != 0
    masked = GateOutput(
        torch.where(mask[:, None], gate.weights, 0), torch.where(mask[:, None], gate.experts, -1), E, losses={}
    )
    plan, weights = mnn.ExpertChoice(1.0, group=group)(masked, False, mask)
    chosen = plan.slot_row >= 0
    assert chosen[mask].any()
    assert not chosen[~mask].any()
    assert torch.equal(weights, torch.where(chosen, masked.gates, 0))


def test_expert_choice_takes_no_tokens():
    gate = mnn.SoftmaxGate(D, E)(torch.randn(0, D))
    plan, weights = mnn.ExpertChoice(1.0)(gate, False)
    assert plan.kept.tolist() == [0] * E
    assert weights.shape == (0, E)


def test_a_mask_reaches_calls_that_name_it_or_take_all_names():
    mask = torch.ones(3, dtype=torch.bool)

    class Named(torch.nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor | None:
            return mask

    assert call_with_mask("layer", Named(), 1, mask=mask) is mask
    assert call_with_mask("layer", lambda x, **named: named["mask"], 1, mask=mask) is mask
    assert call_with_mask("layer", lambda x, *, mask: mask, 1, mask=mask) is mask
    assert call_with_mask("layer", lambda x: x, 1, mask=None) == 1
    for without in (lambda x: x, lambda *x: x, lambda x, masks=None: x):
        with pytest.raises(TypeError, match=r"^layer: function does not take a mask, expected a call with an argument"):
            call_with_mask("layer", without, 1, mask=mask)


@pytest.mark.parametrize("zero_bias", [False, True])
@pytest.mark.parametrize("bound", [None, 0.01])
def test_a_linear_layer_draws_weight_and_bias_from_a_generator(bound, zero_bias):
    layer = RouterLinear(D, 400, bound=bound, zero_bias=zero_bias, generator=torch.Generator().manual_seed(1))
    default = 1 / math.sqrt(D)
    assert 0.9 < layer.weight.detach().abs().max() / (bound or default) <= 1
    assert zero_bias == (not layer.bias.any())
    if not zero_bias:
        assert 0.9 < layer.bias.detach().abs().max() / default <= 1
        assert layer.bias.detach().std() == pytest.approx(default / math.sqrt(3), rel=0.1)
    again = RouterLinear(D, 400, bound=bound, zero_bias=zero_bias, generator=torch.Generator().manual_seed(1))
    assert torch.equal(layer.weight, again.weight)
    assert torch.equal(layer.bias, again.bias)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_parts_are_spread_along_any_dimension(dim, fixed):
    x = torch.randn(2, 3, requires_grad=True)
    with mk.batch_invariant(fixed):
        y = spread(x, dim, 4)
        (grad,) = torch.autograd.grad((y * torch.arange(24.0).view(y.shape)).sum(), x)
    assert torch.equal(y, torch.stack([x] * 4, dim))
    torch.testing.assert_close(grad, torch.arange(24.0).view(y.shape).sum(dim))


@pytest.mark.parametrize("ranks", [False, True])
def test_the_second_stage_of_stable_routing_leaves_the_small_router_alone(ranks, monkeypatch):
    """Among several processes its parameters get gradients of 0 in training, since DDP waits for them."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: ranks)
    gate, x, ids = mnn.StableGate(D, E, 12), torch.randn(T, D), torch.arange(T)
    small = [*gate.embedding.parameters(), *gate.router.parameters()]
    gate.begin_stage_two()
    for training in (True, False):
        gate.zero_grad()
        gate.train(training)(x, ids).weights.sum().backward()
        assert gate.centroids.grad.any()
        if ranks and training:
            assert not any(each.grad.any() for each in small)
        else:
            assert all(each.grad is None for each in small)
