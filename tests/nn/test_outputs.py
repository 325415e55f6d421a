"""Tests of the outputs of layers and gates."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import moe_kernels as mk
from moe_kernels import nn as mnn

T, D, H, E = 12, 6, 5, 4


def layer(**options):
    torch.manual_seed(0)
    return mnn.MoE(mnn.TopKGate(D, E, 2, balance=0.1), mnn.ExpertMLP(E, D, H), **options)


def tasks():
    torch.manual_seed(0)
    return mnn.MultiGateMoE([mnn.SoftmaxGate(D, E), mnn.TreeGate(D, E, entropy=0.1)], mnn.ExpertLayer(E, D, H))


@pytest.mark.parametrize("make", [layer, tasks, lambda: mnn.TreeGate(D, E)], ids=["layer", "tasks", "gate"])
def test_outputs_are_pytrees(make):
    output = make()(torch.randn(T, D))
    doubled = pytree.tree_map(lambda each: each * 2 if isinstance(each, torch.Tensor) else each, output)
    assert type(doubled) is type(output)
    first = (lambda each: each.y) if hasattr(output, "y") else (lambda each: each.weights)
    for got, want in zip(pytree.tree_leaves(first(doubled)), pytree.tree_leaves(first(output)), strict=True):
        torch.testing.assert_close(got, 2 * want)
    torch.testing.assert_close(doubled.loss, 2 * output.loss)
    paths, structure = pytree.tree_flatten_with_path(output)
    assert pytree.keystr(paths[0][0]).startswith(".y" if hasattr(output, "y") else ".weights")
    again = pytree.tree_unflatten([leaf for _, leaf in paths], structure)
    assert pytree.tree_structure(again) == structure == pytree.treespec_loads(pytree.treespec_dumps(structure))
    assert again.statistics.keys() == output.statistics.keys()


class Names(TorchDispatchMode):
    """Records the names of torch's operations inside the block."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_statistics_are_computed_when_they_are_read():
    made, x = mnn.MoE(mnn.TreeGate(D, E), mnn.ExpertMLP(E, D, H)).eval(), torch.randn(T, D)
    with torch.no_grad(), Names() as forward:
        output = made(x)
    assert not any(name.startswith(("aten.sum", "aten.mean", "aten.ge", "aten.div")) for name in forward.names)
    with Names() as read:
        found = output.statistics
    assert any(name.startswith("aten.sum") for name in read.names)
    assert found.keys() == {"experts_per_sample", "experts_per_token", "load", "dropped"}
    assert found["experts_per_token"] == E
    torch.testing.assert_close(found["load"], output.plan.kept / T)


def test_a_tensor_in_a_sequential():
    model = torch.nn.Sequential(torch.nn.Linear(D, D), layer(output="tensor"), torch.nn.ReLU(), layer(output="tensor"))
    x = torch.randn(T, D)
    with mnn.collect_outputs() as outputs:
        y = model(x)
    assert [type(each) for each in outputs] == [mnn.MoEOutput] * 2
    full = layer()
    hidden = full(model[0](x))
    torch.testing.assert_close(model[1](model[0](x)), hidden.y)
    torch.testing.assert_close(outputs.loss, hidden.loss + full(hidden.y.relu()).loss)
    (y.sum() + outputs.loss).backward()
    assert all(each.grad is not None for each in model.parameters())
    assert len(outputs) == 2  # outside the block nothing is collected
    with pytest.raises(ValueError, match="MoE: output must be one of 'all', 'tensor'; got 'y'"):
        layer(output="y")


def test_blocks_that_collect_may_be_nested():
    made, x = layer(output="tensor"), torch.randn(T, D)
    with mnn.collect_outputs() as outer:
        made(x)
        with mnn.collect_outputs() as inner:
            made(x)
        assert (len(outer), len(inner)) == (1, 1)
        made(x)
    assert (len(outer), len(inner)) == (2, 1)
    with torch.no_grad(), mnn.collect_outputs() as outputs:
        made(x)
    assert float(outputs.loss) > 0


@pytest.mark.slow
def test_layers_that_collect_compile_whole():
    torch._dynamo.reset()
    model, x = torch.nn.Sequential(layer(output="tensor"), layer(output="tensor")), torch.randn(T, D)

    def loss(x):
        with mnn.collect_outputs() as outputs:
            y = model(x)
        return y.square().sum() + outputs.loss

    def around(x):
        with mnn.collect_outputs() as outputs:
            y = inner(x)
        assert len(outputs) == 2
        return y.square().sum() + outputs.loss

    compiled, inner = (torch.compile(each, fullgraph=True, backend="aot_eager") for each in (loss, model))
    parameters = list(model.parameters())
    expected = torch.autograd.grad(loss(x), parameters)
    for each in (compiled, around, around):
        torch.testing.assert_close(torch.autograd.grad(each(x), parameters), expected)
    torch.testing.assert_close(inner(x), model(x))


