"""Mixed precision of recipes, competitions in the agreement check, and the time that competitions add."""

from __future__ import annotations

import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch

from moe_kernels import backends
from moe_kernels.papers import train
from moe_kernels.papers.recipes import Splits, comet
from moe_kernels.papers.recipes.competesmoe import CompeteSMoE
from moe_kernels.papers.recipes.vmoe import VMoE
from moe_kernels.papers.train import agreement, loop
from moe_kernels.papers.train.comparison import Comparison
from moe_kernels.papers.train.loop import Run
from tests.helpers.small_sets import blobs, images


def of_comet(amp, **changed):
    points = blobs()
    recipe = comet.Comet(sides=("comet",), width=(24,), batch_size=16, amp=amp, **changed)
    return Run(recipe, 0, Splits(points, points.train, points.test))


def after(run, steps):
    for _ in range(steps):
        run.take_step()
    return torch.cat([each.detach().flatten() for each in run.task.model.parameters()])


def test_the_changes_that_a_check_plants_are_far_below_its_tolerance():
    assert (agreement.tolerance_of("none"), agreement.perturbation_of("none")) == (1e-5, 4e-6)
    for amp, eps in (("bfloat16", 2.0**-7), ("float16", 2.0**-10)):
        assert (agreement.tolerance_of(amp), agreement.perturbation_of(amp)) == (eps, eps / 8)


@pytest.mark.parametrize(("amp", "eps"), [("bfloat16", 2.0**-7), ("float16", 2.0**-10)])
def test_a_model_trains_in_mixed_precision(amp, eps):
    """The first step differs from float32's as much as the dtype rounds; the parameters stay float32."""
    start, single, mixed = after(of_comet("none"), 0), after(of_comet("none"), 1), after(of_comet(amp), 1)
    assert mixed.dtype == torch.float32
    error = (mixed - single).norm() / (single - start).norm()
    assert eps / 50 < error < 4 * eps
    run = of_comet(amp, lr=0.05)
    assert run.evaluate()["test accuracy"] < 0.5
    after(run, 40)
    assert run.evaluate()["test accuracy"] > 0.9
    dtypes = set()
    run.task.model.output.register_forward_hook(lambda module, x, y: dtypes.add(y.dtype))
    run.take_step()
    run.evaluate()
    assert dtypes == {getattr(torch, amp)}


def test_float16_scales_the_loss_and_skips_a_step_that_overflows():
    run = of_comet("float16")
    plain = of_comet("none").losses(run.batch(0))["loss"]
    seen = []
    run.task.optimiser.register_step_pre_hook(lambda *rest: seen.append(run.gradients()[0].norm()))
    before = after(run, 0)
    run.scaler.scale(plain)  # the scaler makes its scale at the first use
    run.scaler.update(2.0**40)
    assert torch.equal(after(run, 1), before)  # infinite gradients
    assert run.scaler.get_scale() == 2.0**39
    run.scaler.update(2.0**8)
    assert not torch.equal(after(run, 1), before)
    exact = of_comet("none")
    exact.step = 1
    exact.take_step()
    assert seen == [pytest.approx(exact.gradients()[0].norm().item(), rel=1e-2)]  # without the scale
    assert plain > 0


def test_gradients_are_clipped_without_the_scale():
    points, norms = images(), {}
    for amp in ("none", "float16"):
        recipe = VMoE(sides=("dense",), patch=2, dim=16, depth=2, heads=2, hidden=12, batch_size=16, steps=3, amp=amp)
        run = Run(recipe, 0, Splits(points, points.train, points.test))
        run.task.clip = 0.5
        run.take_step()
        norms[amp] = torch.cat([each.flatten() for each in run.gradients() if each is not None]).norm().item()
    assert norms["none"] == pytest.approx(0.5, rel=1e-4)
    assert norms["float16"] == pytest.approx(0.5, rel=1e-3)


def test_a_check_goes_on_with_the_scale_of_the_fast_backend():
    fast, reference = of_comet("float16"), of_comet("float16")
    after(fast, 1)
    fast.step = 0
    fast.scaler.update(2.0**40)  # the next step overflows, on this run alone
    (step,) = agreement.check_agreement(fast, lambda: reference, 1).steps
    assert not step.passed
    assert reference.scaler.get_scale() == fast.scaler.get_scale() == 2.0**39


def test_a_checkpoint_has_the_scale():
    run, again = of_comet("float16"), of_comet("float16")
    after(run, 3)
    run.scaler.update(64.0)
    again.load_state(run.state())
    assert again.scaler.get_scale() == 64
    with pytest.raises(ValueError, match="scaler, scale must be a number"):
        again.load_state({**run.state(), "scaler": {**run.state()["scaler"], "scale": "64"}})


def test_ranks_refuse_float16():
    ranks = pytest.importorskip("moe_kernels.papers.train.ranks")
    points = blobs()
    recipe = comet.Comet(sides=("comet",), width=(8,), amp="float16")
    with pytest.raises(ValueError, match="--amp float16 needs one process"):
        ranks.ParallelRun(recipe, 0, Splits(points, points.train, points.test), ranks=None)


