"""Layers in the mode batch_invariant: slices of 1 to 100 rows have the bits of the whole of 678 rows."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from torch import nn

import moe_kernels as mk
from moe_kernels import nn as mnn
from moe_kernels.nn import _invariance
from tests.helpers.invariance import T, rows_that_differ
from tests.helpers.layers import Lora

D, E, H, IDS = 70, 9, 50, 12
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEW = (1, 2, 3, 5, 17, 64, 100)


def staged():
    gate = mnn.StagedGate(mnn.SoftmaxGate(D, E), mnn.TopKGate(D, E, 1, order="softmax_topk"), distill=1.0)
    gate.stage = 2
    return gate


def spread_out(gate):
    """The gate with larger weights, so that some of its smooth steps are saturated."""
    for name in ("split_weight", "code"):
        weight = getattr(gate, name, None)
        if weight is not None:
            nn.init.normal_(getattr(weight, "weight", weight), 0, 0.2)
    return gate


def lora():
    gate = mnn.TopKGate(D, E, 2)
    gate.linear = Lora(gate.linear)
    nn.init.normal_(gate.linear.b.weight)
    return gate


# Every gate, without random numbers.
GATES = {
    "softmax": lambda: mnn.SoftmaxGate(D, E, importance=0.1),
    "topk": lambda: mnn.TopKGate(D, E, 2, balance=0.1, z=0.1),
    "softmax, then topk": lambda: mnn.TopKGate(D, E, 3, order="softmax_topk", importance=0.1),
    "lora": lora,
    "tree": lambda: spread_out(mnn.TreeGate(D, E, 2, entropy=0.1)),
    "tree, branches": lambda: spread_out(mnn.TreeGate(D, 40, 3)),
    "tree, route": lambda: mnn.TreeGate(D, E, 2, gamma=1e-3, route=True),
    "dselect": lambda: spread_out(mnn.DSelectKGate(D, E, 3, entropy=0.1)),
    "hash": lambda: mnn.HashGate(IDS, E),
    "manual": lambda: mnn.ManualGate([0, 1, 2, 3] * 3, E),
    "xmoe": lambda: mnn.XMoEGate(D, E, 2),
    "xmoe cosine": lambda: mnn.XMoEGate(D, E, 2, score="cosine"),
    "xmoe learned": lambda: mnn.XMoEGate(D, E, 2, score="learned", embedding=11),
    "hyper": lambda: mnn.HyperRouterGate(D, E, 2, hidden=8),
    "stable": lambda: mnn.StableGate(D, E, IDS),
    "ensemble": lambda: mnn.EnsembleGate(D, E, 1, members=3),
    "staged": staged,
    "permuted": lambda: mnn.PermutedGate(mnn.TreeGate(D, E, 2), mnn.LocalSearch(E, 50, schedule="wide")),
}
NONZERO = ("tree", "tree, branches", "tree, route", "permuted")
PASS_THROUGH = ("topk", "softmax, then topk", "stable")


def layer_of(name):
    torch.manual_seed(0)
    gate = GATES[name]()
    policy = mnn.NonzeroWeights() if name in NONZERO else None
    return mnn.MoE(gate, mnn.ExpertMLP(gate.num_experts, D, H), policy, pass_through=name in PASS_THROUGH)


def call_of(layer):
    def call(x, ids):
        for module in layer.modules():
            if isinstance(module, mnn.LocalSearch):
                module.step = 3  # every step has another temperature
        out = layer(x, ids)
        weights = out.gates[0].weights
        return [out.y, weights] if weights.requires_grad else [out.y]

    return call


def inputs(dtype):
    return torch.randn(T, D, generator=torch.Generator().manual_seed(1)).to(dtype), torch.arange(T) % 3


# The gate computes in float32 whatever the dtype of x, so evaluation differs from training in float32 alone.
@pytest.mark.parametrize(("dtype", "training"), [*((dtype, True) for dtype in DTYPES), (torch.float32, False)], ids=str)
@pytest.mark.parametrize("name", GATES)
def test_gates(name, dtype, training):
    layer = layer_of(name).to(dtype).train(training)
    assert rows_that_differ(call_of(layer), *inputs(dtype), sizes=FEW) == {}


@pytest.mark.parametrize("name", GATES)
def test_16_bit_gates(name):
    layer = layer_of(name)
    for module in layer.modules():
        if isinstance(module, mnn.Gate):
            module.keep_float32 = False
    assert rows_that_differ(call_of(layer.bfloat16()), *inputs(torch.bfloat16), sizes=FEW) == {}


def test_every_size():
    layer = layer_of("topk")
    assert rows_that_differ(call_of(layer), *inputs(torch.float32), sizes=range(1, 101)) == {}


def test_outside_the_mode_bits_depend_on_the_batch():
    """Else these tests could not fail."""
    for name in ("topk", "dselect", "xmoe cosine"):
        assert rows_that_differ(call_of(layer_of(name)), *inputs(torch.float32), sizes=FEW, enabled=False) != {}


@pytest.mark.parametrize("function", ["linear", "ordered_sum", "sigmoid"])
def test_a_gate_that_sums_as_torch_does_is_seen(function, monkeypatch):
    """ordered_sum: in reversed order for few rows. sigmoid: another form for few rows."""
    defects = {
        "linear": lambda x, weight, bias=None: nn.functional.linear(x, weight, bias),
        "ordered_sum": lambda x, dim: reduce(torch.add, (x if len(x) > 50 else x.flip(dim)).unbind(dim)),
        "sigmoid": lambda x: x.sigmoid() if len(x) > 50 else 1 / (1 + (-x).exp()),
    }
    name = {"linear": "topk", "ordered_sum": "xmoe cosine", "sigmoid": "stable"}[function]
    for module in (_invariance, mnn.gates.stable):
        if hasattr(module, function):
            monkeypatch.setattr(module, function, defects[function])
    assert rows_that_differ(call_of(layer_of(name)), *inputs(torch.float32), sizes=FEW) != {}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [2, 9, 33, 100])
def test_a_softmax_of_one_row(n, dtype):
    """In float32 torch's backward of one row has other bits than that of many for about every twentieth row."""
    x, grad = torch.randn(300, n).to(dtype), torch.randn(300, n).to(dtype)

    def gradient(part):
        given = x[part].clone().requires_grad_()
        with mk.batch_invariant():
            y = _invariance.softmax(given)
        return torch.autograd.grad(y, given, grad[part])[0]

    whole = gradient(slice(None))
    torch.testing.assert_close(whole, torch._softmax_backward_data(grad, x.softmax(-1), -1, dtype))
    assert all(torch.equal(gradient(slice(i, i + 1))[0], whole[i]) for i in range(300))


