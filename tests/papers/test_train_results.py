"""What `moe_kernels.papers.train` reports: values of a swept option, the chosen evaluation, losses, FLOPs, pictures."""

from __future__ import annotations

import csv
import json
import math

import pytest
import torch

from moe_kernels.papers import data, train
from moe_kernels.papers.recipes import Splits, comet
from moe_kernels.papers.train import plotting, report
from moe_kernels.papers.train.loop import Run, area_under_roc
from tests.helpers.planted import interrupt
from tests.helpers.small_sets import blobs


def test_swept_options_are_variants_of_every_side(arguments, tmp_path, capsys):
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
    (line,) = (line for line in printed.splitlines() if line.startswith("comet ") and "=" not in line)
    assert line.split() == ["comet", *(f"{accuracy[f'comet keep={keep}']:.4f}" for keep in ("0.1", "0.5", "1"))]
    assert "dead neurons" in printed
    assert (tmp_path / "sweep.png").read_bytes()[1:4] == b"PNG"
    assert (tmp_path / "model-comet-keep=0.5-0.pt").exists()


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


def test_flops_are_given_with_kept_masks_and_without(arguments, tmp_path, capsys):
    path = tmp_path / "run.json"
    assert train.run(arguments("--check-steps", "0", "--epochs", "0", "--json", str(path))) == 0
    found = {run["side"]: (run["flops"], run["flops_known"]) for run in json.loads(path.read_text())["runs"]}
    routing = 2 * (12 * 24 + 24 * 24 * 2)
    assert found["standard"][0] == found["standard"][1]
    assert routing <= found["comet"][0] - found["comet"][1] <= routing + 3 * 24  # 3 * 24 for k-winner-take-all
    assert "with kept masks" in capsys.readouterr().out


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
