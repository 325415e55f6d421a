"""The order of a comparison: its folder, seeds, evaluations, checkpoints and what it prints."""

from __future__ import annotations

import csv
import dataclasses
import math
import re

import pytest
import torch

from moe_kernels.papers.recipes import Splits, comet, vmoe
from moe_kernels.papers.train import checkpoint, comparison
from moe_kernels.papers.train.comparison import Comparison
from moe_kernels.papers.train.loop import Run
from tests.helpers.small_sets import blobs

SMALL = comet.Comet(sides=("standard",), width=(8,), batch_size=16, epochs=2, check_steps=0)  # 3 steps an epoch


def compare(recipe=SMALL, seeds=1, every=0, out=None, **more):
    points = blobs()
    return Comparison(recipe, Splits(points, points.train, points.test), seeds, every, out, **more)


def test_the_first_rank_makes_the_folder_with_those_above_it(tmp_path):
    actions = []
    compare(out=tmp_path / "a" / "b", on_first=actions.append)
    assert not (tmp_path / "a").exists()
    for _ in range(2):
        actions[0]()
        assert (tmp_path / "a" / "b").is_dir()
    assert compare(out=tmp_path / "c" / "d").checkpoint == tmp_path / "c" / "d" / "checkpoint.pt"
    assert (tmp_path / "c" / "d").is_dir()
    assert compare().checkpoint is None


def test_the_last_seed_is_below_two_to_the_31():
    last = 2**31 - 4
    found = compare(dataclasses.replace(SMALL, seed=last), seeds=3)
    assert list(found.seeds) == [last, last + 1, last + 2]
    for seed in (-1, last + 1):
        with pytest.raises(ValueError, match=f"^seed must be from 0 to {last}, got {seed}$"):
            compare(dataclasses.replace(SMALL, seed=seed), seeds=3)


@pytest.mark.parametrize(
    ("every", "steps", "points"),
    [(0, 0, [3, 6]), (4, 0, [4, 6]), (6, 0, [6]), (7, 0, [6]), (2, 5, [2, 4, 5]), (0, 7, [3, 6, 7]), (1, 2, [1, 2])],
)
def test_runs_are_evaluated_and_saved_after_these_steps(tmp_path, every, steps, points):
    found, lines, saved = compare(dataclasses.replace(SMALL, steps=steps), 1, every, tmp_path), [], []
    original = found._save
    found._save = lambda: saved.append({key: run.step for key, run in found.live.items()}) or original()
    found.train(lambda: None, lines.append)
    (run,) = found.histories()
    assert [row["step"] for row in run.rows] == points
    assert saved == [{"standard, seed 0": step} for step in points[:-1]] + [{}]
    assert [int(re.match(r"step +(\d+)  standard, seed 0  task ", line)[1]) for line in lines] == points
    assert found.total_steps == points[-1]


def test_a_run_without_steps_is_evaluated_once():
    found = compare(dataclasses.replace(SMALL, epochs=0))
    found.train(lambda: None, lambda line: None)
    (run,) = found.histories()
    assert [row["step"] for row in run.rows] == [0]
    assert (run.stage, run.chosen, found.total_steps) == ("final", 0, 0)


def test_sides_train_in_turns_seed_by_seed():
    order = []

    class Noted(Run):
        def advance(self, to, tick=None):
            order.append((self.recipe.side, self.seed, self.recipe.seed, to))
            super().advance(to)

    found = compare(dataclasses.replace(SMALL, sides=("standard", "comet"), seed=4), 2, make=Noted)
    found.train(lambda: None, lambda line: None)
    assert order == [(side, seed, seed, to) for seed in (4, 5) for to in (3, 6) for side in ("standard", "comet")]
    assert [(run.side, run.seed) for run in found.histories()] == [
        (side, seed) for seed in (4, 5) for side in ("standard", "comet")
    ]


def test_tuning_is_listed_before_the_final_runs_of_its_seed():
    found, said = compare(dataclasses.replace(SMALL, sides=("standard", "comet"), tune=(0.1, 0.2), epochs=1), 2), []
    found.train(lambda: None, said.append)
    listed = [(run.seed, run.stage, run.side) for run in found.histories()]
    tuned = [(0, "tune", side) for side in ("standard", "comet") for _ in range(2)]
    assert listed == tuned + [(seed, "final", side) for seed in (0, 1) for side in ("standard", "comet")]
    rates = {run.side: run.lr for run in found.histories() if run.stage == "final"}
    assert [line for line in said if not line.startswith("step")] == [
        f"{side}: learning rate {rate:g}" for side, rate in rates.items()
    ]


