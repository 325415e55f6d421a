"""What `moe_kernels.papers.train` reports: values of a swept option, the chosen evaluation, losses, FLOPs, pictures."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import re

import pytest
import torch

from moe_kernels.papers import data, train
from moe_kernels.papers.recipes import Routing, Splits, comet, comet_sarcos, vmoe
from moe_kernels.papers.train import agreement, loop, plotting, report, sweeps
from moe_kernels.papers.train.comparison import Comparison
from moe_kernels.papers.train.loop import Run
from moe_kernels.papers.train.statistics import RoutingStatistics, area_under_roc, calibration_error
from tests.helpers.planted import interrupt
from tests.helpers.results import told
from tests.helpers.small_sets import blobs


def test_swept_options_are_variants_of_every_side(arguments, tmp_path, capsys, stored, pictures):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    words = ("--keep", "0.1", "0.5", "1", "--check-steps", "0", "--epochs", "1", "--out", str(tmp_path))
    assert train.run(arguments(*words)) == 0
    found = json.loads((tmp_path / "result.json").read_text())
    accuracy = {run["side"]: run["rows"][-1]["test accuracy"] for run in found["runs"]}
    assert set(accuracy) == {f"{side} keep={keep}" for side in ("standard", "comet") for keep in ("0.1", "0.5", "1")}
    assert accuracy["comet keep=1"] == accuracy["standard keep=1"] == accuracy["standard keep=0.1"]
    neurons = {run["side"]: run["rows"][-1]["neurons"] for run in found["runs"]}
    assert [neurons[f"comet keep={keep}"] for keep in ("0.1", "0.5", "1")] == [2, 12, 24]
    printed = capsys.readouterr().out
    stored("train_sweep", told(found, printed, tmp_path, pictures), tolerance=1e-3)
    (line,) = (line for line in printed.splitlines() if line.startswith("comet ") and "=" not in line)
    assert line.split() == ["comet", *(f"{accuracy[f'comet keep={keep}']:.4f}" for keep in ("0.1", "0.5", "1"))]
    assert "dead" in printed
    assert "neurons" in printed
    assert (tmp_path / "sweep.png").read_bytes()[1:4] == b"PNG"
    assert (tmp_path / "model-comet-keep=0.5-0.pt").exists()


def test_words_are_swept_too(arguments, tmp_path, capsys, stored, pictures):
    words = ("--activation", "relu", "tanh", "--width", "8", "24", "--check-steps", "0", "--out", str(tmp_path))
    assert train.run(arguments(*words, "--epochs", "1", "--sides", "comet")) == 0
    found = json.loads((tmp_path / "result.json").read_text())
    accuracy = {run["side"]: run["rows"][-1]["test accuracy"] for run in found["runs"]}
    assert set(accuracy) == {f"comet {width} activation={name}" for width in (8, 24) for name in ("relu", "tanh")}
    printed = capsys.readouterr().out
    if importlib.util.find_spec("matplotlib") is not None:
        stored("train_grid", told(found, printed, tmp_path, pictures), tolerance=1e-3)
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert "accuracy by activation relu tanh" in lines
    assert f"comet 8 {accuracy['comet 8 activation=relu']:.4f} {accuracy['comet 8 activation=tanh']:.4f}" in lines
    if importlib.util.find_spec("matplotlib") is not None:
        assert (tmp_path / "sweep.png").read_bytes()[1:4] == b"PNG"
        assert (tmp_path / "grid.png").read_bytes()[1:4] == b"PNG"


def test_a_sweep_trains_a_side_once_that_does_not_use_the_option(tmp_path):
    points = blobs()
    recipe = comet.Comet(sides=("standard", "comet"), width=(8,), keep=(0.25, 0.5), epochs=1, check_steps=0)
    every = Comparison(recipe, Splits(points, points.train, points.test), 2, 0, tmp_path)
    made = []
    every.make = lambda *given: made.append(given[0]) or Run(*given)
    every.train(lambda: None, lambda line: None)
    assert [(each.side, each.keep, each.seed) for each in made] == [
        (side, keep, seed) for seed in (0, 1) for side, keep in (("standard", 0.25), ("comet", 0.25), ("comet", 0.5))
    ]
    assert every.total_steps == 6 * 2
    found = every.histories()
    assert [(each.side, each.seed) for each in found] == [
        (f"{side} keep={keep}", seed) for seed in (0, 1) for keep in (0.25, 0.5) for side in ("standard", "comet")
    ]
    assert found[0].rows == found[2].rows != found[3].rows
    again = Comparison(recipe, Splits(points, points.train, points.test), 2, 0, tmp_path)
    again.resume()
    assert str(again.histories()) == str(found)


def test_a_swept_options_table_and_picture_have_mean_and_spread(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    drawn = []
    monkeypatch.setattr(plotting, "save", lambda canvas, path: drawn.append(canvas))
    recipe = comet.Comet(sides=("comet", "l1"), width=(8,), keep=(0.01, 0.5))
    runs = [
        history(f"{side} keep={keep:g}", seed, (shift + keep + seed,))
        for side, shift in (("comet", 1), ("l1", 3))
        for keep in recipe.keep
        for seed in (0, 1)
    ]
    summaries = report.summarise(runs, "accuracy")
    lines = [" ".join(line.split()) for line in sweeps.pivot(recipe, summaries).splitlines()]
    assert "accuracy by keep 0.01 0.5" in lines
    assert "comet 1.5100 ± 0.7071 2.0000 ± 0.7071" in lines
    assert "l1 3.5100 ± 0.7071 4.0000 ± 0.7071" in lines
    assert sweeps.sweep_picture(tmp_path / "sweep.png", recipe, summaries, "all")
    (axis,) = drawn[0].axes
    assert axis.get_xscale() == "log"
    drawn_points = [point for line in axis.lines for point in line.get_xydata().flatten().tolist()]
    assert drawn_points == pytest.approx([0.01, 1.51, 0.5, 2.0, 0.01, 3.51, 0.5, 4.0])
    assert not sweeps.sweep_picture(tmp_path / "sweep.png", comet.Comet(sides=("l1",)), summaries, "all")


@pytest.mark.parametrize(
    ("keep", "scale"),
    [((0.01, 0.2), "linear"), ((0.01, 0.21), "log"), ((0.21, 0.01), "log"), ((0.0, 0.5), "linear")],
)
def test_values_that_differ_more_than_twenty_fold_are_on_a_log_scale(monkeypatch, tmp_path, keep, scale):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    drawn = []
    monkeypatch.setattr(plotting, "save", lambda canvas, path: drawn.append(canvas))
    recipe = comet.Comet(sides=("comet",), width=(8,), keep=keep)
    runs = [history(f"comet keep={each:g}", seed, (each + seed,)) for each in keep for seed in (0, 1)]
    assert sweeps.sweep_picture(tmp_path / "sweep.png", recipe, report.summarise(runs, "accuracy"), "all")
    assert drawn[0].axes[0].get_xscale() == scale
    (bars,) = drawn[0].axes[0].collections
    (points,) = (line.get_xydata() for line in drawn[0].axes[0].lines)
    assert [bar.tolist() for bar in bars.get_segments()] == [
        [[x, pytest.approx(y - 0.5**0.5)], [x, pytest.approx(y + 0.5**0.5)]] for x, y in points.tolist()
    ]


def test_sides_without_the_columns_of_a_curve_have_none():
    recipe = vmoe.VMoE(sides=("dense", "vmoe"), capacity_eval=(2.0, 0.5))
    columns = [name for curve in recipe.curves().values() for name in curve.values()]
    runs = [history("dense", seed, (0.5 + seed,)) for seed in (0, 1)] + [history("vmoe", 0, (0.25,))]
    runs[2].rows[-1].update({name: number / 8 for number, name in enumerate(columns)})
    runs[0].rows[-1][columns[0]] = 1.0  # of the first curve, but not all of it
    found = sweeps._curves(recipe, report.summarise(runs, "accuracy", columns))
    assert list(found) == [f"vmoe, {title}" for title in recipe.curves()]
    points = [point[:2] for curve in found.values() for point in curve]
    assert points == [(value, number / 8) for number, value in enumerate([2.0, 0.5] * 3)]


def test_an_evaluation_uses_a_limited_number_of_test_rows(arguments, monkeypatch, capsys):
    seen, original = [], Run.evaluate

    def evaluate(run):
        seen.append(len(run.data.test[0]))
        return original(run)

    monkeypatch.setattr(Run, "evaluate", evaluate)
    points = blobs()
    few = data.Images(**vars(points) | {"train_x": points.train_x[:32], "train_y": points.train_y[:32]})
    monkeypatch.setattr(train, "load", lambda name: few)
    for words, rows in (((), 32), (("--eval-rows", "5"), 5), (("--eval-rows", "4000"), 48)):
        seen.clear()
        assert train.run(arguments("--check-steps", "0", "--epochs", "1", *words)) == 0
        assert set(seen) == {rows}
        message = f"{rows} test samples{'' if rows == 48 else ' of 48'}; 2 steps of 16 (1 epochs)"
        assert message in capsys.readouterr().out


@pytest.mark.parametrize("steps", [None, 5])
def test_the_best_evaluation_on_the_validation_part_counts_and_stops_a_run(arguments, tmp_path, capsys, steps):
    """At this learning rate the model becomes worse after some steps."""
    words = ["--choose", "best", "--patience", "2", "--check-steps", "0", "--every", "2", "--eval-rows", "99"]
    args = arguments(
        *words, "--sides", "standard", "--epochs", "20", "--lr", "0.5", "--momentum", "0.95", "--out", str(tmp_path)
    )
    if steps is not None:
        interrupt(args, steps)
        args.resume = True
    assert train.run(args) == 0
    (run,) = json.loads((tmp_path / "result.json").read_text())["runs"]
    valid = [row["valid accuracy"] for row in run["rows"]]
    assert run["chosen"] == valid.index(max(valid)) == len(valid) - 3
    assert run["rows"][-1]["step"] < 60
    assert "stops: no better on the validation part" in capsys.readouterr().out
    state = torch.load(tmp_path / "model-standard-0.pt", weights_only=True)
    points = blobs()
    other_run = Run(comet.Comet(sides=("standard",), width=(24,)), 0, Splits(points, points.train, points.test))
    other_run.task.model.load_state_dict(state)
    assert other_run.evaluate()["test accuracy"] == run["rows"][run["chosen"]]["test accuracy"]
    assert json.loads((tmp_path / "model-standard-0.json").read_text())["step"] == run["rows"][run["chosen"]]["step"]


def test_the_tasks_loss_is_reported_without_added_losses(arguments, tmp_path, capsys):
    words = ("--sides", "l1", "--l1", "0.01", "--check-steps", "0", "--epochs", "1", "--out", str(tmp_path))
    assert train.run(arguments(*words)) == 0
    (run,) = json.loads((tmp_path / "result.json").read_text())["runs"]
    (summary,) = json.loads((tmp_path / "result.json").read_text())["summary"]
    row, terms = run["rows"][-1], run["terms"][-1]
    assert terms["l1"] > 0.1
    assert row["loss"] == pytest.approx(row["task"] + terms["l1"], rel=1e-6)
    assert summary["loss"][0] == row["task"]
    printed = capsys.readouterr().out
    assert f"Added to the task's loss of l1: l1 {terms['l1']:.4g}." in printed
    assert "nan" not in printed.partition("side ")[0]
    with (tmp_path / "log.csv").open() as file:
        assert float(list(csv.DictReader(file))[-1]["loss: l1"]) == terms["l1"]


def test_a_row_has_the_means_over_the_steps_since_the_row_before(monkeypatch):
    """At 0.5 seconds a step by a clock that only steps advance."""
    points, taken = blobs(), []
    run = Run(
        comet.Comet(sides=("l1",), width=(8,), l1=0.1, batch_size=16), 0, Splits(points, points.train, points.test)
    )
    original = Run.take_step

    def take_step(self):
        taken.append({name: value.item() for name, value in original(self).items()})
        return {name: torch.tensor(value) for name, value in taken[-1].items()}

    monkeypatch.setattr(Run, "take_step", take_step)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: 0.5 * len(taken))
    run.advance(0)
    run.advance(2)
    run.advance(5)
    assert all(math.isnan(run.rows[0][name]) for name in ("loss", "seconds"))
    for row, terms, steps in zip(run.rows[1:], run.terms[1:], (taken[:2], taken[2:]), strict=True):
        for name in ("loss", "task"):
            assert row[name] == pytest.approx(sum(each[name] for each in steps) / len(steps), rel=1e-6)
        assert terms == {"l1": pytest.approx(sum(each["l1"] for each in steps) / len(steps), rel=1e-6)}
        assert row["seconds"] == 0.5
    assert [(row["step"], row["epoch"]) for row in run.rows] == [(0, 0), (2, 2 / 3), (5, 5 / 3)]  # three steps an epoch


def test_columns_of_routing_by_hand():
    """Two layers, which differ in their experts, and two batches, of three and of one sample."""
    found = RoutingStatistics(torch.device("cpu"))
    three, one = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 0, 0]]).bool(), torch.tensor([[1, 1, 1]]).bool()
    half, some = torch.full((3, 2), 0.5), torch.tensor([[0.5, 0.5], [1, 0], [1, 0]])
    found.add([Routing(three, some), Routing(torch.tensor([[0, 1]] * 3).bool(), half)])
    assert found.row()["dead experts"] == 1
    found.add([Routing(one, torch.tensor([[1.0, 0]])), Routing(torch.tensor([[1, 0]]).bool())])
    # Shares: 1, 1/2, 1/2 in the first layer, 1/4, 3/4 in the second. Only three samples of the second have entropies.
    assert found.row() == {
        "experts": pytest.approx((2 + 1) / 2), "least load": 0.25, "most load": 1, "dead experts": 0,
        "entropy": pytest.approx(4 * math.log(2) / 7), "entropy 1": pytest.approx(math.log(2) / 4),
        "entropy 2": pytest.approx(math.log(2)),
    }  # fmt: skip
    found.add([Routing(torch.zeros(96, 3).bool()), Routing(torch.zeros(96, 2).bool())])
    assert (found.row()["least load"], found.row()["most load"]) == (0.01, 0.04)


def history(side, seed, numbers, **more):
    """A history whose evaluations have these numbers as metric; their other columns follow from them."""
    rows = [
        {"step": 2.0 * i, "test accuracy": x, "loss": 10 * x, "task": 9 * x, "seconds": x / 1000, "experts": 4 * x}
        for i, x in enumerate(numbers)
    ]
    rows = [row | {"least load": 0.1, "most load": 0.5, "dead experts": 7 * row["loss"]} for row in rows]
    terms = [{"l1": 100 * x} for x in numbers]
    return report.History(side, seed, 0.1, more.pop("stage", "final"), rows, 2e6, terms=terms, **more)


def test_a_summary_by_hand():
    """Two seeds of one side, the second evaluation chosen; a run that tunes does not count."""
    runs = [history("a", 0, (1, 2, 6), chosen=1, parameters=5), history("a", 1, (2, 4, 9), chosen=1, parameters=5)]
    other = history("b", 0, (0.5,), parameters=3)
    (a, b) = report.summarise([history("a", 0, (99,), stage="tune"), *runs, other], "accuracy")
    deviation = math.sqrt(2)  # of two numbers that differ by 2
    assert a.metric == pytest.approx((3, deviation))
    assert a.curve == pytest.approx((4, deviation))  # means 3 and 5
    assert a.loss == pytest.approx((27, 9 * deviation))
    assert a.seconds == 4e-3  # the median of 1, 2, 2, 4, 6, 9 ms, the upper one
    assert a.regularisers == {"l1": 300}
    assert a.routing == {"experts": 12, "least load": 0.1, "most load": 0.5, "dead experts": 210}
    assert (a.side, a.lr, a.flops, a.parameters) == ("a", 0.1, 2e6, 5)
    assert b.metric[0] == 0.5
    learned, costs = (each.splitlines() for each in report.tables([a, b], "accuracy", 16).split("\n\n"))
    cells = [[cell for cell in line.split("  ") if cell.strip()] for line in (*learned, *costs)]
    texts = [" ".join(" ".join(line).split()) for line in cells]
    assert "a 0.1 3.0000 ± 1.4142 4.0000 ± 1.4142 27.0000 ± 12.7279 4.00 4000 24" in texts
    assert "a 12 0.1 0.5 210 - 5 2.000" in texts
    assert "Added to the task's loss of a: l1 300." in report.legend([a, b])


def test_further_columns_of_any_side_have_a_table():
    runs = [history("a", 0, (1,)), history("b", 0, (2,))]
    runs[1].rows[0]["test dropped"] = 0.25
    found = report.tables(report.summarise(runs, "accuracy", ("test dropped", "test other")), "accuracy", 16)
    further = [" ".join(line.split()) for line in found.split("\n\n")[1].splitlines()]
    assert further[0] == "side dropped"
    assert further[-2:] == ["a -", "b 0.2500"]


def test_a_picture_has_the_mean_and_the_range_over_the_seeds(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    drawn = []
    monkeypatch.setattr(plotting, "save", lambda canvas, path: drawn.append(canvas))
    runs = [history("a", seed, numbers) for seed, numbers in enumerate(((1, 2, 3), (2, 5, 8), (6, 8)))]
    report.picture(tmp_path / "plot.png", runs, "accuracy", "all")
    axis, losses = drawn[0].axes
    assert axis.lines[0].get_xydata().tolist() == [[0, 3], [2, 5]]  # a run that stopped early ends the line
    assert losses.lines[0].get_xydata().tolist() == [[0, 27], [2, 45]]
    corners = {tuple(each) for each in axis.collections[0].get_paths()[0].vertices.tolist()}
    assert {(0, 1), (0, 6), (2, 2), (2, 8)} == corners


def test_tuning_holds_a_tenth_out_and_takes_the_best_last_evaluation(tmp_path):
    points = blobs(94)
    recipe = comet.Comet(
        sides=("standard",), width=(8,), tune=(0.5, 0.1, 0.01), batch_size=11, epochs=2, seed=3, check_steps=0
    )
    every = Comparison(recipe, Splits(points, points.train, points.test), 2, 4, None)
    made, ticks = [], []
    every.make = lambda *given: made.append(Run(*given)) or made[-1]
    every.train(lambda: ticks.append(1), lambda line: None)
    # 47 samples: 5 steps an epoch; 43 without the tenth: 4 steps.
    assert [run.step for run in made] == [8, 8, 8, 10, 10]
    assert every.total_steps == len(ticks) == 44
    assert [[row["step"] for row in run.rows] for run in made] == [[4, 8]] * 3 + [[4, 8, 10]] * 2
    x, y = points.train
    for run in made[:3]:
        parts = [*run.data.train[0], *run.data.test[0]]
        assert (len(run.data.train[1]), len(run.data.test[1])) == (43, 4)
        assert sorted(each.tolist() for each in parts) == sorted(x.tolist())
        row = x.tolist().index(run.data.test[0][0].tolist())
        assert run.data.test[1][0] == y[row]


@pytest.mark.parametrize(("kind", "rate"), [(comet.Comet, 0.2), (comet_sarcos.CometSarcos, 0.1)])
def test_the_rate_with_the_best_last_evaluation_is_chosen(kind, rate):
    """For an accuracy the best is the highest, for an error the lowest; NaN is the worst."""
    points, metric = blobs(), f"test {kind.METRIC}"
    runs = Comparison(kind(sides=("l1",), width=(8,)), Splits(points, points.train, points.test), 1, 0, None)
    for lr, first, last in (
        (0.05, 0.3, math.nan),
        (0.1, 0.8, 0.2),
        (0.2, 0.1, 0.6),
        (0.3, 0.9, 0.4),
        (0.4, 0.0, math.nan),
    ):
        rows = [{metric: first}, {metric: last}]
        runs.done[f"l1 at {lr}"] = report.History("l1", 0, lr, "tune", rows)
        runs.done[f"other at {lr}"] = report.History("other", 0, lr, "tune", [{metric: 9 * lr}])
    assert runs._best_rate("l1") == rate


def test_flops_are_given_with_kept_masks_and_without(arguments, tmp_path, capsys):
    path = tmp_path / "run.json"
    assert train.run(arguments("--check-steps", "0", "--epochs", "0", "--json", str(path))) == 0
    found = {run["side"]: (run["flops"], run["flops_known"]) for run in json.loads(path.read_text())["runs"]}
    routing = 2 * (12 * 24 + 24 * 24 * 2)
    assert found["standard"][0] == found["standard"][1]
    assert routing <= found["comet"][0] - found["comet"][1] <= routing + 3 * 24  # 3 * 24 for k-winner-take-all
    assert re.search(r"^ +masks$", capsys.readouterr().out, re.MULTILINE)  # the last word of "with kept masks"


def test_errors_of_a_checked_step_by_hand():
    """One element of the routing, the loss and one of four gradients differ; a repetition excuses twice its changes."""

    def record(used, loss, gradient):
        gradients = [torch.tensor([8.0, 0.0, 1.0, gradient]), None, torch.empty(0)]
        return agreement.StepRecord([torch.tensor(used)], torch.tensor(loss), gradients)

    allowed = agreement.Jumps(record([True, False, True], 2.0, -1.0))
    got = record([True, True, True], 2.5, -2.0)
    step = allowed.compare(3, got)
    assert (step.step, step.wrong_masks, step.repeated, step.passed) == (3, 1, 0, False)
    assert (step.loss, step.reference_loss, step.loss_error, step.gradient_error) == (2.5, 2.0, 0.25, 1 / 8)
    allowed.widen(record([False, False, True], 1.9, -0.75))
    step = allowed.compare(3, got)
    assert (step.wrong_masks, step.repeated) == (1, 1)
    assert (step.loss_error, step.gradient_error) == pytest.approx(((0.5 - 0.2) / 2, 0.5 / 8))
    allowed.widen(record([True, True, True], 2.25, -1.5))
    assert allowed.compare(3, got).passed
    assert not allowed.compare(3, record([True, True, True], math.nan, -1.0)).passed
    assert not allowed.compare(3, record([True, True, True], 2.0, math.nan)).passed
    missing = agreement.StepRecord(got.routing, got.loss, [got.gradients[0], torch.ones(1), got.gradients[2]])
    assert allowed.compare(3, missing).gradient_error == math.inf


def test_steps_without_gradients_have_no_error_of_them():
    def record(*gradients):
        return agreement.StepRecord([], torch.tensor(1.0), list(gradients))

    for none in ((), (None,), (None, torch.empty(0))):
        step = agreement.Jumps(record(*none)).compare(1, record(*none))
        assert (step.gradient_error, step.passed) == (0.0, True)
    step = agreement.Jumps(record(None, torch.zeros(1))).compare(1, record(None, torch.ones(1)))
    assert step.gradient_error == pytest.approx(1 / torch.finfo(torch.float32).tiny)


def test_the_calibration_error_by_hand():
    """Bins of a tenth: 0.05 alone, wrong; 0.72 and 0.78, one right; 1.0, right, which is in the last bin with 0.95."""
    confidence = torch.tensor([0.05, 0.72, 0.78, 1.0, 0.95])
    right = torch.tensor([False, True, False, True, True])
    expected = (0.05 + abs(0.72 + 0.78 - 1) + abs(1.95 - 2)) / 5
    assert calibration_error(confidence, right, bins=10) == pytest.approx(expected, abs=1e-6)
    assert calibration_error(torch.tensor([0.6, 0.6]), torch.tensor([True, False])) == pytest.approx(0.1, abs=1e-6)
    assert math.isnan(calibration_error(torch.empty(0), torch.empty(0, dtype=torch.bool)))


@pytest.mark.parametrize("count", range(2, 10))
def test_paired_differences_have_students_p(count):
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    for shift in (0.0, 0.4, 3.0):
        values = (torch.randn(count, generator=torch.Generator().manual_seed(count)) + shift).tolist()
        mean, spread, p = report.paired(values)
        assert (mean, spread) == pytest.approx(report.mean_and_spread(values))
        assert p == pytest.approx(stats.ttest_1samp(values, 0).pvalue, rel=1e-9)
    assert report.paired([2.0] * count) == (2.0, 0.0, 0.0)
    assert report.paired([0.0] * count) == (0.0, 0.0, 1.0)


def test_sides_are_compared_over_the_seeds_that_both_have():
    runs = [history("a", seed, (1 + seed,)) for seed in (0, 1, 2)] + [
        history("b", seed, (3, 2 * seed)) for seed in (1, 2)
    ]
    runs += [history("c", 0, (9,)), history("b", 0, (50,), stage="tune")]
    lines = [" ".join(line.split()) for line in report.differences(runs, "accuracy").splitlines()]
    assert lines[2:] == ["b - a 2 0.5000 ± 0.7071 0.5"]  # 2 - 2 and 4 - 3: t = 1 with one degree of freedom
    assert report.differences(runs[:3], "accuracy") == ""
    many = [history(name, seed, (1.0 + seed * number,)) for number, name in enumerate("abcdefghi") for seed in (0, 1)]
    assert len(report.differences(many, "accuracy").splitlines()) == 2 + 8  # each of nine against the first alone


def test_area_under_roc_counts_pairs():
    draw = torch.Generator().manual_seed(0)
    scores, positive = torch.randint(0, 9, (60,), generator=draw).float(), torch.rand(60, generator=draw) < 0.4
    above, below = scores[positive][:, None], scores[~positive]
    pairs = (above > below).double() + 0.5 * (above == below)
    assert area_under_roc(scores, positive) == pytest.approx(pairs.mean().item())
    assert math.isnan(area_under_roc(scores, torch.ones(60, dtype=torch.bool)))


def test_a_picture_draws_the_task_s_loss_and_names_the_rest(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    drawn = []
    monkeypatch.setattr(plotting, "save", lambda canvas, path: drawn.append(canvas))
    rows = [{"step": step, "test loss": 2.0 - step, "loss": 9.0, "task": 1.0 / (step + 1)} for step in range(3)]
    terms = [{"entropy": 8.0}] * 3
    histories = [report.History("comet", 0, 0.1, "final", rows, terms=terms)]
    assert report.picture(tmp_path / "plot.png", histories, "loss", "all")
    first, second = drawn[0].axes
    assert (first.get_ylabel(), second.get_ylabel()) == ("test loss", "training loss of the task")
    assert second.get_title() == "also trained: entropy"
    assert [y for _, y in second.lines[0].get_xydata()] == [1, 0.5, pytest.approx(1 / 3)]
