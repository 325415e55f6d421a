"""Studies of COMET fixed routing (similarity, utilisation) and of COMET trees (permutation, search), on small data."""

from __future__ import annotations

import csv
import itertools
import math

import pytest
import scipy.optimize
import torch

from moe_kernels.__main__ import main
from moe_kernels.nn import LocalSearch
from moe_kernels.nn.comet import CometMLP, FixedRouting
from moe_kernels.papers import data, sources, studies
from moe_kernels.papers.recipes import Batch, Splits, movielens
from moe_kernels.papers.studies import permutation, search, similarity, utilisation
from moe_kernels.papers.train.loop import Run
from tests.helpers.results import options_of
from tests.helpers.small_sets import WORDS, ratings


def shown(printed, folder, pictures):
    return "\n".join([printed.replace(str(folder), "FOLDER"), *pictures])


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_options_of_every_study(stored):
    lines = [f"{name}\n{options_of(studies.find(name))}" for name in studies.names()]
    stored("study_options", "\n".join(lines))


@pytest.mark.parametrize("fresh", [(), ("--fresh",)])
def test_similarity_of_masks_and_activations(tmp_path, capsys, stored, pictures, fresh):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    words = ["--pairs", "30", "--networks", "2", "--hidden", "40", "--layers", "2", "--keep", "0.2", "1"]
    assert main(["study", "similarity", *words, *fresh, "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / "similarity.csv")
    assert {row["sources"] for row in rows} == {sources.digest("studies", "similarity")}
    assert len(rows) == 60
    assert all(float(row["masks"]) == pytest.approx(1) for row in rows if row["keep"] == "1.0")
    sparse = [row for row in rows if row["keep"] == "0.2"]
    assert all(0 <= float(row["masks"]) <= 1 for row in sparse)
    printed = capsys.readouterr().out
    stored(f"study_similarity{'_fresh' * bool(fresh)}", shown(printed, tmp_path, pictures), tolerance=1e-3)
    assert "similarity: seed 0" in printed
    (line,) = (line.split() for line in printed.splitlines() if line.startswith("0.2"))
    assert float(line[1]) > 0.7
    assert (tmp_path / "similarity.png").read_bytes()[1:4] == b"PNG"


def test_slope_and_correlation_by_hand():
    a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 2.0, -3.0])
    assert similarity._slope(a, b) == pytest.approx(-3.5)
    assert similarity._correlation(a, b) == pytest.approx(-1)
    assert similarity._correlation(a, torch.tensor([5.0, 9.0, 7.0])) == pytest.approx(0.5)
    constant = torch.ones(3)
    assert math.isnan(similarity._slope(constant, b))
    assert similarity._slope(a, constant) == 0
    assert math.isnan(similarity._correlation(a, constant))
    assert math.isnan(similarity._correlation(constant, b))


def test_similarities_are_those_of_the_network():
    study = similarity.Similarity(inputs=7, hidden=12, layers=3)
    network = CometMLP((7, 12, 12, 12, 1), 0.25, activation="tanh", generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 4, 7)
    masks, activations = study._similarities(network, x, 0.25)
    bits = [torch.cat(network.masks(each), -1).float() for each in x]
    torch.testing.assert_close(masks, (bits[0] * bits[1]).sum(-1) / 9)  # 9: three of twelve in each of three layers
    layers = []
    for each in x:
        h, found = each, []
        for layer, mask in zip(network.hidden, network.masks(each), strict=True):
            h = torch.tanh(h @ layer.weight.t() + layer.bias) * mask
            found.append(h)
        layers.append(torch.cat(found, -1))
    torch.testing.assert_close(activations, torch.cosine_similarity(*layers), rtol=1e-4, atol=1e-5)


