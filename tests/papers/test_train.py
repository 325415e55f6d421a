"""`papers.train`: results, the check of a backend against the reference, resuming, tuning, wrong options."""

import csv
import dataclasses
import json
import math

import pytest
import torch

from moe_kernels.__main__ import main
from moe_kernels.papers import data, recipes, train
from moe_kernels.papers.models import comet_mlp, dense_twin
from moe_kernels.papers.recipes import Splits, comet
from moe_kernels.papers.train import agreement, contents, plotting, report
from moe_kernels.papers.train.comparison import Comparison
from moe_kernels.papers.train.loop import Random, Run
from tests.helpers.planted import interrupt, plant
from tests.helpers.results import told
from tests.helpers.small_sets import blobs


def numbers(path) -> list:
    return [
        {key: value for key, value in run.items() if key not in ("rows", "setup_seconds")}
        | {"rows": [{k: v for k, v in row.items() if k != "seconds"} for row in run["rows"]]}
        for run in json.loads(path.read_text())["runs"]
    ]


def test_a_run_trains_both_networks_and_writes_the_printed_results(arguments, capsys, tmp_path, stored, pictures):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert train.run(arguments("--lr", "0.1", "--seeds", "2", "--out", str(tmp_path))) == 0
    printed, report = capsys.readouterr().out, json.loads((tmp_path / "result.json").read_text())
    stored("train_seeds", told(report, printed, tmp_path, pictures), tolerance=1e-3)
    for side in ("standard", "comet"):
        assert f"agreement of {side} on cpu with the reference: passed, 6 steps" in printed
    assert all(step["wrong_masks"] == 0 for each in report["agreement"].values() for step in each["steps"])
    assert [(run["side"], run["seed"]) for run in report["runs"]] == [
        (side, seed) for seed in (0, 1) for side in ("standard", "comet")
    ]
    with (tmp_path / "log.csv").open() as file:
        logged = list(csv.DictReader(file))
    assert len(logged) == 2 * 2 * 3
    assert {"neurons", "dead neurons"} < logged[0].keys()
    assert not {"experts", "dead experts"} & logged[0].keys()  # a COMET MLP has no experts
    for run in report["runs"]:
        last = run["rows"][-1]
        assert last["test accuracy"] > 0.9
        assert (last["neurons"], last["most load"]) == ((24, 1) if run["side"] == "standard" else (12, 1))
        assert [row["step"] for row in run["rows"]] == [3, 6, 9]  # no evaluation at step 0
        assert last["entropy"] is None  # JSON has no NaN
        assert any(
            row["side"] == run["side"] and row["step"] == "9" and float(row["test loss"]) == last["test loss"]
            for row in logged
        )
    standard, sparse = report["summary"]
    accuracies = [run["rows"][-1]["test accuracy"] for run in report["runs"] if run["side"] == "comet"]
    assert sparse["metric"] == pytest.approx([sum(accuracies) / 2, abs(accuracies[0] - accuracies[1]) / math.sqrt(2)])
    routing, output = 12 * 24 + 24 * 24 * 2, 24 * 3
    assert standard["flops"] == 2 * (routing + output)
    assert sparse["flops"] == 2 * (2 * routing + output) + 3 * 24 * 2  # 3 layers: 24 for selection, 24 for the mask
    assert (tmp_path / "plot.png").read_bytes()[1:4] == b"PNG"


def test_the_seed_decides_every_number_but_the_time(arguments, tmp_path):
    def result(seed: int):
        train.run(arguments("--seed", str(seed), "--json", str(tmp_path / "run.json")))
        return numbers(tmp_path / "run.json")

    assert result(1) == result(1)
    assert result(1)[0]["rows"] != result(2)[0]["rows"]


def test_a_step_is_sgd_with_momentum_by_hand():
    recipe = comet.Comet(sides=("standard",), width=(8,), lr=0.1, batch_size=48)
    points = blobs()
    run = Run(recipe, 0, Splits(points, points.train, points.test))
    weights = [p.detach().clone().requires_grad_() for p in run.task.model.parameters()]
    twin = dense_twin(comet_mlp(12, 8, 3, seed=0, activation="tanh"))
    assert all(torch.equal(a, b) for a, b in zip(weights, twin.parameters(), strict=True))
    speed = [torch.zeros_like(w) for w in weights]
    for _ in range(2):
        h = points.train_x
        for i in range(0, len(weights), 2):
            h = h @ weights[i].T + weights[i + 1]
            h = torch.tanh(h) if i + 2 < len(weights) else h
        expected = -h.log_softmax(-1)[torch.arange(len(h)), points.train_y].mean()
        gradients = torch.autograd.grad(expected, weights)
        loss = run.take_step()["loss"]
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
        speed = [0.9 * v + g for v, g in zip(speed, gradients, strict=True)]
        weights = [(w - 0.1 * v).detach().requires_grad_() for w, v in zip(weights, speed, strict=True)]
    torch.testing.assert_close(list(run.task.model.parameters()), weights, rtol=1e-5, atol=1e-6)


