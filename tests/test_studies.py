"""The studies of paper 000: what they count, by hand on small networks, and what they write."""

from __future__ import annotations

import csv

import pytest
import torch

from moe_kernels import data, studies
from moe_kernels.__main__ import main
from moe_kernels.nn.comet import CometMLP, FixedRouting
from moe_kernels.studies import similarity, utilisation


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("fresh", [(), ("--fresh",)])
def test_similarity_of_masks_and_activations(tmp_path, capsys, fresh):
    """More alike inputs have more alike masks; a dense network's masks are all alike."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    words = ["--pairs", "30", "--networks", "2", "--hidden", "40", "--layers", "2", "--keep", "0.2", "1"]
    assert main(["study", "similarity", *words, *fresh, "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / "similarity.csv")
    assert len(rows) == 60
    assert all(float(row["masks"]) == pytest.approx(1) for row in rows if row["keep"] == "1.0")
    sparse = [row for row in rows if row["keep"] == "0.2"]
    assert all(0 <= float(row["masks"]) <= 1 for row in sparse)
    printed = capsys.readouterr().out
    assert "similarity: seed 0" in printed
    (line,) = (line.split() for line in printed.splitlines() if line.startswith("0.2"))
    assert float(line[1]) > 0.7
    assert (tmp_path / "similarity.png").read_bytes()[1:4] == b"PNG"


def test_similarities_are_those_of_the_network():
    study = similarity.Similarity(inputs=7, hidden=12, layers=3)
    network = CometMLP((7, 12, 12, 12, 1), 0.25, activation="tanh", generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 4, 7)
    masks, activations = study._similarities(network, x, 0.25)
    bits = [torch.cat(network.masks(each), -1).float() for each in x]
    torch.testing.assert_close(masks, (bits[0] * bits[1]).sum(-1) / 9)  # three of twelve in every layer
    layers = []
    for each in x:
        h, found = each, []
        for layer, mask in zip(network.hidden, network.masks(each), strict=True):
            h = torch.tanh(h @ layer.weight.t() + layer.bias) * mask
            found.append(h)
        layers.append(torch.cat(found, -1))
    torch.testing.assert_close(activations, torch.cosine_similarity(*layers), rtol=1e-4, atol=1e-5)


def test_utilisation_counts_dead_neurons_and_those_that_another_set_wakes(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    draw = torch.Generator().manual_seed(0)
    y, found = torch.zeros(20, dtype=torch.long), {}
    for name, shift in (("one", 1.0), ("two", -1.0)):
        x = shift + 0.2 * torch.randn(20, 9, generator=draw)
        found[name] = data.Images(name, x[:10], y[:10], x[10:], y[10:], ("a",), (1, 3, 3))
    monkeypatch.setattr(utilisation, "load", found.get)
    routers = []
    kept = FixedRouting.__init__

    def note(self, *args, **kwargs):
        kept(self, *args, **kwargs)
        routers.append(self)

    monkeypatch.setattr(FixedRouting, "__init__", note)
    words = ["--data", "one", "--other", "two", "--networks", "6", "--width", "20", "30", "--out", str(tmp_path)]
    assert main(["study", "utilisation", *words]) == 0
    rows = read(tmp_path / "utilisation.csv")
    assert len(rows) == len(routers) == 6
    for row, router in zip(rows, routers, strict=True):
        assert 20 <= int(row["width"]) <= 30
        assert 0 < float(row["keep"]) <= 0.95
        masks = {name: router.masks(torch.cat([each.train_x, each.test_x])) for name, each in found.items()}
        dead = [~mask.any(0) for mask in masks["one"]]
        assert int(row["dead"]) == sum(int(each.sum()) for each in dead)
        woken = sum(int((d & mask.any(0)).sum()) for d, mask in zip(dead, masks["two"], strict=True))
        assert int(row["woken"]) == woken
    assert sum(int(row["woken"]) for row in rows) > 0
    assert "all" in capsys.readouterr().out
    assert (tmp_path / "utilisation.png").read_bytes()[1:4] == b"PNG"


def test_a_study_that_cannot_start_says_why(capsys):
    assert main(["study", "utilisation", "--data", "/no/such/place"]) == 2
    assert capsys.readouterr().err.startswith("study: ")
    with pytest.raises(SystemExit):
        main(["study", "tea"])
    assert "there is no study 'tea'; there are similarity, utilisation" in capsys.readouterr().err
    assert studies.names() == ["similarity", "utilisation"]
