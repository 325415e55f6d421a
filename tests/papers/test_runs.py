"""A run: its batches, its random numbers, which row it reports, when it stops, and its state."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from moe_kernels.papers.recipes import Splits, comet, vmoe
from moe_kernels.papers.train import loop
from moe_kernels.papers.train.loop import Random, Run, SeededDraw
from moe_kernels.papers.train.trained import Trained, chosen_state
from tests.helpers.small_sets import blobs, images


def make(seed=0, valid=False, **changed):
    points = blobs()
    recipe = comet.Comet(**{"sides": ("standard",), "width": (8,), "batch_size": 20, "epochs": 2} | changed)
    return Run(recipe, seed, Splits(points, points.train, points.test, points.test if valid else None))


def vit(seed=0, side="vmoe", **changed):
    points = images()
    small = {"patch": 4, "dim": 8, "depth": 2, "heads": 2, "hidden": 8, "experts": 4, "batch_size": 8, "lr": 0.01}
    recipe = vmoe.VMoE(sides=(side,), steps=4, **small | changed)
    return Run(recipe, seed, Splits(points, points.train, points.test))


@pytest.mark.parametrize("seed", [0, 3, 2**31 - 2])
def test_the_batches_of_an_epoch_are_blocks_of_its_permutation(seed):
    run = make(seed)
    for epoch in (0, 1, 5):
        order = torch.randperm(48, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        for block, rows in enumerate(order.split(20)):
            found = run.batch(3 * epoch + block)
            assert torch.equal(found.rows, rows)
            assert found.start is None
            for part, whole in zip(found.tensors, run.data.train, strict=True):
                assert torch.equal(part, whole[rows])


def test_batches_of_the_test_set_are_in_order_and_know_their_start():
    run = make(eval_batch=20)
    found = list(run.test_batches())
    assert [batch.start for batch in found] == [0, 20, 40]
    assert all(batch.rows is None for batch in found)
    for parts, whole in zip(zip(*(batch.tensors for batch in found), strict=True), run.data.test, strict=True):
        assert [len(part) for part in parts] == [20, 20, 8]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    ("sizes", "expected"), [((48, 20, 2, 0), (3, 6)), ((40, 20, 3, 0), (2, 6)), ((40, 20, 3, 7), (2, 7))]
)
def test_steps_of_an_epoch_and_of_a_run(sizes, expected):
    samples, batch, epochs, steps = sizes
    points = blobs(2 * samples)
    recipe = comet.Comet(sides=("standard",), width=(8,), batch_size=batch, epochs=epochs, steps=steps)
    run = Run(recipe, 0, Splits(points, points.train, points.test))
    assert (run.epoch_steps, run.steps) == expected


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = {tuple(make(seed).batch(3 * epoch).rows.tolist()) for seed in (0, 1, 2, 3) for epoch in range(5)}
    assert len(orders) == 4 * 5


def test_evaluations_draw_the_same_numbers_and_leave_those_of_training_alone(monkeypatch):
    drawn = []
    monkeypatch.setattr(Run, "evaluate", lambda run: drawn.append(torch.rand(3)) or {})
    found = {}
    for points in ((4,), (0, 1, 3, 4)):
        run = vit(seed=5)
        for point in points:
            run.advance(point)
        found[points] = torch.cat([each.detach().flatten() for each in run.task.model.parameters()])
    assert torch.equal(*found.values())
    assert len(drawn) == 5
    for numbers in drawn:
        assert torch.equal(numbers, torch.rand(3, generator=torch.Generator().manual_seed(5)))


def test_a_random_state_goes_on_where_it_stopped():
    own, generator = Random(7, torch.device("cpu")), torch.Generator().manual_seed(7)
    for _ in range(2):
        before = torch.get_rng_state()
        with own.use():
            found = torch.rand(3)
        assert torch.equal(found, torch.rand(3, generator=generator))
        assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(RuntimeError, match="fails"), own.use():
        raise RuntimeError("fails")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0, lambda step: step / 200])
def test_a_competition_is_drawn_from_seed_layer_and_step(rate):
    for seed, layer in ((0, 0), (2, 5)):
        draw, found, expected = SeededDraw(rate, seed, layer), [], []
        for step in range(200):
            generator = torch.Generator().manual_seed((layer * 1_000_003 + step) * 1_000_003 + seed)
            chance = rate(step) if callable(rate) else rate
            expected.append(float(torch.rand((), generator=generator).item() < chance))
            found.append(draw(step))
        assert found == expected
        assert abs(sum(found) / 200 - (0.5 if callable(rate) else rate)) < 0.1


@pytest.mark.parametrize("step", [0, 3, 6])
def test_a_run_continues_from_its_state(step):
    run, other = (make(seed, True, sides=("l1",), choose="best", l1=0.01) for seed in (1, 2))
    run.advance(step)
    state = run.state()
    other.load_state(copy.deepcopy(state))
    assert str(other.state()) == str(state)
    assert (other.step, len(other.rows), len(other.terms)) == (step, 1, 1)
    other.rows[0]["new"] = 1.0
    assert "new" not in run.rows[0]
    run.seed = other.seed  # which seeds the batches and evaluations
    for each in (run, other):
        each.advance(6)
    rows = [{k: v for k, v in each.rows[-1].items() if k != "seconds"} for each in (run, other)]
    assert str(rows[0]) == str(rows[1])
    for one, two in zip(run.task.model.parameters(), other.task.model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("step", [-1, 7])
def test_a_state_beyond_the_steps_of_a_run_is_an_error(step):
    run = make()
    run.advance(0)
    with pytest.raises(ValueError, match=f"^step must be from 0 to 6, got {step}$"):
        make().load_state(run.state() | {"step": step})


@pytest.mark.parametrize(
    ("accuracies", "best", "stopped"),
    [
        ([], None, False),
        ([0.5], 0, False),
        ([0.5, 0.4], 0, False),
        ([0.5, 0.5, 0.4], 0, True),  # of equal ones the first is best
        ([0.5, 0.4, 0.6], 2, False),
        ([0.5, 0.6, 0.4, math.nan], 1, True),
        ([math.nan, 0.1, 0.0], 1, False),
    ],
)
def test_a_run_stops_if_no_row_of_its_patience_is_better(accuracies, best, stopped):
    rows = [{"valid accuracy": each, "test accuracy": -each} for each in accuracies]
    for choose, patience, valid in (("best", 2, True), ("last", 2, True), ("best", 0, True), ("best", 2, False)):
        run = make(valid=valid, choose=choose, patience=patience)
        run.rows = rows
        assert run.validates == valid
        assert run.stopped == (stopped and patience > 0 and valid)
        if rows:
            assert run.chosen == (best if choose == "best" and valid else len(rows) - 1)
    assert not make(valid=True).validates


def test_the_best_of_an_error_is_the_lowest(monkeypatch):
    run = make(valid=True, choose="best")
    run.rows = [{"valid accuracy": each} for each in (0.5, math.nan, 0.2, 0.2, 0.9)]
    assert run.chosen == 4
    monkeypatch.setattr(comet.Comet, "HIGHER_IS_BETTER", False)
    assert run.chosen == 2


def test_the_model_of_the_best_evaluation_is_kept(monkeypatch):
    numbers = iter([0.5, 0.75, 0.25])
    monkeypatch.setattr(Run, "evaluate", lambda run: {"valid accuracy": next(numbers)})
    for choose in ("best", "last"):
        run = make(valid=True, choose=choose, patience=3)
        numbers, states = iter([0.5, 0.75, 0.25]), []
        for step in (1, 2, 3):
            run.advance(step)
            states.append(copy.deepcopy(run.model_state()))
        same = [all(torch.equal(each, state[name]) for name, each in chosen_state(run).items()) for state in states]
        assert same == [False, choose == "best", choose == "last"]


def test_regularisers_are_no_columns_but_terms():
    run = make(sides=("l1",), l1=0.5)
    run.advance(0)
    run.advance(2)
    assert "l1" not in run.rows[1]
    assert run.terms[0] == {}
    assert run.rows[1]["loss"] == pytest.approx(run.rows[1]["task"] + run.terms[1]["l1"])


def test_a_trained_model_predicts_without_the_noise_of_training():
    run = vit()
    trained, x = Trained(run.recipe, run.data.source, run.task, 0), run.data.test[0]
    run.task.model.eval()
    with torch.no_grad():
        expected = run.task.predict(x)
    for call in (trained, trained.predict):
        run.task.model.train()
        noisy = run.task.predict(x)
        found = call(x)
        assert torch.equal(found, expected)
        assert not torch.equal(noisy, expected)
        assert (found.requires_grad, trained.model.training) == (False, False)


@pytest.mark.parametrize("side", vmoe.VMoE.SIDES)
@pytest.mark.parametrize("capacities", [(1.0,), (1.0, 0.5)])
def test_sides_whose_capacity_drops_tokens_are_measured_at_several(side, capacities):
    task = vit(side=side, capacity_eval=capacities).task
    measured = side in ("vmoe", "bpr", "bpr_sum") and len(capacities) == 2
    assert (task.last is not None, task.dropped is not None) == (measured, measured)
    assert task.grid == (None if side in ("dense", "matched") else (2, 2))
    assert vit(side=side, moe_layers=0).task.grid is None


def test_competitions_and_their_time_by_hand():
    spans = [(0, 1.0), (2, 4.0), (1, 2.0), (0, 2.0)]
    found = loop._of_competitions(spans, 2)
    assert found == {"competitions": 3 / 8, "competition time": pytest.approx(1 - 4 * 1.5 / 9)}
    for none in ([], [(1, 1.0)]):
        assert all(math.isnan(each) for each in loop._of_competitions(none, 1).values())
    assert loop._of_competitions([(0, 2.0), (0, 4.0)], 3) == {"competitions": 0, "competition time": 0}
