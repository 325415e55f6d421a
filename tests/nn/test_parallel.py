"""Experts across processes: the checks of tests/helpers/ranks, except command.py, on one to four processes (gloo)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from bench.exchange_model import Machine, layer_cost, shares
from tests.helpers.ranks import Ranks, shared


def checks(module: str, line: str = r"def ([a-z]\w+)\(\) -> None:") -> list[str]:
    """Names that the regular expression `line` captures at starts of lines of tests/helpers/ranks/MODULE.py.

    By default it captures the public functions without parameters and without a result.
    """
    return re.findall(
        f"^{line}", (Path(__file__).parents[1] / "helpers" / "ranks" / f"{module}.py").read_text(), re.MULTILINE
    )


pytestmark = pytest.mark.slow  # starts processes


@pytest.fixture
def ranks() -> Ranks:
    return shared()


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("check", checks("exact", r'    "(\w+)": lambda') + checks("exact"))
def test_equals_one_process_bit_for_bit(ranks: Ranks, check: str, n: int) -> None:
    ranks.run("exact", *([check, n] if check in checks("exact") else ["case", n, check]))


MESHES = [(2, 2), (4, 2), (4, 4)]  # (ranks, ranks over which the experts are split)


@pytest.mark.parametrize(("n", "ep"), MESHES)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_five_steps_are_those_of_one_process(ranks: Ranks, kind: str, n: int, ep: int) -> None:
    ranks.run("training", "five_steps", n, ep, kind)


@pytest.mark.parametrize(("kind", "n", "ep"), [("ddp", *mesh) for mesh in [(2, 1), *MESHES]] + [("fsdp", 2, 2)])
def test_steps_differ_from_those_of_one_process_by_the_order_of_sums_alone(
    ranks: Ranks, kind: str, n: int, ep: int
) -> None:
    ranks.run("training", "sums_of_ranks", n, ep, kind)


def test_parameters_gathered_in_bfloat16(ranks: Ranks) -> None:
    ranks.run("training", "narrow_fsdp", 4)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_clip_grad_norm_gives_the_norm_of_one_process(ranks: Ranks, kind: str) -> None:
    ranks.run("training", "norm_of_one_process", 4, kind)
    ranks.run("training", "norm_without_gradients", 2)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_checkpoint_of_four_ranks_goes_on_at_one_and_two(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    ranks.run("training", "save", 4, tmp_path, kind)
    ranks.run("training", "go_on", 2, tmp_path)
    ranks.run("training", "go_on", 1, tmp_path)


def test_a_full_state_dict_goes_from_ranks_to_one_process(ranks: Ranks) -> None:
    ranks.run("training", "full_state", 2)
    ranks.run("training", "dimensions", 4, 2)


@pytest.mark.parametrize("check", checks("layers"))
def test_layers_with_checkpointing_autocast_and_compile(ranks: Ranks, check: str) -> None:
    ranks.run("layers", check, {"compiled": 2, "compiled_around_the_exchange": 1}.get(check, 4))


@pytest.mark.parametrize("check", checks("wrapped"))
def test_layers_under_torchs_wrappers(ranks: Ranks, check: str) -> None:
    ranks.run("wrapped", check, 1)


@pytest.mark.parametrize("name", checks("wrapped", r'        "(\w+)": \('))
def test_layers_with_parameters_that_become_unused_under_ddp(ranks: Ranks, name: str) -> None:
    ranks.run("wrapped", "ddp", 1, name)


@pytest.mark.parametrize("check", checks("refusals"))
def test_bad_use_is_refused_by_name(ranks: Ranks, check: str) -> None:
    ranks.run("refusals", check, 4)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("check", ["uneven", "static", "norms"])
def test_the_collectives_move_the_bytes_of_the_model(ranks: Ranks, check: str, n: int) -> None:
    ranks.run("traffic", check, n)


def test_predicted_time_by_hand() -> None:
    """Two nodes of two ranks: first with even loads, then with an expert that gets 70 % of the choices."""
    machine = Machine(ranks=4, node=2, inside=4e9, outside=1e9, latency=1e-3, flops=1e12)
    even = layer_cost(machine, tokens=1024, dim=64, hidden=128, choices=2, share=shares(4, 0.0), width=2)
    rows_per_rank, row_bytes = 512, 64 * 2
    # Four exchanges of rows and one of counts. The link to the two ranks of the other node takes longest.
    far, near = 2 * rows_per_rank * row_bytes / 1e9, rows_per_rank * row_bytes / 4e9
    assert far > near
    assert even.exchange == pytest.approx(4 * (far + 1e-3) + 1e-3 + 2 * 4 / 1e9)
    assert even.experts == pytest.approx(3 * 2 * 2048 * 64 * 128 * 3 / 1e12)
    assert even.imbalance == 1
    assert even.sent == 4 * 3 * rows_per_rank * row_bytes + 3 * 4
    share = torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.float64)
    hot = layer_cost(machine, tokens=1024, dim=64, hidden=128, choices=2, share=share, width=2)
    assert hot.imbalance == pytest.approx(2.8, rel=1e-3)
    assert hot.experts == pytest.approx(2.8 * even.experts, rel=1e-3)
    with pytest.raises(ValueError, match="4 ranks must divide the experts, got 6"):
        layer_cost(machine, 8, 8, 8, 1, shares(6, 0.0), 2)


def test_the_contenders_of_the_bench_agree(ranks: Ranks) -> None:
    ranks.run("traffic", "contenders", 2)
