"""The training command on several processes (ranks): runs the checks of tests/helpers/ranks/command.py."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import Ranks, shared
from tests.helpers.small_sets import WORDS

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
