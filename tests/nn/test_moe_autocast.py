"""Tests of layers of experts under autocast."""

from __future__ import annotations

import copy

import pytest
import torch

from moe_kernels.nn import ExpertLayer, ExpertMLP, MoE, MultiGateMoE, SoftmaxGate, TopKGate
from moe_kernels.nn.policies import TokenChoice

T, D, H, E = 12, 6, 5, 4
KINDS = {"mlp": lambda: ExpertMLP(E, D, H), "layer": lambda: ExpertLayer(E, D, D)}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_experts_follow_autocast_as_linear_layers_do(make, dtype):
    torch.manual_seed(0)
    layer, x = MoE(TopKGate(D, E, 2), make()), torch.randn(T, D, requires_grad=True)
    plain = layer(x)
    with torch.autocast("cpu", dtype):
        out, dense = layer(x), torch.nn.Linear(D, D)(x)
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(layer(x).y, plain.y)
    assert out.y.dtype == dense.dtype == dtype
    assert torch.equal(out.plan.row_token, plain.plan.row_token)
    assert torch.equal(out.gates[0].weights, plain.gates[0].weights)
    narrow = copy.deepcopy(layer.experts).to(dtype)
    assert torch.equal(out.y, narrow(x.to(dtype), out.plan, out.gates[0].weights))
    inputs = [x, *layer.parameters()]
    found = zip(
        [out.y, *torch.autograd.grad(out.y.float().square().sum(), inputs)],
        [plain.y, *torch.autograd.grad(plain.y.square().sum(), inputs)],
        strict=True,
    )
    for got, want in found:
        assert want.dtype == torch.float32
        # Rounding to bfloat16 has a relative error of up to 2^-8 (float16: 2^-11), and a few such errors add up.
        torch.testing.assert_close(got.float(), want, rtol=0, atol=0.02 * want.abs().max().item())


@every_kind
def test_autocast_leaves_float64_as_it_is(make):
    """As torch.nn.Linear does: float64 tensors are not cast, and mixing float64 with another dtype is an error."""
    torch.manual_seed(0)
    layer, x = MoE(TopKGate(D, E, 2), make()).double(), torch.randn(T, D, dtype=torch.float64)
    expected = layer(x).y
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x).y
        assert out.dtype == torch.nn.Linear(D, D).double()(x).dtype == torch.float64
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            torch.nn.Linear(D, D)(x)
        with pytest.raises(TypeError, match=r"parameters, torch\.float32; got torch\.float64; .* casts no float64"):
            layer.float()(x)
    assert torch.equal(out, expected)


def test_tasks_and_residuals_under_autocast():
    torch.manual_seed(0)
    gate, experts, x = TopKGate(D, E, 2), ExpertMLP(E, D, H), torch.randn(T, D)
    layer = MoE(gate, experts, TokenChoice(0.5), pass_through=True)
    tasks = MultiGateMoE([gate, SoftmaxGate(D, E)], experts)
    with torch.autocast("cpu", torch.bfloat16):
        out, narrow, several = layer(x), layer(x.bfloat16()), tasks(x)
    assert out.y.dtype == torch.float32
    assert narrow.y.dtype == torch.bfloat16
    torch.testing.assert_close(out.y, layer(x).y, rtol=0.02, atol=0.02)
    for got, want in zip(several.y, tasks(x).y, strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.02)


@pytest.mark.slow
@every_kind
def test_a_layer_compiles_with_autocast_inside_and_outside(make):
    torch.manual_seed(0)
    torch.compiler.reset()
    before, layer = torch.nn.Linear(D, D), MoE(SoftmaxGate(D, E), make())
    parameters = [*before.parameters(), *layer.parameters()]

    def plain(x):
        return layer(before(x)).y

    def inside(x):
        with torch.autocast("cpu", torch.bfloat16):
            return plain(x)

    compiled, compiled_inside = (torch.compile(f, fullgraph=True, backend="aot_eager") for f in (plain, inside))
    x = torch.randn(T, D)
    for on in (False, True, False):  # one function, traced again if autocast changes
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            got, want = compiled(x), plain(x)
        assert got.dtype == want.dtype == (torch.bfloat16 if on else torch.float32)
        torch.testing.assert_close(got, want)
    got, want = compiled_inside(x), inside(x)
    assert got.dtype == want.dtype == torch.bfloat16
    grads = [torch.autograd.grad(y.float().square().sum(), parameters) for y in (got, want)]
    torch.testing.assert_close(*grads, rtol=0.02, atol=0.02)


def test_autocast_changes_neither_the_dtype_of_norms_nor_of_what_passes_through():
    experts, x = ExpertMLP(2, 8, 4), torch.randn(5, 8)
    layer = MoE(TopKGate(8, 2, 1, order="softmax_topk"), experts, TokenChoice(0.5), pass_through=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert experts.norms(x).dtype == torch.float32
        out = layer(x)
        plain, weights = MoE(layer.gate, experts, TokenChoice(0.5))(x), layer.gate(x).weights
    kept = weights * (out.plan.slot_row >= 0)
    assert (kept == 0).any()
    assert out.y.dtype == torch.float32
    torch.testing.assert_close(out.y, plain.y + (1 - kept) * x, rtol=1e-6, atol=1e-6)