def test_the_printed_similarity_by_hand(capsys):
    inputs = torch.tensor([0.0, 0.25, 1.0, 0.5])
    assert similarity._slope(inputs, 3 * inputs - 1) == pytest.approx(3)
    assert similarity._slope(3 * inputs - 1, inputs) == pytest.approx(1 / 3)
    assert similarity._correlation(inputs, inputs**3) == pytest.approx(1)
    assert similarity._correlation(inputs, torch.tensor([3.0, 1.0, 2.0, 0.0])) == pytest.approx(-0.4)  # 1 - 6 * 14 / 60


@pytest.mark.parametrize("fresh", [False, True])
def test_similarities_are_means_over_the_networks(tmp_path, monkeypatch, fresh):
    """The nth network gives n for masks and 10 n for activations."""
    calls = []

    def similarities(study, network, x, p):
        calls.append(p)
        n = torch.full((x.shape[1],), float(len(calls)))
        return n, 10 * n

    monkeypatch.setattr(similarity.Similarity, "_similarities", similarities)
    monkeypatch.setattr(similarity, "write_picture", lambda *given, **options: True)
    study = similarity.Similarity(pairs=2, networks=3, hidden=4, layers=1, keep=(0.5,), fresh=fresh)
    study.run(tmp_path)
    rows = read(tmp_path / "similarity.csv")
    assert [float(row["masks"]) for row in rows] == pytest.approx([2, 5] if fresh else [2, 2])
    assert [float(row["activations"]) for row in rows] == pytest.approx([20, 50] if fresh else [20, 20])
    draw = torch.Generator().manual_seed(0)
    means = torch.randint(0, 101, (2, 2, 1), generator=draw)
    x = means + 5 * torch.randn(2, 2, 100, generator=draw)
    assert [float(row["inputs"]) for row in rows] == pytest.approx(torch.cosine_similarity(*x).tolist(), rel=1e-5)


def test_the_printed_utilisation_by_hand(capsys):
    """Two networks of 100 and 300 neurons in one range of p, one of 50 in another; 8 dead neurons, of which 2 wake."""
    rows = [
        {"keep": keep, "neurons": neurons, "dead": dead, "woken": woken}
        for keep, neurons, dead, woken in ((0.06, 100, 6, 1), (0.2, 300, 0, 0), (1.0, 50, 2, 1))
    ]
    utilisation.UtilisationStudy()._print(rows)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "0.05 to 0.25 2 400 1.50e-02 50.0% 16.7%" in lines
    assert "0.95 to 1 1 50 4.00e-02 100.0% 50.0%" in lines
    assert "all 3 450 1.78e-02 66.7% 25.0%" in lines


def test_utilisation_counts_dead_neurons_and_those_active_on_another_set(
    tmp_path, capsys, monkeypatch, stored, pictures
):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    draw = torch.Generator().manual_seed(0)
    y, found = torch.zeros(20, dtype=torch.long), {}
    for name, shift in (("one", 1.0), ("two", -1.0)):
        x = shift + 0.2 * torch.randn(20, 9, generator=draw)
        found[name] = data.Images(name, x[:10], y[:10], x[10:], y[10:], ("a",), (1, 3, 3))
    monkeypatch.setattr(data, "load", found.get)
    routers = []
    kept = FixedRouting.__init__

    def note(self, *args, **kwargs):
        kept(self, *args, **kwargs)
        routers.append(self)

    monkeypatch.setattr(FixedRouting, "__init__", note)
    words = [
        "--data",
        "one",
        "--other",
        "two",
        "--networks",
        "6",
        "--width",
        "20",
        "30",
        "--out",
        str(tmp_path / "new" / "er"),
    ]
    assert main(["study", "utilisation", *words]) == 0
    printed = capsys.readouterr().out
    stored("study_utilisation", shown(printed, tmp_path, pictures), tolerance=1e-3)
    rows = read(tmp_path / "new" / "er" / "utilisation.csv")
    assert len(rows) == len(routers) == 6
    least = []
    for row, router in zip(rows, routers, strict=True):
        assert 20 <= int(row["width"]) <= 30
        assert 0 < float(row["keep"]) <= 0.95
        masks = {name: router.masks(torch.cat([each.train_x, each.test_x])) for name, each in found.items()}
        dead = [~mask.any(0) for mask in masks["one"]]
        assert int(row["dead"]) == sum(int(each.sum()) for each in dead)
        assert int(row["neurons"]) == 3 * int(row["width"])
        least.append([mask.float().mean(0).min().item() for mask in masks["one"]])
        assert float(row["least"]) == pytest.approx(min(least[-1]))
        woken = sum(int((d & mask.any(0)).sum()) for d, mask in zip(dead, masks["two"], strict=True))
        assert int(row["woken"]) == woken
    assert sum(int(row["woken"]) for row in rows) > 0
    assert any(min(each) < max(each) for each in least)
    assert "all" in printed
    assert (tmp_path / "new" / "er" / "utilisation.png").read_bytes()[1:4] == b"PNG"