def test_the_log_of_an_interrupted_comparison_has_its_open_run(tmp_path):
    def stop():
        if len(ticks) == 4:
            raise KeyboardInterrupt
        ticks.append(1)

    found, ticks = compare(dataclasses.replace(SMALL, sides=("l1",)), out=tmp_path), []
    with pytest.raises(KeyboardInterrupt):
        found.train(stop, lambda line: None)
    with (tmp_path / "log.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert (line["side"], line["stage"], line["seed"], line["step"]) == ("l1, seed 0", "running", "0", "3")
    assert float(line["loss: l1"]) > 0
    assert found.saved
    (state,) = checkpoint.load(tmp_path / "checkpoint.pt", ("live",))["live"].values()
    assert state["step"] == 3


def test_every_setting_that_differs_from_a_checkpoints_is_told_in_order(tmp_path):
    compare(out=tmp_path)._save()
    compare(dataclasses.replace(SMALL, data="elsewhere"), out=tmp_path).resume()
    other = dataclasses.replace(SMALL, width=(9,), lr=0.5, momentum=0.25, batch_size=8, keep=0.125, seed=2)
    listed = "batch_size 16, not 8, every 0, not 3, keep 0.5, not 0.125, lr 0.01, not 0.5, momentum 0.9, not 0.25, "
    listed += "seed 0, not 2, seeds 1, not 2, width (8,), not (9,)"
    message = f"{tmp_path / 'checkpoint.pt'} belongs to a run with {listed}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        compare(other, 2, 3, tmp_path).resume()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"sources": "abc"}, "sources 'abc', not "),
        ({"dataset": "other"}, "dataset 'other', not 'blobs'"),
        ({"training samples": 9}, "training samples 9, not 48"),
        ({"test samples": 9}, "test samples 9, not 48"),
        ({"recipe": "VMoE"}, "recipe 'VMoE', not 'Comet'"),
        ({"new": 1}, "new 1, not None"),
    ],
)
def test_a_checkpoint_of_other_data_or_code_is_refused(tmp_path, changed, told):
    found = compare(out=tmp_path)
    state = {"settings": found._settings() | changed, "done": {}, "live": {}}
    checkpoint.save(tmp_path / "checkpoint.pt", state)
    with pytest.raises(ValueError, match=f"belongs to a run with {told}"):
        found.resume()
    assert not found.saved


@pytest.mark.parametrize(("chosen", "right"), [(-3, False), (-2, True), (-1, True), (1, True), (2, False)])
def test_the_chosen_row_of_a_finished_run_exists(chosen, right):
    found = compare()
    found.train(lambda: None, lambda line: None)
    (key,), (run,) = found.done, found.done.values()
    fields = dataclasses.asdict(run) | {"chosen": chosen, "terms": []}
    if right:
        read = found._history(key, fields)
        assert (read.chosen, read.terms, len(read.rows)) == (chosen, [{}, {}], 2)
        return
    with pytest.raises(ValueError, match=f"^standard, seed 0 has no row {chosen}$"):
        found._history(key, fields)


def test_variants_that_differ_in_unused_options_are_twins_of_the_first():
    recipe = vmoe.VMoE(sides=("dense", "vmoe"), experts=(4, 8), hidden=(8, 16))
    names = list(recipe.variants())
    assert comparison.twins(recipe.variants()) == {
        f"dense hidden={hidden} experts=8": f"dense hidden={hidden} experts=4" for hidden in (8, 16)
    }
    assert len(names) == 8


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"loss": 1.5}, "loss 1.5000  test accuracy 0.2500  4.00 ms/step"),
        ({"loss": math.nan, "seconds": math.nan}, "test accuracy 0.2500"),
        ({"loss": 1.5, "task": 1.25}, "task 1.2500  test accuracy 0.2500  4.00 ms/step"),
        ({"loss": 1.5, "text": 1.0}, "text 1.0000  test accuracy 0.2500  4.00 ms/step"),
        ({"loss": math.nan, "task": math.nan}, "test accuracy 0.2500  4.00 ms/step"),
        (
            {"loss": 2.0, "valid accuracy": 0.125, "test AUC": math.nan, "experts": 3.0},
            "loss 2.0000  valid accuracy 0.1250  test AUC nan  test accuracy 0.2500  4.00 ms/step",
        ),
    ],
)
def test_a_printed_line_has_the_tasks_loss_and_the_measures(row, line):
    """A loss of no step is left out, but a measure that is no number is shown."""
    whole = {"step": 12, "epoch": 0.5} | row | {"test accuracy": 0.25, "seconds": row.get("seconds", 0.004)}
    assert comparison._line("side", whole) == f"step     12  side  {line}"


def test_a_pair_for_the_check_has_equal_weights_and_batches():
    found = compare(dataclasses.replace(SMALL, seed=3))
    run, make = found.pair(found.variants["standard"])
    other = make()
    assert run is not other
    assert (run.seed, other.seed) == (3, 3)
    for one, two in zip(run.task.model.parameters(), other.task.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert torch.equal(run.batch(1).rows, other.batch(1).rows)
