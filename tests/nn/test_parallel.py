"""Experts across processes: the checks of tests/helpers/ranks, except command.py, on one to four processes (gloo)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from bench.exchange import Size, predictions
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


def test_the_mode_batch_invariant_has_the_bits_of_three_ranks(ranks: Ranks) -> None:
    ranks.run("exact", "batch_invariant", 3)


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
    few = {"compiled": 2, "compiled_norms": 2, "compiled_around_the_exchange": 1, "policy_of_all_ranks_in_graphs": 2}
    ranks.run("layers", check, few.get(check, 4))


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
@pytest.mark.parametrize("check", ["uneven", "static", "norms", "counter"])
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
    assert hot.exchange == pytest.approx(4 * (2 * 1434 * row_bytes / 1e9 + 1e-3) + 1e-3 + 2 * 4 / 1e9)  # round(1433.6)
    # Rank 0 gets 1434 rows from each rank and the others get 205; what a rank keeps is not sent. A row goes out and its
    # output comes back, then two gradients; rank 0 sends 3 * (205 + 1434) rows twice, the others less.
    assert hot.sent == 2 * 3 * (205 + 1434) * row_bytes + 3 * 4
    with pytest.raises(ValueError, match="4 ranks must divide the experts, got 6"):
        layer_cost(machine, 8, 8, 8, 1, shares(6, 0.0), 2)


@pytest.mark.parametrize("node", [4, 2])
def test_the_slower_of_two_links_decides(node: int) -> None:
    """In one node, and in two nodes with slow links inside, those links decide. A rank's own rows take no time."""
    machine = Machine(ranks=4, node=node, inside=1e6, outside=1e9, latency=1e-3, flops=1e12)
    share = torch.tensor([0.1, 0.2, 0.4, 0.3], dtype=torch.float64)
    found = layer_cost(machine, tokens=500, dim=16, hidden=8, choices=2, share=share, width=4)
    others = node - 1  # ranks at the other ends of a rank's link within the node
    rows = others * 400  # rank 2 gets the most: 400 rows from each of them
    assert found.exchange == pytest.approx(4 * (rows * 16 * 4 / 1e6 + 1e-3) + others * 4 / 1e6 + 1e-3)
    assert found.experts == pytest.approx(3 * (4 * 400) * 2 * (16 * 16 + 8 * 16) / 1e12)
    assert found.imbalance == pytest.approx(1.6)
    alone = layer_cost(Machine(ranks=1), tokens=500, dim=16, hidden=8, choices=2, share=shares(2, 1.0), width=4)
    assert (alone.exchange, alone.imbalance, alone.sent) == (0.0, 1.0, 0)
    assert shares(3, 1.0).tolist() == pytest.approx([6 / 11, 3 / 11, 2 / 11])


def test_a_row_of_predictions_has_the_cost_of_a_layer() -> None:
    machine, size = Machine(ranks=2, node=2, inside=1e6, latency=1e-3, flops=1e9), Size(500, 16, 8, 4, 2)
    even, skewed = predictions(size, [machine], 1.0, 4)
    exchange = 4 * (500 * 16 * 4 / 1e6 + 1e-3) + 2 * 4 / 1e6 + 1e-3  # two experts' counts and half of the 1000 rows
    products = 3 * 1000 * 2 * (16 * 16 + 8 * 16) / 1e9
    share = exchange / (exchange + products)
    # Three times 500 rows to the other rank, and the counts.
    sent = f"{(4 * 500 * 16 * 4 + 2 * 4) / 1e6:.1f}"
    shown = (f"{exchange * 1e3:.2f}", f"{products * 1e3:.2f}", f"{share * 100:.0f} %", sent)
    assert even == ("2", "uniform", "1.00", *shown)
    assert skewed[:3] == ("2", "Zipf 1", f"{2 * (1 + 1 / 2) / (1 + 1 / 2 + 1 / 3 + 1 / 4):.2f}")


def test_the_contenders_of_the_bench_agree(ranks: Ranks) -> None:
    ranks.run("traffic", "contenders", 2)
