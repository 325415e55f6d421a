"""Recipe movielens: how the networks of COMET trees start."""

from __future__ import annotations

import math

import pytest
import torch

from moe_kernels.papers.recipes import Splits
from moe_kernels.papers.recipes.movielens import MovieLens
from moe_kernels.papers.train.loop import Run
from tests.helpers.small_sets import ratings


def started(side, **changed):
    points = ratings()
    return Run(MovieLens(sides=(side,), experts=16, rows=0, **changed), 0, Splits(points, points.train, points.test))


def is_uniform(values, bound):
    """Whether many values are of U(-bound, bound): none lies outside, the largest is near it, the spread is right."""
    near = values.abs().max().item() == pytest.approx(bound, rel=0.05) and values.abs().max() <= bound
    return near and values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.06)


@pytest.mark.parametrize("side", ["hash", "topk", "softmax", "dselect", "comet"])
def test_by_default_parameters_start_as_in_the_papers_code(side):
    """Keras: Dense and add_weight are Glorot's uniform distribution, with a bias of 0; the trees have their own."""
    run = started(side)
    moe, heads = run.task.model.moe, run.task.model.heads
    assert is_uniform(moe.experts.weight, math.sqrt(6 / (256 + 256)))
    assert moe.experts.bias.eq(0).all()
    for head in heads:
        assert is_uniform(head[0].weight, math.sqrt(6 / (256 + 256)))
        assert head[2].weight.abs().max() <= math.sqrt(6 / (256 + 1))
        assert head[2].weight.abs().max() > 0.9 * math.sqrt(6 / (256 + 1)) > 1 / math.sqrt(256)
        assert head[0].bias.eq(0).all()
        assert head[2].bias.eq(0).all()
    for gate in moe.gates:
        if side in ("topk", "softmax"):
            assert is_uniform(gate.linear.weight, math.sqrt(6 / (256 + 16)))
            assert gate.linear.bias.eq(0).all()
        if side == "dselect":
            assert is_uniform(gate.code.weight, 0.01 / 100)
            assert gate.mix.weight.abs().max() > 1 / math.sqrt(256)
        if side == "comet":
            assert is_uniform(gate.split_weight, 0.01 / 100)
            assert 0 < gate.split_bias.abs().max() <= 0.01 / 100
            assert is_uniform(gate.leaf_weight, 0.05)
    assert is_uniform(run.task.model.users.weight, 0.05)
    assert run.task.optimiser.param_groups[0]["eps"] == 1e-7


def test_the_other_initialisation_is_torchs():
    run = started("comet", init="torch")
    assert is_uniform(run.task.model.heads[0][0].weight, 1 / math.sqrt(256))
    assert is_uniform(run.task.model.moe.experts.bias, 1 / math.sqrt(256))
    assert run.task.model.moe.gates[0].split_bias.eq(0).all()
    assert run.task.optimiser.param_groups[0]["eps"] == 1e-8
    with torch.random.fork_rng(devices=[]):
        assert not torch.equal(run.task.model.heads[0][0].weight, started("comet").task.model.heads[0][0].weight)