EXPERTS = {
    "one layer": lambda: mnn.ExpertLayer(E, D, H),
    "swiglu": lambda: mnn.ExpertMLP(E, D, H, activation="swiglu", bias=False),
    "clamped": lambda: mnn.ExpertMLP(E, D, H, activation="swiglu_clamped"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name, dtype):
    torch.manual_seed(0)
    layer = mnn.MoE(mnn.TopKGate(D, E, 2), EXPERTS[name]()).to(dtype)
    assert rows_that_differ(lambda x: [layer(x).y], inputs(dtype)[0], sizes=FEW) == {}


@pytest.mark.parametrize("search", [False, True])
def test_several_tasks(search):
    gates = [mnn.TreeGate(D, E), mnn.TreeGate(D, E)] if search else [mnn.SoftmaxGate(D, E), mnn.TopKGate(D, E, 2)]
    found = mnn.LocalSearch(E, 50, schedule="wide") if search else None
    layer = mnn.MultiGateMoE(gates, mnn.ExpertLayer(E, D, H), found)

    def call(x):
        if found is not None:
            found.step = 3
        return layer(x).y

    assert rows_that_differ(call, inputs(torch.float32)[0], sizes=FEW) == {}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "tanh"])
def test_comet(activation, dtype):
    model = mnn.CometMLP((D, 40, 30, 7), p=0.3, activation=activation).to(dtype)
    ffn = mnn.CometFFN(D, 64, 0.25, activation=activation).to(dtype)
    assert rows_that_differ(lambda x: [model(x), ffn(x)], inputs(dtype)[0], sizes=FEW) == {}


def test_autocast():
    layer = mnn.MoE(mnn.TopKGate(D, E, 2), mnn.ExpertMLP(E, D, H))
    ffn = mnn.CometFFN(D, 64, 0.25)

    def call(x):
        with torch.autocast("cpu", torch.bfloat16):
            found = [layer(x).y, ffn(x)]
        assert {each.dtype for each in found} == {torch.bfloat16}
        return found

    assert rows_that_differ(call, inputs(torch.float32)[0], sizes=FEW) == {}


def test_leading_dimensions_do_not_matter():
    layer = layer_of("topk")
    x = torch.randn(6, 113, D)
    with mk.batch_invariant(), torch.no_grad():
        assert torch.equal(layer(x).y[2, 5], layer(x[2, 5]).y)
        assert layer(x[:0]).y.shape == (0, 113, D)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", GATES)
def test_close_to_the_layer_outside_the_mode(name, training):
    """Outputs and all gradients, in float64: the mode changes only the order of sums."""
    layer = layer_of(name).double().train(training)

    def results():
        x, ids = inputs(torch.float64)
        leaves = [each for each in (x.requires_grad_(), *layer.parameters()) if each.requires_grad]
        found = [each for each in call_of(layer)(x, ids) if each.requires_grad]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            grads = [torch.randn_like(each) for each in found]
        return found + [
            each for each in torch.autograd.grad(found, leaves, grads, allow_unused=True) if each is not None
        ]

    outside = results()
    with mk.batch_invariant():
        inside = results()
    torch.testing.assert_close(inside, outside, rtol=1e-8, atol=1e-9)


