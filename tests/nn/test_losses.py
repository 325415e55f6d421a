"""Tests of the losses in nn.losses."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from torch.utils._pytree import tree_map_only

import moe_kernels as mk
from moe_kernels import nn
from moe_kernels.nn.losses import balance_loss, cv_squared, importance_loss, load_loss, router_z_loss


def test_cv_squared():
    assert cv_squared(torch.tensor([1.0, 3.0])) == 0.25  # population variance 1, mean 2
    assert cv_squared(torch.ones(5)) == 0
    assert cv_squared(torch.tensor([0.0, 0, 0, 8])) == 3


def test_importance_is_of_column_sums():
    assert importance_loss(torch.tensor([[0.9, 0.1], [0.1, 0.9]])) == pytest.approx(0, abs=1e-6)
    assert importance_loss(torch.tensor([[1.0, 0.0], [0.5, 0.5]])) == 0.25


def test_load_is_the_probability_of_being_chosen():
    logits, noisy, sigma = [[1.0, 0.5, -0.2], [0.3, 0.1, 0.2]], [[0.9, 0.8, -0.1], [0.0, 0.4, 0.3]], 1 / 3
    threshold = [0.8, 0.3]  # the second largest of each row of `noisy`
    chance = [[1 - NormalDist().cdf((t - z) / sigma) for z in row] for t, row in zip(threshold, logits, strict=True)]
    load = [(a + b) / 2 for a, b in zip(*chance, strict=True)]
    mean = sum(load) / 3
    expected = sum((v - mean) ** 2 for v in load) / 3 / mean**2
    assert load_loss(torch.tensor(logits), torch.tensor(noisy), 2, sigma).item() == pytest.approx(expected, rel=1e-5)
    for k, std in ((0, 1.0), (4, 1.0), (2, 0.0), (2, math.nan)):
        with pytest.raises(ValueError, match="load_loss"):
            load_loss(torch.tensor(logits), torch.tensor(noisy), k, std)


def test_balance_is_switch_and_gshard():
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.8, 0.1], [0.5, 0.3, 0.2]])
    requested = mk.make_plan(probs.argmax(1, keepdim=True), 3).requested
    share, mean = torch.tensor([0.75, 0.25, 0.0]), probs.mean(0)
    switch, gshard = 3 * (share * mean).sum(), 9 * (share * mean).mean()
    torch.testing.assert_close(balance_loss(probs, requested), switch)
    torch.testing.assert_close(balance_loss(probs, requested), gshard)
    assert balance_loss(torch.full((4, 4), 0.25), torch.ones(4, dtype=torch.int32)) == 1
    assert balance_loss(torch.eye(4)[[2, 2]], torch.tensor([0, 0, 9, 0])) == 4
    assert balance_loss(probs, torch.zeros(3, dtype=torch.int32)) == 0


def test_half_precision_is_summed_in_float32():
    draws = torch.Generator().manual_seed(0)
    probs, logits, noisy = (torch.randn(500, 4, generator=draws).bfloat16() for _ in range(3))
    probs, experts = probs.softmax(-1), torch.randint(4, (500, 2), generator=draws)
    images = probs.view(10, 50, 4)
    calls = {
        importance_loss: (probs,),
        load_loss: (logits, noisy, 2, 0.25),
        balance_loss: (probs, torch.tensor([3, 2, 1, 0])),
        router_z_loss: (logits,),
        nn.inverse_cv: (probs,),
        nn.batch_inverse_cv: (images,),
        nn.batch_variation: (images,),
        nn.competition_loss: ((probs[:, :2], experts), (logits[:, :2], experts.flip(0)), 4),
        nn.symmetric_kl: (logits, noisy),
        nn.tree_entropy: (images,),
    }
    for loss, given in calls.items():
        wide = tree_map_only(torch.Tensor, lambda x: x.float() if x.is_floating_point() else x, given)
        torch.testing.assert_close(loss(*given), loss(*wide), rtol=1e-6, atol=0, msg=loss.__name__)
    torch.testing.assert_close(importance_loss(probs), importance_loss(probs.double()).float(), rtol=1e-3, atol=1e-9)


def test_an_expert_that_no_image_uses_does_not_vary():
    images = torch.tensor([[[2.0, 0.0]], [[4.0, 0.0]]])
    assert nn.batch_variation(images).item() == pytest.approx(1 / 3 / 2)  # expert 0: variance 1, mean 3; expert 1: 0
    assert nn.batch_variation(images, eps=1.0).item() == pytest.approx(1 / 4 / 2)


def test_gradients_in_float64():
    logits = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    noisy = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: importance_loss(z.softmax(-1)), (logits,))
    assert torch.autograd.gradcheck(lambda z, n: load_loss(z, n, 2, 0.25), (logits, noisy))
    assert torch.autograd.gradcheck(lambda z: balance_loss(z.softmax(-1), torch.tensor([3, 2, 1, 0])), (logits,))
    assert torch.autograd.gradcheck(router_z_loss, (logits,))


def test_nothing_costs_nothing():
    """Losses of empty batches are 0. cv_squared of zeros is 0 with gradient 0."""
    empty, none = torch.empty(0, 4), torch.empty(0, 2, dtype=torch.int32)
    routed = (empty[:, :2], none)
    for loss in (
        cv_squared(torch.zeros(4)),
        importance_loss(empty),
        load_loss(empty, empty, 2, 0.25),
        balance_loss(empty, torch.zeros(4)),
        router_z_loss(empty),
        nn.inverse_cv(empty),
        nn.batch_inverse_cv(torch.empty(0, 3, 4)),
        nn.batch_variation(torch.empty(0, 3, 4)),
        nn.competition_loss(routed, routed, 4),
        nn.symmetric_kl(empty, empty),
        nn.tree_entropy(torch.empty(0, 2, 4)),
    ):
        assert loss.shape == ()
        assert loss == 0
    v = torch.zeros(4, requires_grad=True)
    cv_squared(v).backward()
    assert (v.grad == 0).all()


def test_one_sample_does_not_vary():
    images = torch.rand(1, 2, 3)
    assert nn.batch_variation(images) == 0
    assert nn.batch_inverse_cv(images).item() == pytest.approx(images.sum().item() / 3 / 0.01)


def test_the_divergence_is_the_mean_over_all_positions():
    logits, others = torch.randn(2, 4, 3, 5)
    flat = nn.symmetric_kl(logits.flatten(0, 1), others.flatten(0, 1))
    torch.testing.assert_close(nn.symmetric_kl(logits, others), flat)


def test_variation_does_not_depend_on_the_unit():
    assert cv_squared(torch.tensor([3e-8, 0.0, 0.0])).item() == pytest.approx(2)