@pytest.mark.parametrize("again", [False, True], ids=["once", "recomputed"])
def test_losses_are_collected_once_under_checkpointing(again):
    made, x = layer(output="tensor"), torch.randn(T, D)
    with mnn.collect_outputs() as outputs:
        y = checkpoint(made, x, use_reentrant=False) if again else made(x)
        loss = y.square().sum() + outputs.loss
        loss.backward()
    assert len(outputs) == 1
    plain = layer()
    output = plain(x)
    (output.y.square().sum() + output.loss).backward()
    for got, want in zip(made.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


@pytest.mark.parametrize("make", [layer, tasks], ids=["layer", "tasks"])
def test_a_reentrant_checkpoint_of_a_layer_is_refused(make):
    """torch would return outputs without gradients; with a residual around the layer no error would show this."""
    made, x = make(), torch.randn(T, D, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"MoE: torch.utils.checkpoint\(use_reentrant=True\) gives gradients to"):
        checkpoint(made, x, use_reentrant=True)
    with torch.no_grad():
        made(x)  # without gradients the call is allowed


def test_a_reentrant_checkpoint_of_a_tensor_is_right():
    made, x = layer(output="tensor"), torch.randn(T, D, requires_grad=True)
    plain = layer()

    def block(x):
        return x + plain(x).y

    expected = torch.autograd.grad(block(x).square().sum(), [x, *plain.parameters()])
    calls = {
        plain: lambda: checkpoint(block, x, use_reentrant=True),
        made: lambda: x + checkpoint(made, x, use_reentrant=True),
    }
    for used, call in calls.items():
        x.grad = None
        used.zero_grad()
        call().square().sum().backward()
        for got, want in zip([x, *used.parameters()], expected, strict=True):
            torch.testing.assert_close(got.grad, want)
    with (
        mnn.collect_outputs(),
        pytest.raises(RuntimeError, match="collect_outputs: a layer with losses ran with gradients disabled"),
    ):
        checkpoint(made, x, use_reentrant=True)


@pytest.mark.parametrize("make", [layer, tasks], ids=["layer", "tasks"])
def test_full_backward_hooks_fire(make):
    made, x = make(), torch.randn(T, D, requires_grad=True)
    plain = made(x)
    loss = sum(y.square().sum() for y in pytree.tree_leaves(plain.y))
    expected = torch.autograd.grad(loss, [x, *made.parameters()], allow_unused=True)
    seen, before = [], []
    handle = made.register_full_backward_hook(lambda module, inputs, outputs: seen.append((module, inputs, outputs)))
    first = made.register_full_backward_pre_hook(lambda module, outputs: before.append(outputs))
    output = made(x)
    sum(y.square().sum() for y in pytree.tree_leaves(output.y)).backward()
    ((module, inputs, outputs),) = seen
    assert module is made
    torch.testing.assert_close(inputs[0], expected[0])
    torch.testing.assert_close(outputs[0], 2 * pytree.tree_leaves(plain.y)[0])
    torch.testing.assert_close(before[0][0], outputs[0])
    for parameter, want in zip(made.parameters(), expected[1:], strict=True):
        if want is not None:
            torch.testing.assert_close(parameter.grad, want)
    handle.remove()
    first.remove()
    made(x)
    assert len(seen) == len(before) == 1
    assert not made._forward_hooks
    assert not made._forward_pre_hooks


def test_full_backward_pre_hooks_fire_in_their_order():
    made, fired = layer(), []
    for number, options in ((1, {"prepend": False}), (2, {}), (0, {"prepend": True})):
        made.register_full_backward_pre_hook(lambda *_, number=number: fired.append(number), **options)
    made(torch.randn(T, D)).y.sum().backward()
    assert fired == [0, 1, 2]


def test_full_backward_hooks_leave_a_forward_without_gradients_alone():
    made, x, fired = layer(), torch.randn(T, D), []
    made.register_full_backward_hook(lambda *_: fired.append("hook"))
    made.register_full_backward_pre_hook(lambda *_: fired.append("pre-hook"))
    with torch.no_grad():
        first = made(x)
    made.requires_grad_(False)
    assert torch.equal(first.y, made(x).y)
    assert not first.y.requires_grad
    assert not fired


def test_a_plan_is_a_pytree_with_paths():
    plan = mk.make_plan(torch.tensor([[0, 1], [1, 0]]), 2)
    again = pytree.tree_map_with_path(lambda path, leaf: leaf, plan)
    assert torch.equal(again.slot_row, plan.slot_row)


def test_a_block_that_fails_collects_no_more():
    made = layer(output="tensor")
    with pytest.raises(KeyError), mnn.collect_outputs() as outputs:
        raise KeyError
    made(torch.randn(T, D))
    assert not outputs


def test_a_recomputed_forward_inside_the_block_is_not_collected_again():
    made, x = layer(output="tensor"), torch.randn(T, D)
    with mnn.collect_outputs() as outputs, set_checkpoint_early_stop(False):  # recompute the whole forward
        checkpoint(made, x, use_reentrant=False).sum().backward()
    assert len(outputs) == 1


def test_full_backward_hooks_see_the_gradients_of_hooks_before_them():
    """As with torch's modules."""
    seen, plain = [], torch.nn.Sequential(layer(output="tensor"))
    for made in (layer(), plain):
        found, x = [], torch.randn(T, D, generator=torch.Generator().manual_seed(1), requires_grad=True)
        for number, options in ((1, {}), (2, {"prepend": False}), (0, {"prepend": True}), (3, {})):

            def scale(module, inputs, outputs, number=number, found=found):
                found.append((number, inputs[0].clone()))
                return (inputs[0] * (number + 2),)

            made.register_full_backward_hook(scale, **options)
        y = made(x)
        (y if isinstance(y, torch.Tensor) else y.y).square().sum().backward()
        seen.append([*found, ("x", x.grad)])
    for (number, gradient), (expected, other) in zip(*seen, strict=True):
        assert number == expected
        torch.testing.assert_close(gradient, other)
