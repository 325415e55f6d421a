"""torch.compile of layers of experts gives the results and gradients of eager mode."""

from __future__ import annotations

import copy

import pytest
import torch

import moe_kernels as mk
from moe_kernels import nn as mnn
from tests.helpers.layers import (
    LAYERS,
    NO_OTHER_TRAINING,
    ON_THE_HOST,
    D,
    E,
    assert_close,
    competing,
    found,
    inputs,
    layer,
)

X, _ = inputs(9)


# Cases (layer, training). test_one_graph_serves_every_number_of_tokens trains the layers outside of ON_THE_HOST.
MODES = [(name, False) for name in LAYERS if name not in NO_OTHER_TRAINING] + [
    (name, True) for name in LAYERS if name in ON_THE_HOST
]


@pytest.mark.parametrize(("name", "training"), MODES)
def test_a_compiled_layer_is_the_layer(name, training):
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = LAYERS[name]().train(training)
    state = copy.deepcopy(made.state_dict())
    expected = found(made, made.parameters())
    made.load_state_dict(state)
    compiled = torch.compile(made, fullgraph=not training, backend="aot_eager")
    assert_close(found(compiled, made.parameters()), expected)


# With dynamic=True torch traces a layer with its floats as symbols, makes them constants after all and traces it again:
# .7 s more. So it does here where floats reach an operator, a loss or a capacity; elsewhere it traces once.
SYMBOLIC_FLOATS = ("topk", "tree", "capacity", "priority")


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ON_THE_HOST])
def test_one_graph_serves_every_number_of_tokens(name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = LAYERS[name]()
    state = copy.deepcopy(made.state_dict())
    compiled = torch.compile(made, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (9, 4, 7):
        expected = found(made, made.parameters(), size)
        made.load_state_dict(state)
        with torch._dynamo.config.patch(specialize_float=name not in SYMBOLIC_FLOATS, error_on_recompile=size != 9):
            assert_close(found(compiled, made.parameters(), size), expected)


def shared():
    gates = [mnn.TreeGate(D, E, 2), mnn.TreeGate(D, E, 2)]
    return mnn.MultiGateMoE(gates, mnn.ExpertLayer(E, D, 3), mnn.LocalSearch(E, 10))


@pytest.mark.parametrize(
    "make",
    [
        lambda: layer(mnn.PermutedGate(mnn.TreeGate(D, E, 2), mnn.LocalSearch(E, 10))),
        lambda: layer(competing(rate=lambda step: 0.5)),
        shared,
    ],
    ids=["permuted", "competition", "shared search"],
)
def test_a_step_of_the_hosts_is_no_graph_of_its_own(make):
    """By default torch compiles a function at most 8 times, fewer than the 14 training steps here."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = make()
    compiled = torch.compile(made, backend="eager")  # Dynamo alone decides when to compile again
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


def test_a_tree_that_may_route_compiles_whole():
    """In eager mode the gate uses tree_route if all trees are saturated; compiled, it uses tree_gate."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    gate = mnn.TreeGate(D, E, 2, route=True).eval()
    gate.split_weight.data.mul_(1e6)  # every tree is saturated
    assert not gate(X).dense
    compiled = torch.compile(gate, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X).gates, gate(X).gates)
