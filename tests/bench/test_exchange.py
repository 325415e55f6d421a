"""`python -m bench exchange`: measured and predicted bytes and times of experts across processes."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from bench import exchange_model
from bench.console import console
from tests.helpers.bench import run


def test_bytes_sent_and_predicted_have_one_unit(monkeypatch) -> None:
    from bench import exchange  # imports torch.distributed.tensor, slowly

    line = exchange.Line(2, "ours", 0.25, 0.5, 3_456_000, 3_456_000)
    monkeypatch.setattr(exchange, "run", lambda ranks, size, seconds: [line])
    done = run("exchange", "--ranks", 2, "--seconds", 1, "--predict", 8)
    assert done.exit_code == 0, done.output
    assert re.search(r"2 +ours +0\.2500 +0\.5000 +3\.46 +3\.46\b", done.output.replace("│", " "))


def test_an_exchange_of_no_seconds_is_only_predicted(monkeypatch, stored) -> None:
    from bench import exchange

    monkeypatch.setattr(exchange, "run", None)
    monkeypatch.setattr(console, "width", 120)
    done = run("exchange", "--seconds", 0, "--predict", 2, "--predict", 8, "--skew", 1.5)
    assert done.exit_code == 0, done.output
    stored("bench_exchange_command", done.output, tolerance=1e-6)


def test_bytes_of_uneven_rows_by_hand() -> None:
    """Rows of 3 elements and outputs of 5, of 2 bytes each; 4 experts, so that a rank counts 2 of the other's."""
    rows = torch.tensor([[10, 7], [4, 90]])
    found = exchange_model.exchange_bytes(rows, 3, 5, 2, 4)
    assert found.sent_forward == [2 * (7 * 3 + 4 * 5) + 8, 2 * (4 * 3 + 7 * 5) + 8]
    assert found.sent_backward == [2 * (7 * 5 + 4 * 3), 2 * (4 * 5 + 7 * 3)]
    assert exchange_model.norm_bytes(4, 10, 3, 8, 2) == 3 * (4 + 10 * 3 * 2 + 10 * 2 * 2)


def test_a_layers_time_and_bytes_by_hand() -> None:
    """Two nodes of one rank each. Of 80 rows a rank, 60 go to the busy rank; a row has 2 x 2 bytes."""
    machine = exchange_model.Machine(2, node=1, inside=1e30, outside=10.0, latency=0.5, flops=100.0)
    share = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
    found = exchange_model.layer_cost(machine, 40, 2, 7, 2, share, 2)
    counts = 4 * 2 / 10 + 0.5  # the numbers of rows of two experts
    rows = 60 * 4 / 10 + 0.5  # the busy rank receives 60 rows from the other one, and sends 60 back
    assert found.exchange == pytest.approx(counts + 2 * (rows + rows))
    assert found.experts == pytest.approx(3 * 2 * 120 * 2 * 7 * 3 / 100)
    assert found.imbalance == 1.5
    assert found.total == found.exchange + found.experts
    assert found.sent == 2 * (20 + 60) * 4 + 4 * 2
    with pytest.raises(ValueError, match="layer_cost: 2 ranks must divide the experts, got 3"):
        exchange_model.layer_cost(machine, 40, 2, 7, 2, share[:3], 2)


def test_a_link_within_a_node_and_one_to_others_work_at_the_same_time() -> None:
    machine = exchange_model.Machine(4, node=2, inside=10.0, outside=2.0, latency=1.0)
    sizes = torch.zeros(4, 4)
    sizes[0, 1], sizes[0, 0] = 60.0, 1e9  # own rows are not sent
    assert exchange_model._all_to_all(machine, sizes) == pytest.approx(6 + 1)
    sizes[0, 2] = sizes[1, 2] = 9.0  # rank 2 receives both
    assert exchange_model._all_to_all(machine, sizes) == pytest.approx(9 + 1)
    assert exchange_model._all_to_all(machine, sizes.T) == pytest.approx(9 + 1)