def test_both_networks_learn_digits(arguments, tmp_path):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    path = tmp_path / "run.json"
    words = ["--data", "digits", "--width", "200", "--epochs", "6", "--lr", "0.03", "--check-steps", "3"]
    assert train.run(arguments(*words, "--json", str(path))) == 0
    for side in json.loads(path.read_text())["summary"]:
        assert side["metric"][0] > 0.93


def another_winner(original, *args):
    y, bits = original(*args)
    return y, bits ^ 1  # inverts the mask bit of neuron 0; its value stays


def all_of_a_sample(original, values, bits):
    """In backward all neurons of the batch's first sample are active."""
    bits = bits.clone()
    bits[0] = -1
    return original(values, bits)


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [
        ("kwta_fwd", another_winner),
        ("kwta_bwd", all_of_a_sample),
        ("kwta_bwd", lambda original, values, bits: values.clone().fill_(torch.nan)),
    ],
)
def test_agreement_check_catches_a_planted_fault(arguments, monkeypatch, capsys, kernel, wrong):
    plant(monkeypatch, kernel, wrong)
    assert train.run(arguments("--epochs", "0", "--backend", "cpu")) == 1
    printed = capsys.readouterr().out
    assert "agreement of standard on cpu with the reference: passed" in printed
    assert "agreement of comet on cpu with the reference: FAILED" in printed
    assert "first in step 1\n" in printed


@dataclasses.dataclass(frozen=True)
class Edge(recipes.Recipe):
    """A hidden ReLU layer, then one of two experts: the one with the larger score.

    Up to rounding, the arguments of the ReLUs are 0 for sample 0, and the two scores are equal for sample 1.
    """

    off: float = recipes.option(0.0, "added to the argument of neuron 0")
    tie: float = recipes.option(0.0, "added to the score of expert 0")
    scale: float = recipes.option(1.0, "factor of the loss")

    def build(self, data, seed, steps):
        model = torch.nn.ModuleDict({"hidden": torch.nn.Linear(12, 6), "experts": torch.nn.Linear(6, 6, bias=False)})
        model["scores"] = torch.nn.Linear(12, 2, bias=False)
        x = data.train[0]
        with torch.no_grad():
            for layer, row in (("hidden", x[0]), ("scores", x[1])):
                weight = model[layer].weight
                model[layer].weight.sub_((weight @ row)[:, None] * row / row.square().sum())
            model["hidden"].bias.zero_()

        def outcome(batch):
            rows, y = batch.tensors
            argument = model["hidden"](rows) + torch.tensor([self.off, 0, 0, 0, 0, 0])
            first = model["scores"](rows) @ torch.tensor([1.0, -1.0]) + self.tie > 0
            three = model["experts"](argument.relu()).unflatten(1, (2, 3))
            return torch.where(first[:, None], three[:, 0], three[:, 1]), y, first

        def loss(batch):
            logits, y, _ = outcome(batch)
            return {"loss": self.scale * torch.nn.functional.cross_entropy(logits, y)}

        def routing(batch):
            first = outcome(batch)[2]
            return [recipes.Routing(torch.stack([first, ~first], 1))]

        optimiser = torch.optim.SGD(model.parameters(), self.lr)
        return recipes.Task(model, optimiser, loss, lambda batch: recipes.Evaluation({}, routing(batch)))


def edge(**changed):
    points = blobs()
    data = Splits(points, points.train, points.test)
    recipe = Edge(batch_size=len(points.train_y))
    fast = dataclasses.replace(recipe, **changed)
    return train.check_agreement(Run(fast, 0, data), lambda: Run(recipe, 0, data), 1)


@pytest.mark.parametrize("changed", [{"off": 3e-7}, {"off": -3e-7}, {"tie": 3e-7}, {"tie": -3e-7}], ids=str)
def test_agreement_check_allows_kinks_and_ties(monkeypatch, changed):
    """Rounding may decide on which side of 0 a ReLU's argument is, or which of two nearly equal scores is larger."""
    assert edge(**changed).passed
    with monkeypatch.context() as patch:
        patch.setattr(agreement, "PAIRS", 0)
        found = [edge(**{name: sign * value for name, value in changed.items()}) for sign in (1, -1)]
    assert not all(each.passed for each in found)  # without repetitions the check fails for at least one sign


@pytest.mark.parametrize("changed", [{"off": 0.03}, {"tie": 0.1}, {"scale": 1.001}, {"scale": math.nan}], ids=str)
def test_agreement_check_catches_a_fault_beside_a_kink_and_a_tie(changed):
    found = edge(**changed)
    assert not found.passed
    assert found.steps[0].repeated == 2 * agreement.PAIRS


