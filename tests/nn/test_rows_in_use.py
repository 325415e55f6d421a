"""Dense to sparse training: layers whose gates end with few weights compute for these alone."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import moe_kernels as mk
from moe_kernels import nn as mnn
from moe_kernels.nn import moe, policies

T, D, H, E = 24, 6, 5, 16


def saturated(trees=2):
    """A tree gate whose trees give every token one expert, but for a few tokens."""
    gate = mnn.TreeGate(D, E, trees, gamma=0.05)
    with torch.no_grad():
        gate.split_weight.normal_()
    return gate


def layers():
    torch.manual_seed(0)
    gates, experts = [saturated(2), saturated(1)], mnn.ExpertLayer(E, D, H, dropout=0.5)
    return {
        "tasks": mnn.MultiGateMoE(gates, experts),
        "search": mnn.MultiGateMoE(gates, experts, mnn.LocalSearch(E, 5)),
        "policy": mnn.MoE(saturated(), mnn.ExpertMLP(E, D, H), mnn.NonzeroWeights()),
        "rows": mnn.MoE(saturated(), experts, mnn.NonzeroWeights()),
    }


def whole_plans(monkeypatch):
    """Plans keep their T K rows, as on a GPU and in graphs."""
    for module in (moe, policies):
        monkeypatch.setattr(module, "rows_in_use", lambda plan: plan)


def step(layer, x, **named):
    x = x.clone().requires_grad_()
    out = layer(x, **named)
    ys = out.y if isinstance(out.y, tuple) else (out.y,)
    grads = torch.autograd.grad(sum(y.square().sum() for y in ys), [x, *layer.parameters()], allow_unused=True)
    return out, [*ys, *(each for each in grads if each is not None)]


class Longest(TorchDispatchMode):
    """The most rows of a matrix that any operation of the block returned."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        lengths = [each.shape[0] for each in tree_leaves(found) if isinstance(each, torch.Tensor) and each.dim() == 2]
        self.rows = max(self.rows, *lengths, 0)
        return found


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["tasks", "rows"])
def test_no_operation_of_a_step_runs_over_rows_not_in_use(name, backend):
    layer, x = layers()[name], torch.randn(T, D)
    with mk.use_backend(backend), Longest() as longest:
        out, _ = step(layer, x)
    used = sum((torch.stack([each.gates for each in out.gates]) != 0).any(0).sum(1).tolist())
    assert out.plan.num_rows == used == out.plan.kept.sum()
    assert T < used < T * E // 4
    assert longest.rows == used + (backend == "reference")  # the definition appends a row of zeros


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["tasks", "policy", "rows"])
def test_results_have_the_bits_of_those_with_all_rows(name, masked, monkeypatch):
    layer, x, mask = layers()[name].eval(), torch.randn(T, D), torch.rand(T) < 0.7
    named = {"mask": mask} if masked else {}
    out, found = step(layer, x, **named)
    whole_plans(monkeypatch)
    whole, expected = step(layer, x, **named)
    assert whole.plan.num_rows == T * E > out.plan.num_rows
    assert torch.equal(whole.plan.slot_row, out.plan.slot_row)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    for key, value in out.statistics.items():
        assert torch.equal(value, whole.statistics[key]), key


def test_a_search_that_mixes_experts_runs_them_too():
    out, _ = step(layers()["search"], torch.randn(T, D))
    mixed = torch.stack([out.statistics[f"task{index}.gates"] for index in range(2)])
    assert out.plan.num_rows == (mixed != 0).any(0).sum() > 2 * (out.gates[0].gates != 0).sum()


@pytest.mark.parametrize("name", ["tasks", "policy", "rows"])
@pytest.mark.parametrize("tokens", [0, T])
def test_a_step_may_use_no_row(name, tokens):
    layer, x = layers()[name], torch.randn(tokens, D)
    out, (*_, grad) = step(layer, x, mask=torch.zeros(tokens, dtype=torch.bool))
    assert out.plan.num_rows == 0
    assert not any(y.any() for y in (out.y if isinstance(out.y, tuple) else (out.y,)))
    assert not grad.any()


@pytest.mark.parametrize("name", ["tasks", "policy"])
def test_the_mode_of_fixed_bits_holds_with_any_number_of_rows(name):
    layer, x = layers()[name].eval(), torch.randn(T, D)
    with mk.batch_invariant():
        (*ys, grad), (*few, few_grad) = (step(layer, each)[1][: 3 if name == "tasks" else 2] for each in (x, x[:3]))
    assert all(torch.equal(y[:3], some) for y, some in zip(ys, few, strict=True))
    assert torch.equal(grad[:3], few_grad)


@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean", "ignore:`torch.jit.trace")
@pytest.mark.parametrize(
    ("how", "name"), [("jit", "tasks"), *itertools.product(["make_fx", "export", "meta"], ["tasks", "policy"])]
)
def test_graphs_keep_a_row_for_every_choice(how, name):
    """With the values of one batch, a graph would be wrong for all others."""
    layer = layers()[name].eval().requires_grad_(False)
    x, other = torch.randn(T, D), torch.randn(T, D)
    if how == "meta":
        assert copy.deepcopy(layer).to("meta")(x.to("meta")).plan.num_rows == T * E
        return

    class Outputs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            out = self.layer(x)
            return torch.stack(out.y) if isinstance(out.y, tuple) else out.y

    if how == "make_fx":
        graph = make_fx(Outputs())(x)
    elif how == "jit":
        graph = torch.jit.trace(Outputs(), (x,), check_trace=False)
    else:
        graph = torch.export.export(Outputs(), (x,), strict=False).module()
    torch.testing.assert_close(graph(other), Outputs()(other))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_repeats_the_rows(reentrant):
    layer, x = layers()["tasks"].eval(), torch.randn(T, D)
    grads = []
    for how in (lambda run, x: run(x), torch.utils.checkpoint.checkpoint):
        leaf = x.clone().requires_grad_()
        options = {} if not grads else {"use_reentrant": reentrant}
        how(lambda x: torch.cat(layer(x).y), leaf, **options).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_training_goes_on_from_many_experts_to_few():
    """As the trees saturate from step to step, R falls."""
    torch.manual_seed(0)
    layer, x = mnn.MultiGateMoE([saturated()], mnn.ExpertLayer(E, D, H)), torch.randn(T, D)
    start, rows = layer.gates[0].split_weight.detach().clone(), []
    for scale in (1e-3, 3e-2, 1.0, 1e3):
        with torch.no_grad():
            layer.gates[0].split_weight.copy_(scale * start)
        out, _ = step(layer, x)
        rows.append(out.plan.num_rows)
        torch.testing.assert_close(out.y[0], dense(layer, out, x))
    assert rows[0] == T * E
    assert all(before > after for before, after in itertools.pairwise(rows))
    assert rows[-1] <= 2 * T


def dense(layer, out, x):
    every = torch.einsum("td,edh->teh", x, layer.experts.weight) + layer.experts.bias
    return (out.gates[0].gates[..., None] * every.relu()).sum(1)
