"""The bench of transformers' experts."""

from __future__ import annotations

import pytest
import torch

from bench import transformers as models

SMALL = {"T": 12, "D": 16, "H": 8, "E": 4, "K": 2}


@pytest.mark.parametrize("mode", ["prefill", "training"])
def test_ours_and_the_peers_compute_the_same(mode):
    calls = models._calls(SMALL, torch.float32, "cpu", mode)
    assert set(calls) == {models.OURS, *models.PEERS}
    expected = calls[models.OURS]()
    assert expected.requires_grad == (mode == "training")
    for name, call in calls.items():
        torch.testing.assert_close(call(), expected, msg=name)


def test_a_figure_for_every_shape_and_mode(monkeypatch):
    monkeypatch.setattr(models, "SHAPES", {"small": (torch.float32, SMALL)})
    found = list(models.run(0.02, "cpu"))
    assert [(each["mode"], each["shape"].split()[0]) for each in found] == [
        ("prefill", "T=12"),
        ("training", "T=12"),
        *(("decode", f"T={tokens}") for tokens in models.DECODED),
    ]
    assert all(set(each["peers"]) == set(models.PEERS) and each["us"] > 0 for each in found)


def test_a_peer_that_would_copy_too_many_weights_is_left_out(monkeypatch):
    monkeypatch.setattr(models, "MAX_COPIED_BYTES", 1)
    assert "batched_mm" not in models._calls(SMALL, torch.float32, "cpu", "prefill")