def test_compiled_layer():
    layer = layer_of("topk").eval()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: layer(x).y, backend="aot_eager", fullgraph=True, dynamic=True)
    x = inputs(torch.float32)[0]
    with mk.batch_invariant(), torch.no_grad():
        whole = compiled(x)
        assert torch.equal(whole, layer(x).y)
        assert torch.equal(compiled(x[5:7]), whole[5:7])


def test_recomputation_inside_the_block():
    layer, x = layer_of("topk"), inputs(torch.float32)[0]

    def gradient(part, again):
        leaf = x[part].clone().requires_grad_()
        with mk.batch_invariant():
            function = lambda given: layer(given).y  # noqa: E731
            y = torch.utils.checkpoint.checkpoint(function, leaf, use_reentrant=False) if again else function(leaf)
            y.sum().backward()
        return leaf.grad

    assert torch.equal(gradient(slice(2), True), gradient(slice(None), False)[:2])


def moe(gate=None, policy=None, experts=None, **options):
    return mnn.MoE(gate or mnn.TopKGate(D, E, 2), experts or mnn.ExpertMLP(E, D, H), policy, **options)


def competing():
    experts = mnn.ExpertMLP(E, D, H)
    return moe(mnn.CompetitionGate(mnn.TopKGate(D, E, 2), experts), experts=experts)


SEARCH = {"noise": 0.1, "schedule": "wide"}
RANDOM = {
    "SoftmaxGate: noise": lambda: moe(mnn.SoftmaxGate(D, E, noise=True)),
    "TopKGate: noise='vmoe'": lambda: moe(mnn.TopKGate(D, E, 2, noise="vmoe")),
    "TopKGate: noise='jitter'": lambda: moe(mnn.TopKGate(D, E, 2, noise="jitter")),
    "EnsembleGate: noise": lambda: moe(mnn.EnsembleGate(D, E, 1, members=3, noise=True)),
    "RandomGate: its choice": lambda: moe(mnn.RandomGate(E)),
    "CompetitionGate: training": competing,
    "LocalSearch: noise=0.1": lambda: moe(mnn.PermutedGate(mnn.SoftmaxGate(D, E), mnn.LocalSearch(E, 9, **SEARCH))),
    "MoE: expert_dropout=0.1": lambda: moe(expert_dropout=0.1),
    "ExpertMLP: dropout=0.5": lambda: moe(experts=mnn.ExpertMLP(E, D, H, dropout=0.5)),
    "ExpertLayer: dropout=0.5": lambda: moe(experts=mnn.ExpertLayer(E, D, H, dropout=0.5)),
}


@pytest.mark.parametrize("message", RANDOM)
def test_random_numbers_are_refused_by_name(message):
    layer, (x, ids) = RANDOM[message](), inputs(torch.float32)
    layer(x, ids)
    with mk.batch_invariant():
        with pytest.raises(RuntimeError, match=f"{message}.* draws random numbers"):
            layer(x, ids)
        if "RandomGate" not in message:
            layer.eval()(x, ids)


POLICIES = {
    "TokenChoice: a capacity of 1.25 T K / E": (mnn.TokenChoice(1.25), mnn.TokenChoice(E / 2)),
    "ExpertChoice: an expert's choice": (mnn.ExpertChoice(2.0), mnn.ExpertChoice(float(E))),
    "PriorityRouting: the order": (mnn.PriorityRouting(1.0), mnn.PriorityRouting(float(E))),
}


@pytest.mark.parametrize("message", POLICIES)
def test_policies_that_compare_tokens_are_refused_unless_nothing_can_be_dropped(message):
    refused, allowed = POLICIES[message]
    x = inputs(torch.float32)[0]
    with mk.batch_invariant(), pytest.raises(RuntimeError, match=f"{message}.* compares the tokens of a call"):
        moe(policy=refused)(x)
    layer = moe(policy=allowed)
    assert rows_that_differ(lambda x: [layer(x).y], x, sizes=FEW) == {}
    layer = moe(policy=mnn.TokenChoice(1.25, factor_eval=None, priority="max")).eval()
    assert rows_that_differ(lambda x: [layer(x).y], x, sizes=FEW) == {}


def test_comet_refuses_what_torch_computes():
    for activation in ("softplus", "mish"):
        model = mnn.CometMLP((D, 40, 7), activation=activation)
        message = f"MaskedLinear: the bits of {activation} depend on the batch"
        with mk.batch_invariant(), pytest.raises(RuntimeError, match=message):
            model(inputs(torch.float32)[0])
    ffn = mnn.CometFFN(D, 64, dropout=0.1)
    with mk.batch_invariant(), pytest.raises(RuntimeError, match=r"CometFFN: dropout=0\.1 draws random numbers"):
        ffn(inputs(torch.float32)[0])