@pytest.mark.parametrize("amp", ["bfloat16", "float16"])
def test_backends_agree_in_mixed_precision_and_a_wrong_gradient_is_seen(amp, monkeypatch, capsys):
    points = images()
    recipe = VMoE(
        sides=("vmoe",), patch=2, dim=16, depth=2, heads=2, hidden=12, experts=4, batch_size=16, steps=3, amp=amp
    )
    every = Comparison(recipe, Splits(points, points.train, points.test), 1, 0, None)
    ((_, variant),) = every.variants.items()
    assert train.check_agreement(*every.pair(variant), 2).passed
    take = Run.differentiate

    def wrong(run, batch):
        losses = take(run, batch)
        if backends.requested(None) != "reference":
            run.task.model.head.weight.grad *= 1.1
        return losses

    monkeypatch.setattr(Run, "differentiate", wrong)
    assert not train.check_agreement(*every.pair(variant), 2).passed


def test_the_command_trains_in_mixed_precision(arguments, tmp_path, capsys):
    report = tmp_path / "run.json"
    assert train.run(arguments("--amp", "bfloat16", "--json", str(report))) == 0
    assert "passed, 6 steps" in capsys.readouterr().out
    found = json.loads(report.read_text())
    assert found["settings"]["amp"] == "bfloat16"
    assert train.run(arguments("--amp", "none", "bfloat16", "--sides", "comet", "--json", str(report))) == 0
    both = json.loads(report.read_text())["runs"]
    assert [run["side"] for run in both] == ["comet amp=none", "comet amp=bfloat16"]
    assert both[1]["rows"][-1]["loss"] != both[0]["rows"][-1]["loss"]
    assert "accuracy by amp" in capsys.readouterr().out
    assert found["agreement"]["comet"]["steps"][0]["tolerance"] == pytest.approx(2.0**-7)


def competing(text, **changed):
    small = {"dim": 16, "hidden": 12, "depth": 2, "heads": 2, "length": 12, "experts": 4, "batch_size": 8}
    recipe = CompeteSMoE(sides=("compete",), choose="last", **small | changed)
    return Comparison(recipe, recipe.splits(text), 1, 0, None)


@pytest.mark.parametrize("rate", [0.0, 0.05, 1.0])
def test_the_agreement_check_has_competitions_and_steps_without(text, rate, monkeypatch):
    """At any rate all layers compete in the first and third step of the check, on both backends, and not in between."""
    every = competing(text, steps=8, rate=rate)
    ((_, variant),) = every.variants.items()
    seen = []
    original = agreement._take_step

    def take(run):
        gates = [each for each in run.task.model.modules() if isinstance(each, loop.CompetitionGate)]
        record = original(run)
        seen.append((run.step, [gate._draws.last for gate in gates]))
        return record

    monkeypatch.setattr(agreement, "_take_step", take)
    assert train.check_agreement(*every.pair(variant), 3).passed
    assert all(competed == [step != 2] * 2 for step, competed in seen)
    assert {step for step, _ in seen} == {1, 2, 3}
    run = Run(variant, 0, every.data)  # training keeps its rate
    run.take_step()
    assert run.task.model.blocks.blocks[0].block.ffn.gate.rate.rate == rate


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_several_ranks_are_compared_with_one_process_on_every_backend(backend, monkeypatch):
    checked = SimpleNamespace(steps=[], failed=[])
    monkeypatch.setattr(train, "print_agreement", lambda *given: None)
    monkeypatch.setattr(train, "check_agreement", lambda *given: checked)
    ranks = SimpleNamespace(size=2, check=lambda variant, data: (variant, data, "ranks"))
    comparison = SimpleNamespace(recipe=SimpleNamespace(check_steps=3), variants={"a": 1}, data="d", pair=lambda _: ())
    assert train._check(comparison, backend, ranks) == {"a": (1, "d", "ranks")}
    assert train._check(comparison, backend, None) == ({} if backend == "reference" else {"a": checked})


def test_the_time_that_competitions_add(text, monkeypatch):
    """A clock on which a step takes 1 s and each competing layer 2 s more; evaluations report shares of their own."""
    now = itertools.count()
    every = competing(text, steps=40, rate=0.3)
    ((_, variant),) = every.variants.items()
    run = Run(variant, 0, every.data)
    draws = [gate.rate for gate in run.task.model.modules() if isinstance(gate, loop.CompetitionGate)]
    clock, take = SimpleNamespace(now=0.0), Run.take_step

    def timed(self):
        clock.now += 1 + 2 * sum(draw(self.step) for draw in draws)
        return take(self)

    monkeypatch.setattr(Run, "take_step", timed)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: clock.now)
    next(now)
    for first, last in ((0, 20), (20, 40)):
        run.advance(last)
        competed = [sum(draw(step) for draw in draws) for step in range(first, last)]
        assert 0 < sum(competed) < 40
        assert run.rows[-1]["competitions"] == pytest.approx(sum(competed) / 40)
        added = 2 * sum(competed)
        assert run.rows[-1]["competition time"] == pytest.approx(added / (added + 20))
    assert {"competitions", "competition time"} <= set(variant.columns())
    always = Run(competing(text, steps=2, rate=1.0).variants["compete"], 0, every.data)
    always.advance(2)
    assert math.isnan(always.rows[0]["competition time"])