def test_the_sets_of_a_utilisation_have_equally_many_pixels(monkeypatch, capsys):
    y, found = torch.zeros(4, dtype=torch.long), {}
    for name, side in (("one", 3), ("two", 4)):
        x = torch.randn(4, side * side)
        found[name] = data.Images(name, x, y, x, y, ("a",), (1, side, side))
    monkeypatch.setattr(data, "load", found.get)
    for centre in ("--centre", "--no-centre"):
        assert main(["study", "utilisation", "--data", "one", "--other", "two", centre]) == 2
        assert capsys.readouterr().err == "study: utilisation: two must have 9 pixels, got 16\n"


def test_the_picture_of_a_search_has_the_trials_as_x(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    axes = Figure().subplots(squeeze=False)
    monkeypatch.setattr(search, "write_picture", lambda path, draw, **size: draw(axes))
    search._draw(tmp_path / "picture.png", {"tree": {1: 0.5, 4: 0.25}, "hash": {1: 0.75}})
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes[0, 0].lines}
    assert lines == {"tree": ([1, 4], [0.5, 0.25]), "hash": ([1], [0.75])}


def test_a_study_that_cannot_start_explains_why(capsys):
    assert main(["study", "utilisation", "--data", "/no/such/place"]) == 2
    assert capsys.readouterr().err.startswith("study: ")
    with pytest.raises(SystemExit):
        main(["study", "tea"])
    assert "there is no study 'tea'; there are permutation, search, similarity, utilisation" in capsys.readouterr().err
    assert studies.names() == ["permutation", "search", "similarity", "utilisation"]


@pytest.mark.parametrize("status", [0, 2])
def test_a_study_has_threads_of_its_own(monkeypatch, status):
    used, before = [], torch.get_num_threads()

    def run(study, out):
        used.append(torch.get_num_threads())
        if status:
            raise ValueError

    monkeypatch.setattr(similarity.Similarity, "run", run)
    assert main(["study", "similarity", "--threads", str(before + 1)]) == status
    assert (used, torch.get_num_threads()) == ([before + 1], before)


@pytest.mark.parametrize(
    ("study", "kind"), [("utilisation", "Images"), ("permutation", "Ratings"), ("search", "Ratings")]
)
def test_a_study_says_which_kind_of_data_it_needs(tmp_path, capsys, study, kind):
    path = tmp_path / "words.txt"
    path.write_text(WORDS)
    assert main(["study", study, "--data", str(path)]) == 2
    assert capsys.readouterr().err == f"study: {study} needs {kind}, but {path} has words\n"


