"""`python -m bench exchange`: measured and predicted bytes and times of experts across processes."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
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