def test_other_weights_do_not_agree():
    points = blobs()
    runs = [
        Run(comet.Comet(sides=("comet",), width=(24,)), seed, Splits(points, points.train, points.test))
        for seed in (0, 1)
    ]
    agreement = train.check_agreement(runs[0], lambda: runs[1], 1)
    assert not agreement.passed
    assert agreement.steps[0].wrong_masks > 0
    assert agreement.steps[0].gradient_error > 1e-5


def test_the_reference_backend_has_no_agreement_check(arguments, capsys):
    assert train.run(arguments("--backend", "reference", "--epochs", "1")) == 0
    assert "nothing to compare" in capsys.readouterr().out


@pytest.mark.parametrize("steps", [3, 8, 15, 20])  # the first 12 steps tune, 6 have seed 0, the last 6 seed 1
def test_a_resumed_run_equals_an_uninterrupted_one(arguments, tmp_path, capsys, steps):
    words = ["--seeds", "2", "--tune", "0.1", "0.001", "--check-steps", "0", "--every", "2", "--epochs", "1"]
    assert train.run(arguments(*words, "--out", str(tmp_path / "whole"))) == 0
    broken = arguments(*words, "--out", str(tmp_path / "broken"))
    interrupt(broken, steps)
    assert f"--resume continues from {tmp_path / 'broken' / 'checkpoint.pt'}" in capsys.readouterr().out
    broken.resume = True
    torch.manual_seed(99)  # torch's global generator must have no effect
    assert train.run(broken) == 0
    assert numbers(tmp_path / "whole" / "result.json") == numbers(tmp_path / "broken" / "result.json")


def test_interrupted_before_the_first_evaluation(arguments, tmp_path, capsys):
    interrupt(arguments("--check-steps", "0", "--out", str(tmp_path)), 0)
    assert "interrupted; nothing was saved yet" in capsys.readouterr().out
    assert not (tmp_path / "checkpoint.pt").exists()
    (tmp_path / "checkpoint.pt").write_bytes(b"of an earlier run")
    interrupt(arguments("--check-steps", "0", "--out", str(tmp_path)), 0)
    assert "interrupted; nothing was saved yet" in capsys.readouterr().out


def test_a_run_on_the_cpu_leaves_the_generators_of_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeds every GPU"))
    own = Random(3, torch.device("cpu"))
    with own.use():
        drawn = torch.rand(4)
    monkeypatch.undo()
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(3)))


def test_tuning_does_not_use_the_test_set(arguments, monkeypatch, tmp_path):
    """The test labels are wrong, so the learning rate 1e-9, which learns nothing, has the better test accuracy."""
    points = blobs(400)
    wrong = data.Images(**vars(points) | {"test_y": (points.test_y + 1) % 3})
    monkeypatch.setattr(train, "load", lambda name: wrong)
    words = ["--tune", "0.1", "1e-9", "--check-steps", "0", "--epochs", "5", "--json", str(tmp_path / "run.json")]
    assert train.run(arguments(*words)) == 0
    report = json.loads((tmp_path / "run.json").read_text())
    assert [each["lr"] for each in report["summary"]] == [0.1, 0.1]
    tuned = [run for run in report["runs"] if run["stage"] == "tune"]
    assert [(run["side"], run["lr"]) for run in tuned] == [(s, lr) for s in ("standard", "comet") for lr in (0.1, 1e-9)]
    assert {run["rows"][-1]["step"] for run in tuned} == {5 * math.ceil(180 / 16)}


def test_a_single_rate_is_no_choice_and_takes_no_time(arguments, tmp_path):
    words = ["--tune", "0.2", "--check-steps", "0", "--epochs", "1", "--json", str(tmp_path / "run.json")]
    assert train.run(arguments(*words)) == 0
    assert [(run["stage"], run["lr"]) for run in numbers(tmp_path / "run.json")] == [("final", 0.2)] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "/no/such/place"], "there is no /no/such/place"),
        (["--keep", "0"], "keep fraction in (0, 1], got 0.0"),
        (["--backend", "cuda"], "backend 'cuda' cannot run here"),
        (["--resume"], "--resume needs --out"),
        (["--seed", "99999999999999999999"], "seed must be from 0 to 2147483646, got 99999999999999999999"),
        (["--device", "nowhere"], "--device nowhere: Expected one of cpu"),
        (["--device", "meta"], "train: --device meta: "),
    ],
)
def test_a_run_that_cannot_start_explains_why(arguments, capsys, words, message):
    assert train.run(arguments(*words)) == 2
    assert message in capsys.readouterr().err