@pytest.mark.parametrize("sign", [1, -1])  # Jester has ratings below 0
def test_the_cost_of_a_permutation_is_the_loss_under_it(sign):
    """The sum of a permutation's costs, divided by the 80 training examples, is the loss with the table permuted."""
    points = ratings()
    recipe = movielens.MovieLens(sides=("hash",), experts=4, rows=0, dropout=0.0, batch_size=80)
    *ids_and_watched, stars = points.train
    train = (*ids_and_watched, sign * stars)
    run = Run(recipe, 0, Splits(points, train, points.test))
    gate = run.task.model.moe.gates[0]
    table, cost = gate.table.clone(), permutation.costs(run, gate)
    assert torch.equal(gate.table, table)
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)):
        gate.load_state_dict({"table": torch.tensor(order, dtype=torch.int32)[table.long()]})
        with torch.no_grad():
            loss = run.task.loss(Batch(train, None))["task"]
        assert cost[torch.arange(4), torch.tensor(order)].sum().item() / 80 == pytest.approx(loss.item(), rel=1e-5)


def test_the_cost_of_a_permutation_without_ratings_is_that_of_watching():
    points = ratings()
    *ids_and_watched, stars = points.train
    recipe = movielens.MovieLens(sides=("hash",), experts=4, rows=0, dropout=0.0, watched_weight=0.25)
    run = Run(recipe, 0, Splits(points, (*ids_and_watched, torch.zeros_like(stars)), points.test))
    gate = run.task.model.moe.gates[0]
    cost = permutation.costs(run, gate)
    with torch.no_grad():
        watched, _, _ = run.task.model.eval()(*ids_and_watched[:2])
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(watched, ids_and_watched[2], reduction="none")
    expected = [0.25 * entropy[gate.table[ids_and_watched[0]] == expert].sum().item() for expert in range(4)]
    assert cost.diagonal().tolist() == pytest.approx(expected)


