"""The training command on several processes (ranks): runs the checks of tests/helpers/ranks/command.py."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from moe_kernels.papers.recipes import Batch, Splits, comet
from moe_kernels.papers.train.loop import Run
from moe_kernels.papers.train.ranks import SerialRun, part, rank_random
from tests.helpers.ranks import Ranks, shared
from tests.helpers.small_sets import WORDS, blobs

SIDES = {
    "competesmoe": "smoe switch stable thor compete",
    "vmoe": "bpr expert_choice e3 softmax",
    "movielens": "hash topk+ comet",
}


@pytest.fixture
def ranks() -> Ranks:
    return shared()


@pytest.fixture
def port() -> int:
    """A free TCP port."""
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return each.getsockname()[1]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text(WORDS)
    return path


@pytest.mark.parametrize("recipe", SIDES)
def test_ranks_take_the_steps_of_one_process(ranks: Ranks, port: int, text: Path, recipe: str) -> None:
    data = ["--data", text] if recipe == "competesmoe" else []
    ranks.run("command", "agrees", 2, port, recipe, *data, "--sides", SIDES[recipe])


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_gradients_are_means_over_the_ranks_that_have_the_parameter(ranks: Ranks, ep: int) -> None:
    ranks.run("training", "averaged_gradients", 4, ep)


@pytest.mark.parametrize(
    ("size", "ranks", "expected"),
    [
        (5, 3, [([0], 0.6), ([1, 2], 1.2), ([3, 4], 1.2)]),
        (4, 2, [([0, 1], 1.0), ([2, 3], 1.0)]),
        (2, 4, [([0], 0.0), ([0], 2.0), ([0], 0.0), ([1], 2.0)]),
    ],
)
def test_ranks_share_a_batch(size: int, ranks: int, expected: list[tuple[list[int], float]]) -> None:
    x = torch.randn(size, 3)
    for rank, (own, weight) in enumerate(expected):
        found, given = part(Batch((x, torch.arange(size)), torch.arange(size) + 10, 7), rank, ranks)
        assert given == pytest.approx(weight)
        assert torch.equal(found.tensors[0], x[own])
        assert found.tensors[1].tolist() == own
        assert (found.rows.tolist(), found.start) == ([each + 10 for each in own], 7)
        assert part(Batch((x,), None), rank, ranks)[0].rows is None


@pytest.mark.parametrize("parts", [1, 3, 20])
def test_a_step_in_parts_is_that_of_the_whole_batch(parts: int) -> None:
    """Up to rounding, without random numbers: losses, gradients and routing."""
    points = blobs()
    recipe = comet.Comet(sides=("comet",), width=(8,), keep=0.5, batch_size=16)
    splits = Splits(points, points.train, points.test)
    whole, run = Run(recipe, 0, splits), SerialRun(recipe, 0, splits, parts=parts)
    losses, found = (each.differentiate(each.batch(0)) for each in (whole, run))
    assert losses.keys() == found.keys()
    for name, loss in losses.items():
        torch.testing.assert_close(found[name], loss.detach())
    for one, other in zip(whole.gradients(), run.gradients(), strict=True):
        torch.testing.assert_close(one, other)
    batch = Batch(tuple(each[: 3 * parts] for each in points.test), None)
    for one, other in zip(whole.task.routing(batch), run.task.routing(batch), strict=True):
        assert torch.equal(one.active, other.active)


def test_each_rank_draws_numbers_of_its_own() -> None:
    points, drawn = blobs(), set()
    for seed, step, rank in ((0, 0, 1), (0, 0, 2), (0, 1, 1), (1, 0, 1), (1, 1, 2)):
        run = SerialRun(comet.Comet(sides=("comet",), width=(8,)), seed, Splits(points, points.train, points.test))
        run.step, before = step, torch.get_rng_state()
        for _ in range(2):
            with rank_random(run, rank):
                drawn.add(torch.rand(()).item())
        assert torch.equal(torch.get_rng_state(), before)
        with rank_random(run, 0):
            torch.rand(())
        assert not torch.equal(torch.get_rng_state(), before)
    assert len(drawn) == 5


def test_a_failed_rank_ends_the_run_and_other_numbers_of_ranks_resume_it(
    ranks: Ranks, port: int, text: Path, tmp_path: Path
) -> None:
    ranks.run("command", "stops", 2, port, tmp_path / "run", text)
    assert (tmp_path / "run" / "checkpoint.pt").exists()
    assert not (tmp_path / "run" / "result.json").exists()
    saved = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    live = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["live"]
    groups = [group for run in live.values() for group in run["optimiser"]["param_groups"]]
    assert groups
    # Ranks train with fused=False, but the checkpoint has the value that the recipe gave to the optimiser.
    assert all(group["fused"] is not False for group in groups)
    ranks.run("command", "whole", 1, port, tmp_path / "whole", text)
    for number in (1, 4):
        (tmp_path / "run" / "checkpoint.pt").write_bytes(saved)
        ranks.run("command", "goes_on", number, port, tmp_path / "run", text, tmp_path / "whole")


def test_a_rank_that_hangs_or_is_missing_ends_the_run_in_time(
    ranks: Ranks, port: int, text: Path, tmp_path: Path
) -> None:
    ranks.run("command", "hangs", 2, port, text, tmp_path / "ended")
    ranks.run("command", "missing", 2, port, text)


def test_all_ranks_end_on_a_full_disk(ranks: Ranks, port: int, text: Path, tmp_path: Path) -> None:
    ranks.run("command", "full_disk", 2, port, tmp_path / "run", text)


def test_all_ranks_end_if_another_run_holds_the_folder(ranks: Ranks, port: int, text: Path, tmp_path: Path) -> None:
    ranks.run("command", "locked", 2, port, tmp_path / "run", text)


def test_a_run_that_cannot_start_explains_why(ranks: Ranks, port: int, text: Path) -> None:
    ranks.run("command", "refused", 2, port, text)


def test_the_tutorial_runs_on_two_ranks(ranks: Ranks, port: int, tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "tutorials" / "expert_parallel.md"
    ranks.run("command", "tutorial", 2, port, page, tmp_path)
