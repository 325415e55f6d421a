"""MoEBERT's split of a layer into experts: importance of neurons, neurons and outputs of an expert, distillation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moe_kernels.nn.split import NeuronImportance, distillation_loss, split_ffn, split_neurons
from moe_kernels.ops.plan import make_plan


@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 3, 2)], ids=str)
def test_importance_is_of_per_sample_gradients(shape):
    torch.manual_seed(0)
    fc1, fc2 = nn.Linear(4, 7).double(), nn.Linear(7, 4).double()
    batches = [torch.randn(*shape, 4, dtype=torch.float64) for _ in range(2)]

    def losses(x):
        return fc2(F.gelu(fc1(x))).square().flatten(1).sum(1)

    with NeuronImportance(fc1, fc2) as importance:
        for x in batches:
            losses(x.requires_grad_()).sum().backward()
            with torch.no_grad():
                losses(x)  # an evaluation between batches must not count

    expected = torch.zeros(7, dtype=torch.float64)
    for x in batches:
        for loss in losses(x):
            g1, g2 = torch.autograd.grad(loss, [fc1.weight, fc2.weight], retain_graph=True)
            expected += ((fc1.weight * g1).sum(1) + (fc2.weight * g2).sum(0)).abs().detach()
    torch.testing.assert_close(importance.value, expected)
    losses(batches[0]).sum().backward()
    torch.testing.assert_close(importance.value, expected)  # batches outside the block do not count


def test_importance_without_gradients_is_an_error():
    """With fc1 frozen and an input without a gradient, the importance would stay 0."""
    fc1, fc2 = nn.Linear(4, 7).requires_grad_(False), nn.Linear(7, 4)
    with NeuronImportance(fc1, fc2), pytest.raises(ValueError, match=r"fc1's output .* must require gradients"):
        fc2(fc1(torch.randn(3, 4)).relu())


@pytest.mark.parametrize("features", [6, 8])
def test_importance_is_of_two_layers_that_follow_each_other(features):
    assert NeuronImportance(nn.Linear(4, 7), nn.Linear(7, 4)).value.tolist() == [0] * 7
    message = rf"^NeuronImportance: fc2 must take the 7 features of fc1, got {features}$"
    with pytest.raises(ValueError, match=message):
        NeuronImportance(nn.Linear(4, 7), nn.Linear(features, 4))


def test_neurons_by_hand():
    importance = torch.tensor([1.0, 9, 3, 7, 5, 2, 8])  # neurons by falling importance: 1 6 3 4 2 5 0
    assert [each.tolist() for each in split_neurons(importance, 2, 4, 2)] == [[1, 6, 3, 2], [1, 6, 4, 5]]
    assert [each.tolist() for each in split_neurons(importance, 2, 5, 2)] == [[1, 6, 3, 2, 0], [1, 6, 4, 5]]
    with pytest.raises(ValueError, match="split_neurons: share"):
        split_neurons(importance, 2, 4, 5)


@pytest.mark.parametrize(("inner", "outer"), [(True, True), (True, False), (False, True)])
def test_an_expert_is_its_neurons(inner, outer):
    """inner, outer: whether the layers have a bias."""
    torch.manual_seed(0)
    fc1, fc2, x = nn.Linear(4, 7, bias=inner), nn.Linear(7, 4, bias=outer), torch.randn(6, 4)
    importance = torch.rand(7)
    experts = split_ffn(fc1, fc2, importance, 2, 5, 2, "gelu")
    for e, neurons in enumerate(split_neurons(importance, 2, 5, 2)):
        hidden = F.gelu(F.linear(x, fc1.weight[neurons], fc1.bias[neurons] if inner else None))
        expected = F.linear(hidden, fc2.weight[:, neurons], fc2.bias)
        found = experts(x, make_plan(torch.full((6, 1), e), 2), None)
        torch.testing.assert_close(found, expected)
    whole = split_ffn(fc1, fc2, importance, 3, 7, 7, "relu")  # every expert has all neurons
    torch.testing.assert_close(whole(x, make_plan(torch.full((6, 1), 2), 3), None), fc2(F.relu(fc1(x))))


def test_only_activations_that_keep_zero_are_split():
    fc1, fc2, importance = nn.Linear(4, 7), nn.Linear(7, 4), torch.rand(7)
    for activation in ("relu", "gelu", "silu", "tanh"):
        assert split_ffn(fc1, fc2, importance, 2, 5, 2, activation).activation == activation
    for activation in ("swiglu", "sigmoid"):
        message = rf"^split_ffn: activation must be relu, gelu, silu or tanh; got '{activation}'$"
        with pytest.raises(ValueError, match=message):
            split_ffn(fc1, fc2, importance, 2, 5, 2, activation)


def test_distillation():
    a, b = torch.zeros(2, 3), torch.ones(2, 3)
    p, q = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    kl = 0.5 * ((p.exp() - q.exp()) * (p - q)).sum()
    assert distillation_loss([a, a], [b, a], p, q).item() == pytest.approx(1 + kl.item())
    student, teacher = a.clone().requires_grad_(), b.clone().requires_grad_()
    logits, of_teacher = p.clone().requires_grad_(), q.clone().requires_grad_()
    distillation_loss([student], [teacher], logits, of_teacher).backward()
    assert student.grad.any()
    assert logits.grad.any()
    assert (teacher.grad, of_teacher.grad) == (None, None)
    with pytest.raises(ValueError, match="distillation_loss: expected 2"):
        distillation_loss([a], [b, a], p, q)