def test_what_a_permutation_gains_is_between_the_mean_and_the_best(tmp_path, monkeypatch, capsys, stored, pictures):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.setattr(data, "load", lambda name: ratings())
    words = ["--data", "tastes", "--rows", "80", "--epochs", "40", "--seeds", "2", "--experts", "4", "--lr", "0.01"]
    assert main(["study", "permutation", *words, "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / "permutation.csv")
    assert len(rows) == 2 * (4 + 2 * 2)
    for row in rows:
        assert 0 < float(row["test loss"]) < 12  # 3.5 to 10.7 over six seeds
        if row["arm"] in ("random", "best"):
            best, after, mean = (float(row[name]) for name in ("best of all", "after", "mean of all"))
            assert best <= after + 1e-9
            assert best <= mean
            assert row["arm"] == "random" or after == pytest.approx(best)
    assert all(float(row["distance"]) < 1e-3 for row in rows if row["arm"] == "wide")
    printed = capsys.readouterr().out
    assert "best after epoch 1" in printed
    stored("study_permutation", shown(printed, tmp_path, pictures), tolerance=0.1)  # SSE2 against AVX-512: 3 %


@pytest.mark.parametrize("arm", ["random", "best"])
def test_what_all_permutations_cost(monkeypatch, arm):
    """Compares with all 24 permutations of four experts, for costs drawn at random."""
    points = ratings()
    recipe = movielens.MovieLens(sides=("hash",), experts=4, rows=0)
    run = Run(recipe, 0, Splits(points, points.train, points.test))
    cost = torch.rand(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(permutation, "costs", lambda run, gate: cost)
    gate = run.task.model.moe.gates[0]
    before = gate.table.clone()
    found = permutation.Permutation(experts=4)._permute(run, arm, 1)
    losses = {
        order: sum(cost[i, j].item() for i, j in enumerate(order)) / 80 for order in itertools.permutations(range(4))
    }
    moved = {int(old): int(new) for old, new in zip(before, gate.table, strict=True)}
    assert found["before"] == pytest.approx(losses[0, 1, 2, 3])
    assert found["mean of all"] == pytest.approx(sum(losses.values()) / 24)
    assert found["best of all"] == pytest.approx(min(losses.values()))
    assert found["after"] == pytest.approx(losses[tuple(moved[expert] for expert in range(4))])
    assert (found["after"] == pytest.approx(min(losses.values()))) == (arm == "best")


def test_an_arm_reports_how_many_experts_moved(monkeypatch):
    class Finished(Run):
        def advance(self, to, tick=None):
            self.rows.append({"test loss": 2.0, "test watched accuracy": 0.5})
            self.task.model.moe.search.source.copy_(torch.tensor([[1, 2, 0, 3]]))

    monkeypatch.setattr(permutation, "Run", Finished)
    row = permutation.Permutation(experts=4, rows=40)._arm(ratings(), "wide", -1, 0)
    assert (row["moved"], row["test loss"], row["test watched accuracy"]) == (3, 2.0, 0.5)


@pytest.mark.parametrize("schedule", ["paper", "wide"])
def test_which_schedule_ends_in_a_permutation(schedule):
    found = []
    for seed in range(30):
        search = LocalSearch(16, 100, schedule=schedule, generator=torch.Generator().manual_seed(seed)).train()
        search.step = 98
        for _ in range(2):
            search.permutation()
        found.append(search.distance.item() < 1e-3)
        if schedule == "wide":  # the permutation has the largest sum of scores
            _, columns = scipy.optimize.linear_sum_assignment(-search.scores.detach()[0].numpy())
            assert search.source[0][torch.tensor(columns)].tolist() == list(range(16))
    assert sum(found) == (30 if schedule == "wide" else 0)


def test_a_random_search_and_its_bootstrap(tmp_path, monkeypatch, capsys, stored, pictures):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.setattr(data, "load", lambda name: ratings())
    words = ["--data", "tastes", "--trials", "4", "--epochs", "3", "--patience", "1", "--sides", "hash", "comet+"]
    assert main(["study", "search", *words, "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / "search.csv")
    assert [(row["side"], row["trial"]) for row in rows] == [(s, str(t)) for t in range(4) for s in ("hash", "comet+")]
    assert all(5e-5 <= float(row["lr"]) <= 5e-4 for row in rows)
    assert len({row["lr"] for row in rows}) == 8
    assert {float(row["gamma"]) for row in rows if row["side"] == "comet+"} == {10.0}
    assert {float(row["lambda"]) for row in rows} <= {0.05, 0.1, 0.5, 1, 5, 10}
    assert [row["side"] for row in read(tmp_path / "bootstrap.csv")] == ["hash"] * 2 + ["comet+"] * 2
    printed = capsys.readouterr().out
    assert "best of 2" in printed
    stored("study_search", shown(printed, tmp_path, pictures), tolerance=1e-2)


def test_the_bootstrap_takes_the_test_loss_of_the_best_validation_loss():
    """If one of three trials is drawn, the expected test loss is (9 + 4 + 1) / 3."""
    rows = [{"valid loss": valid, "test loss": test} for valid, test in ((1.0, 9.0), (2.0, 4.0), (3.0, 1.0))]
    assert search.bootstrap(rows, 4000) == {1: pytest.approx(14 / 3, abs=0.2)}
    found = search.bootstrap([*rows, {"valid loss": 9.0, "test loss": 0.0}], 4000)
    # Of the 6 pairs of the four trials, the first trial is the best of 3, the second of 2, the third of 1.
    assert found[2] == pytest.approx((3 * 9 + 2 * 4 + 1) / 6, abs=0.2)


def test_the_table_of_a_search_has_the_best_twentieth_by_validation_loss():
    rows = [{"side": "hash", "valid loss": 40.0 - i, "test loss": float(i)} for i in range(40)]
    rows += [{"side": "topk", "valid loss": 5.0, "test loss": 7.0}]
    text = search._table(rows, {"hash": {1: 2.0, 5: 1.0}, "topk": {1: 7.0, 5: 7.0}})
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "hash 40 38.5000 ± 0.5000 2.0000 1.0000" in lines  # 39 and 38; standard error 0.707 / sqrt(2)
    assert "topk 1 7.0000 7.0000 7.0000" in lines