def test_torchrun_needs_the_number_of_ranks_that_share_experts(arguments, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.run(arguments()) == 2
    message = "torchrun started several ranks: add --expert-parallel N, the number of ranks that share the experts"
    assert capsys.readouterr().err == f"train: {message}\n"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert train.run(arguments("--epochs", "0", "--check-steps", "0")) == 0


@pytest.mark.parametrize("saved", [False, True])
def test_a_rank_says_why_it_ends_and_how_to_continue(arguments, capsys, monkeypatch, tmp_path, saved):
    def fail(comparison, tick, show):
        comparison.saved = saved
        raise RuntimeError("the connection was closed\nby another rank")

    monkeypatch.setattr(Comparison, "train", fail)
    monkeypatch.setattr(train, "_ranks", lambda args, device, stack: None)
    monkeypatch.setenv("RANK", "3")
    words = ("--check-steps", "0", "--out", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"^the connection was closed\nby another rank$"):
        train.run(arguments(*words))
    assert capsys.readouterr().err == ""
    assert train.run(arguments(*words, "--expert-parallel", "2")) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    said = "train: rank 3: another rank failed or did not answer in time, or this one did: the connection was closed"
    assert lines[-1] == said + f"; --resume continues from {tmp_path / 'checkpoint.pt'}" * saved


@pytest.mark.parametrize("flushed", [False, True])
def test_denormals_are_flushed_in_training_and_afterwards_as_before(arguments, monkeypatch, flushed):
    seen, original = [], Run.take_step

    def denormal() -> float:
        return (torch.full((8,), 1e-30) * 1e-10).max().item()

    monkeypatch.setattr(Run, "take_step", lambda run: seen.append(denormal()) or original(run))
    try:
        assert torch.set_flush_denormal(flushed)
        assert train.run(arguments("--steps", "1", "--check-steps", "0")) == 0
        assert seen == [0, 0]
        assert (denormal() == 0) == flushed
    finally:
        torch.set_flush_denormal(False)


def test_threads_are_set_for_the_run_and_then_restored(arguments, capsys):
    before = torch.get_num_threads()
    for threads in (1, 2):
        assert train.run(arguments("--epochs", "0", "--check-steps", "0", "--threads", str(threads))) == 0
        assert f"cpu, {threads} thread" in capsys.readouterr().out
        assert torch.get_num_threads() == before


@pytest.mark.parametrize("place", ["folder", "file/run.json"])
def test_an_unwritable_result_folder_is_an_error_before_training(arguments, tmp_path, capsys, place):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    assert train.run(arguments("--json", str(tmp_path / place))) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("train: ")
    assert str(tmp_path) in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tea"], "there is no recipe 'tea'; there are comet"),
        (["--epochs", "-1"], "argument --epochs: must be at least 0, got -1"),
        (["--width", "0"], "argument --width: must be at least 1, got 0"),
        (["--lr", "nan"], "argument --lr: must be finite, got nan"),
        (["--batch-size", "x"], "argument --batch-size: invalid int value: 'x'"),
        (["--sides", "standard", "spare"], "argument --sides: invalid choice: 'spare'"),
        (["--steps", "2", "movielens"], "'movielens' must come before the options, as each recipe has its own"),
        (["movielens", "--watched-weight", "1.5"], "argument --watched-weight: must be at most 1, got 1.5"),
        (["comet_vit", "--dropout", "2"], "argument --dropout: must be at most 1, got 2"),
        (["competesmoe", "--rate", "-0.1"], "argument --rate: must be at least 0, got -0.1"),
    ],
)
def test_invalid_options_are_errors_with_their_name(capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        main(["train", *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_no_two_sides_of_a_picture_look_alike(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    drawn = []
    monkeypatch.setattr(plotting, "save", lambda canvas, path: drawn.append(canvas))
    rows = [{"step": step, "test accuracy": step / 9, "loss": 1.0} for step in range(3)]
    sides = [f"side {number}" for number in range(24)]
    assert report.picture(
        tmp_path / "plot.png", [report.History(side, 0, 0.1, "final", rows) for side in sides], "accuracy", "all"
    )
    for axis, label in zip(drawn[0].axes, ("test accuracy", "training loss"), strict=True):
        assert (axis.get_xlabel(), axis.get_ylabel()) == ("step", label)
        assert [line.get_label() for line in axis.lines] == sides
        assert len({(line.get_color(), line.get_linestyle()) for line in axis.lines}) == 24
    assert drawn[0].axes[0].lines[3].get_xydata().tolist() == [[0, 0], [1, 1 / 9], [2, 2 / 9]]


def test_options_that_an_optimiser_lost_are_told_in_order():
    before = [dict.fromkeys("edcba", 1), {"f": 1, "a": 1}]
    contents.check_options(before, [dict.fromkeys("abcdef", 2), {"a": 2, "f": 2}])
    with pytest.raises(ValueError, match=r"^param_groups have no b, c, d, e, f$"):
        contents.check_options(before, [{"a": 1, "f": 1}, {"a": 1}])
