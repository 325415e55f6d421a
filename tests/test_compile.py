"""torch.compile of layers of experts: the results and gradients of eager mode, one graph where nothing waits for the
host, and no new graph for every step where something does."""

from __future__ import annotations

import copy

import pytest
import torch

import moe_kernels as mk
from moe_kernels import nn as mnn

D, E, IDS = 6, 4, 12
X, TOKENS = torch.randn(9, D, generator=torch.Generator().manual_seed(0)), torch.arange(9) % IDS


def layer(gate, policy=None):
    return mnn.MoE(gate, mnn.ExpertMLP(gate.num_experts, D, 3), policy)


def competing(**options):
    experts = mnn.ExpertMLP(E, D, 3)
    return mnn.MoE(mnn.CompetitionGate(mnn.TopKGate(D, E, 2), experts, **options), experts)


LAYERS = {
    "softmax": lambda: layer(mnn.SoftmaxGate(D, E, noise=True, importance=0.1)),
    "topk": lambda: layer(mnn.TopKGate(D, E, 2, noise="jitter", balance=0.1, z=0.1)),
    "vmoe": lambda: layer(mnn.TopKGate(D, E, 2, order="softmax_topk", noise="vmoe", load=0.1)),
    "tree": lambda: layer(mnn.TreeGate(D, E, 2, entropy=0.1)),
    "dselect": lambda: layer(mnn.DSelectKGate(D, 3, 2, entropy=0.1)),
    "hash": lambda: layer(mnn.HashGate(IDS, E)),
    "random": lambda: layer(mnn.RandomGate(E)),
    "xmoe": lambda: layer(mnn.XMoEGate(D, E, 2)),
    "hyper": lambda: layer(mnn.HyperRouterGate(D, E, 2, hidden=8)),
    "stable": lambda: layer(mnn.StableGate(D, E, IDS)),
    "staged": lambda: layer(mnn.StagedGate(mnn.SoftmaxGate(D, E), mnn.TopKGate(D, E, 1))),
    "capacity": lambda: layer(mnn.TopKGate(D, E, 2), mnn.TokenChoice(1.05, priority="max", multiple_of=4, group=4)),
    "expert choice": lambda: layer(mnn.SoftmaxGate(D, E), mnn.ExpertChoice(1.5)),
    "priority": lambda: layer(mnn.SoftmaxGate(D, E), mnn.PriorityRouting()),
    "nonzero": lambda: layer(mnn.TreeGate(D, E, 2), mnn.NonzeroWeights()),
    "permuted": lambda: layer(mnn.PermutedGate(mnn.TreeGate(D, E, 2), mnn.LocalSearch(E, 5))),
    "competition": competing,
}
ON_THE_HOST = ("permuted", "competition")  # in training


def found(call, made, size=9):
    """y, the loss and the gradients of the layer `made`, called as `call` on so many tokens."""
    torch.manual_seed(1)
    x = X[:size].clone().requires_grad_()
    out = call(x, TOKENS[:size])
    parameters = [each for each in made.parameters() if each.requires_grad]
    loss = out.y.square().sum() + out.loss
    gradients = torch.autograd.grad(loss, [x, *parameters], allow_unused=True)
    return [out.y.detach(), loss.detach(), *(each for each in gradients if each is not None)]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_compiled_layer_is_the_layer(name, training):
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = LAYERS[name]().train(training)
    state = copy.deepcopy(made.state_dict())
    expected = found(made, made)
    made.load_state_dict(state)
    whole = not (training and name in ON_THE_HOST)
    got = found(torch.compile(made, fullgraph=whole, backend="aot_eager"), made)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ON_THE_HOST])
def test_one_graph_serves_every_number_of_tokens(name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = LAYERS[name]()
    state = copy.deepcopy(made.state_dict())
    compiled = torch.compile(made, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (9, 4, 7):
        expected = found(made, made, size)
        made.load_state_dict(state)
        for a, b in zip(found(compiled, made, size), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def shared():
    gates = [mnn.TreeGate(D, E, 2), mnn.TreeGate(D, E, 2)]
    return mnn.MultiGateMoE(gates, mnn.ExpertLayer(E, D, 3), mnn.LocalSearch(E, 10))


@pytest.mark.parametrize(
    "make",
    [
        lambda: layer(mnn.PermutedGate(mnn.TreeGate(D, E, 2), mnn.LocalSearch(E, 10))),
        lambda: competing(rate=lambda step: 0.5),
        shared,
    ],
    ids=["permuted", "competition", "shared search"],
)
def test_a_step_of_the_hosts_is_no_graph_of_its_own(make):
    """torch compiles no frame that differs from step to step for long: it leaves the layer to eager mode."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = make()
    compiled = torch.compile(made, backend="aot_eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for _ in range(14):
            compiled(X)
        made.eval()
        compiled(X)


def test_capacities_are_reckoned_in_the_graph():
    def offsets(x):
        capacity = mk.expert_capacity(x.shape[0], 2, 4, 1.25)
        return mk.make_plan(mk.topk_gate(x, 2)[1], 4, capacity=capacity).expert_offsets

    compiled = torch.compile(offsets, fullgraph=True, backend="aot_eager")
    for tokens in (9, 12, 40):
        x = torch.randn(tokens, 4)
        assert torch.equal(compiled(x), offsets(x))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, backend: mk.topk_gate(x, 2, backend=backend)[0],
        lambda x, backend: mk.topk_gate(x, 2, order="softmax_topk", backend=backend)[0],
        lambda x, backend: mk.sinkhorn(x, 20, backend=backend),
        lambda x, backend: mk.sinkhorn(x, 20, gradient="implicit", backend=backend),
        lambda x, backend: mk.kwta(x, 2, backend=backend),
        lambda x, backend: mk.expert_norms(x, x.detach()[None], x.detach()[None], backend=backend),
    ],
    ids=["topk_softmax", "softmax_topk", "sinkhorn", "implicit sinkhorn", "kwta", "expert_norms"],
)
def test_outputs_have_their_gradient_compiled(call, backend):
    """torch 2.11's compiler gave a gate none whose forward ended in a conversion to the dtype that it had."""
    torch._dynamo.reset()
    x, compiled = torch.randn(4, 4, requires_grad=True), torch.compile(call, backend="aot_eager")
    weight = torch.randn(call(x, backend).shape)
    expected, got = (torch.autograd.grad((each(x, backend) * weight).sum(), x)[0] for each in (call, compiled))
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_tree_that_may_route_compiles_whole():
    """The host decides whether it routes; a compiled graph takes the dense gate, which is the same."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    gate = mnn.TreeGate(D, E, 2, route=True).eval()
    gate.split_weight.data.mul_(1e6)  # every tree is saturated
    assert not gate(X).dense
    compiled = torch.compile(gate, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X).gates, gate(X).gates)
