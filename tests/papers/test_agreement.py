"""The check of a backend against the reference: errors of extreme numbers, what it prints, how it repeats a step."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.utils._pytree import tree_flatten

from moe_kernels.papers import train
from moe_kernels.papers.recipes import Splits, comet
from moe_kernels.papers.recipes.vmoe import VMoE
from moe_kernels.papers.train import agreement
from moe_kernels.papers.train.agreement import Agreement, Jumps, Step, StepRecord
from moe_kernels.papers.train.loop import Run
from tests.helpers.small_sets import blobs, images


def make(seed=0, side="comet", **changed):
    points = blobs()
    recipe = comet.Comet(sides=(side,), width=(24,), batch_size=16, **changed)
    return Run(recipe, seed, Splits(points, points.train, points.test))


def copies(run):
    return [each.detach().double() for each in run.task.model.parameters()]


def of_loss(value, *gradients):
    return StepRecord([], torch.tensor(value), list(gradients))


@pytest.mark.parametrize(
    ("loss", "reference", "error"),
    [
        (0.75, 0.5, 0.25),  # relative to 1, as the reference is smaller
        (-7.0, -4.0, 0.75),
        (math.inf, math.inf, 0.0),
        (-math.inf, -math.inf, 0.0),
        (math.nan, math.nan, 0.0),
        (math.inf, -math.inf, math.nan),
        (1.0, math.nan, math.nan),
        (math.nan, 1.0, math.nan),
        (math.inf, 1.0, math.inf),
    ],
)
def test_the_error_of_a_loss_is_relative_and_none_of_equal_infinities(loss, reference, error):
    step = Jumps(of_loss(reference), 0.1).compare(2, of_loss(loss))
    assert step.loss_error == pytest.approx(error, nan_ok=True)
    assert (step.tolerance, step.gradient_error, step.wrong_masks) == (0.1, 0, 0)
    assert step.passed == (error == 0)


def test_an_overflow_in_a_repetition_excuses_nothing():
    allowed = Jumps(of_loss(1.0, torch.tensor([2.0, 4.0])))
    for bad in (math.inf, -math.inf, math.nan):
        allowed.widen(of_loss(bad, torch.tensor([bad, 4.5])))
    step = allowed.compare(1, of_loss(1.5, torch.tensor([3.0, 5.5])))
    assert (step.loss_error, step.gradient_error, step.repeated) == (0.5, 1 / 4, 3)  # element 1 jumped by 0.5


def test_a_repetition_without_a_gradient_leaves_what_was_allowed():
    allowed = Jumps(of_loss(1.0, torch.tensor([2.0]), None))
    allowed.widen(of_loss(1.0, torch.tensor([2.25]), None))
    allowed.widen(of_loss(1.0, None, torch.tensor([9.0])))
    step = allowed.compare(1, of_loss(1.0, torch.tensor([3.0]), None))
    assert step.gradient_error == (1 - 2 * 0.25) / 2
    for gradients in ((None, None), (torch.tensor([2.0]), torch.tensor([9.0]))):
        assert allowed.compare(1, of_loss(1.0, *gradients)).gradient_error == math.inf


def test_a_step_passes_up_to_its_tolerance():
    def passed(**changed):
        numbers = {"step": 1, "wrong_masks": 0, "loss": 1.0, "reference_loss": 1.0, "tolerance": 0.5}
        step = Step(**numbers | {"loss_error": 0.5, "gradient_error": 0.5} | changed)
        assert Agreement([step]).passed == step.passed
        return step.passed

    assert passed()
    assert passed(loss_error=0.0, gradient_error=0.0, repeated=8)
    wrong = [{"wrong_masks": 1}, *({name: x} for name in ("loss_error", "gradient_error") for x in (0.51, math.nan))]
    assert not any(passed(**each) for each in wrong)
    good, bad = (Step(1, masks, 1.0, 1.0, 0.0, 0.0) for masks in (0, 1))
    assert [Agreement(each).passed for each in ([], [good] * 2, [good, bad], [bad, good])] == [True, True, False, False]


def said(capsys, *steps):
    agreement.print_agreement("comet", Agreement(list(steps)), "cpu")
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("agreement of comet on cpu with the reference: ")
    return [first.partition("reference: ")[2], *rest]


def test_a_passed_check_says_how_nearly_the_backends_agree(capsys):
    exact, near = Step(1, 0, 2.0, 2.0, 0.0, 0.0), Step(2, 0, 2.0, 2.0, 0.0, 1e-6)
    jumped, other = Step(3, 0, 2.0, 2.0, 0.0, 0.0, repeated=2), Step(4, 0, 2.0, 2.0, 1e-6, 0.0)
    assert said(capsys, exact, exact) == ["passed, 2 steps, exactly equal"]
    assert said(capsys, near) == said(capsys, other) == ["passed, 1 steps"]
    assert said(capsys, exact, near, other) == ["passed, 3 steps"]
    assert said(capsys, exact, jumped) == ["passed, 2 steps, 1 of them across a kink or a tie"]
    assert said(capsys, jumped, near, jumped) == ["passed, 3 steps, 2 of them across a kink or a tie"]


def test_a_failed_check_lists_the_first_five_steps_that_fail(capsys):
    good = Step(1, 0, 2.0, 2.0, 0.0, 0.0)
    bad = [Step(number, number - 2, 1 + number / 8, 1.0, number / 8, 0.25) for number in range(2, 8)]
    header, titles, *lines = said(capsys, good, *bad)
    assert header == "FAILED in 6 of 7 steps, first in step 2"
    assert titles.split() == ["step", "routing", "loss", "reference", "loss", "error", "gradient", "error"]
    assert [" ".join(line.split()) for line in lines] == [
        "2 same 1.25000000 1.00000000 2.5e-01 2.5e-01",
        "3 1 differ 1.37500000 1.00000000 3.8e-01 2.5e-01",
        "4 2 differ 1.50000000 1.00000000 5.0e-01 2.5e-01",
        "5 3 differ 1.62500000 1.00000000 6.2e-01 2.5e-01",
        "6 4 differ 1.75000000 1.00000000 7.5e-01 2.5e-01",
    ]


@pytest.mark.parametrize(("amp", "size"), [("none", 4e-6), ("bfloat16", 2.0**-10)])
def test_a_step_is_repeated_with_weights_moved_both_ways(monkeypatch, amp, size):
    """Each pair of repetitions has its own noise and starts from the state before the step."""
    run, seen = make(seed=3, amp=amp), []
    run.take_step()
    before, weights = copy.deepcopy(run.state()), copies(run)
    run.take_step()

    def note(run):
        seen.append((run.step, copy.deepcopy(run.task.optimiser.state_dict()), copies(run)))
        return run.take_step()

    monkeypatch.setattr(agreement, "_take_step", note)
    assert len(list(agreement._perturbed(run, before, 5))) == len(seen) == 8
    generator, signs = torch.Generator().manual_seed(5), (size, -size)
    for number in range(4):
        noise = [torch.randn(each.shape, generator=generator).double() for each in weights]
        for (step, optimiser, found), sign in zip(seen[2 * number : 2 * number + 2], signs, strict=True):
            expected = [each * (1 + sign * other) for each, other in zip(weights, noise, strict=True)]
            torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)
            assert step == 1
            assert str(optimiser) == str(before["optimiser"])


def test_every_step_of_a_check_starts_from_the_state_of_the_fast_backend():
    """Also after the last step of the run. The first step differs, as the runs have other weights."""
    fast, reference = (make(seed, "standard", epochs=1, momentum=0.9) for seed in (0, 1))
    reference.seed = fast.seed  # for the same batches
    assert fast.steps == 3
    found = train.check_agreement(fast, lambda: reference, 4).steps
    assert [(each.step, each.repeated) for each in found] == [(1, 8), (2, 0), (3, 0), (4, 0)]
    assert [each.passed for each in found] == [False, True, True, True]
    assert reference.step == fast.step == 4
    states = [
        (run.task.model.state_dict(), run.task.optimiser.state_dict(), run.random.state) for run in (fast, reference)
    ]
    leaves, others = (tree_flatten(each)[0] for each in states)
    for one, other in zip(leaves, others, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    shared = {each.data_ptr() for each in leaves if isinstance(each, torch.Tensor)}
    assert not shared & {each.data_ptr() for each in others if isinstance(each, torch.Tensor)}


def test_a_checked_step_has_the_routing_before_it_and_random_numbers_of_its_own():
    points, records = images(), []
    recipe = VMoE(sides=("vmoe",), patch=4, dim=8, depth=2, heads=2, hidden=8, experts=4, batch_size=8, lr=0.5)
    for seed in (1, 2):
        run, modes = Run(recipe, 0, Splits(points, points.train, points.test)), []
        run.task.model.register_forward_hook(
            lambda m, x, y, modes=modes: modes.append((m.training, torch.is_grad_enabled()))
        )
        run.task.model.eval()
        expected = [each.active for each in run.task.routing(run.batch(0))]
        run.task.model.train()
        state = torch.random.manual_seed(seed).get_state()
        records.append(agreement._take_step(run))
        assert torch.equal(torch.get_rng_state(), state)
        assert modes[1:] == [(False, False), (True, True)]
        assert len(expected) == len(records[-1].routing) > 0
        assert all(torch.equal(a, b) for a, b in zip(records[-1].routing, expected, strict=True))
        assert run.step == 1
        for found, parameter in zip(records[-1].gradients, run.task.model.parameters(), strict=True):
            assert torch.equal(found, parameter.grad)
    assert records[0].loss == records[1].loss


def test_other_ranks_take_the_steps_of_a_check(monkeypatch):
    run, calls = make(), []
    for name in ("take_step", "state"):
        original = getattr(Run, name)
        monkeypatch.setattr(
            Run, name, lambda run, name=name, call=original: calls.append((name, run.step)) or call(run)
        )
    agreement.follow_agreement(run, 2)
    assert calls == [("take_step", 0), ("state", 1), ("take_step", 1), ("state", 2)]
