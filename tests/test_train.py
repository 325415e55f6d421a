"""The training run: both networks, the agreement check with planted faults, and what is written."""

import argparse
import json

import pytest
import torch

from moe_kernels import data, train
from moe_kernels.backends import cpu
from moe_kernels.models import comet_mlp, dense_twin


def blobs(n: int = 96) -> data.Dataset:
    """Three Gaussian clouds, easily told apart."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 3
    x = torch.eye(3).repeat(1, 4)[y] * 2 - 1 + 0.3 * torch.randn(n, 12, generator=generator)
    half = n // 2
    return data.Dataset("blobs", x[:half], y[:half], x[half:], y[half:], ("a", "b", "c"), (1, 3, 4))


@pytest.fixture
def arguments(monkeypatch):
    """Parses a command line, on the blobs unless it names data; small and on the CPU."""
    monkeypatch.setattr(train, "load", lambda name: blobs() if name == "blobs" else data.load(name))
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)

    def parse(*words: str) -> argparse.Namespace:
        small = ["--data", "blobs", "--width", "24", "--device", "cpu", "--batch-size", "16", "--epochs", "3"]
        return parser.parse_args([*small, "--check-steps", "6", "--threads", "1", *words])

    return parse


def test_run_trains_both_networks_and_writes_what_it_printed(arguments, capsys, tmp_path):
    path = tmp_path / "out" / "run.json"
    assert train.run(arguments("--lr", "0.1", "--json", str(path))) == 0
    printed, report = capsys.readouterr().out, json.loads(path.read_text())
    assert "agreement: passed, 6 steps" in printed
    assert report["agreement"]["passed"]
    assert [s["wrong_masks"] for s in report["agreement"]["steps"]] == [0] * 6
    dense, comet = report["networks"]
    assert (dense["name"], comet["name"]) == ("dense", "kWTA p=0.5")
    for network in (dense, comet):
        assert network["epochs"][-1]["accuracy"] > 0.9
        for epoch in network["epochs"]:
            assert f"{epoch['accuracy']:.2%}   {epoch['loss']:.4f}" in printed.replace("    ", "   ")
    assert dense["epochs"][0]["utilisation"] == {"min": 1.0, "mean": 1.0, "dead": 0, "neurons": 72}
    assert comet["epochs"][0]["utilisation"]["mean"] == pytest.approx(0.5)
    assert comet["start"]["seconds"] == 0
    assert comet["start"]["loss"] is None  # NaN is no JSON


def test_the_seed_decides_every_number_but_the_time(arguments, tmp_path):
    def numbers(seed: int):
        path = tmp_path / "run.json"
        train.run(arguments("--seed", str(seed), "--json", str(path)))
        report = json.loads(path.read_text())
        return [[(e["loss"], e["accuracy"], e["utilisation"]) for e in n["epochs"]] for n in report["networks"]]

    assert numbers(1) == numbers(1)
    assert numbers(1) != numbers(2)


def test_a_step_is_sgd_with_momentum_by_hand():
    """Two steps of the dense twin against autograd's gradients and the update written out."""
    net = dense_twin(comet_mlp(12, 8, 3, seed=0, activation="tanh"))
    weights = [p.detach().clone().requires_grad_() for p in net.parameters()]
    speed = [torch.zeros_like(w) for w in weights]
    optimiser, points = torch.optim.SGD(net.parameters(), 0.1, 0.9), blobs()
    for _ in range(2):
        h = points.train_x
        for i in range(0, len(weights), 2):
            h = h @ weights[i].T + weights[i + 1]
            h = torch.tanh(h) if i + 2 < len(weights) else h
        expected = -h.log_softmax(-1)[torch.arange(len(h)), points.train_y].mean()
        gradients = torch.autograd.grad(expected, weights)
        loss = train._step(net, optimiser, points.train_x, points.train_y)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
        speed = [0.9 * v + g for v, g in zip(speed, gradients, strict=True)]
        weights = [(w - 0.1 * v).detach().requires_grad_() for w, v in zip(weights, speed, strict=True)]
    for weight, parameter in zip(weights, net.parameters(), strict=True):
        torch.testing.assert_close(parameter, weight, rtol=1e-5, atol=1e-6)


def test_both_networks_learn_digits(arguments, tmp_path):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    path = tmp_path / "run.json"
    words = ["--data", "digits", "--width", "200", "--epochs", "6", "--lr", "0.03", "--check-steps", "3"]
    assert train.run(arguments(*words, "--json", str(path))) == 0
    for network in json.loads(path.read_text())["networks"]:
        assert network["epochs"][-1]["accuracy"] > 0.93


def swap_one_winner(mask: torch.Tensor) -> torch.Tensor:
    """The last row's first winner and first loser change places."""
    mask = mask.clone()
    winner, loser = mask[-1].int().argmax(), mask[-1].int().argmin()
    mask[-1, winner], mask[-1, loser] = False, True
    return mask


def plant_wrong_mask(monkeypatch):
    right = cpu.kwta_mask
    monkeypatch.setattr(cpu, "kwta_mask", lambda x, k, ties: swap_one_winner(right(x, k, ties)))


def plant_wrong_forward(monkeypatch):
    right = cpu.kwta_fwd

    def wrong(x, values, k, ties, save_bits):
        y, bits = right(x, values, k, ties, save_bits)
        if values is not None:
            y[-1] = torch.where(swap_one_winner(cpu.kwta_mask(x, k, ties))[-1], values[-1], 0)
        return y, bits

    monkeypatch.setattr(cpu, "kwta_fwd", wrong)


def plant_wrong_backward(monkeypatch):
    right = cpu.kwta_bwd

    def wrong(grad, bits):
        out = right(grad, bits)
        out[-1] = grad[-1]  # one sample's inactive neurons learn, too
        return out

    monkeypatch.setattr(cpu, "kwta_bwd", wrong)


def plant_nan(monkeypatch):
    right = cpu.kwta_bwd
    monkeypatch.setattr(cpu, "kwta_bwd", lambda grad, bits: right(grad, bits) * torch.nan)


@pytest.mark.parametrize("plant", [plant_wrong_mask, plant_wrong_forward, plant_wrong_backward, plant_nan])
def test_agreement_check_catches_a_planted_fault(arguments, monkeypatch, capsys, plant):
    plant(monkeypatch)
    assert train.run(arguments("--epochs", "0", "--backend", "cpu")) == 1
    printed = capsys.readouterr().out
    assert "agreement: FAILED" in printed
    assert "first in step 1\n" in printed


def test_agreement_is_of_every_bit_on_this_backend():
    points = blobs()
    fast, slow = (comet_mlp(12, 24, 3, seed=0, activation="tanh", backend=b) for b in ("cpu", "reference"))
    batches = [(points.train_x, points.train_y)] * 4
    agreement = train.check_agreement(fast, slow, batches, 0.1, 0.9)
    assert agreement.passed
    assert len(agreement.steps) == 4
    assert agreement.steps[-1].loss < agreement.steps[0].loss


def test_other_weights_do_not_agree():
    points = blobs()
    a, b = (comet_mlp(12, 24, 3, seed=seed, activation="tanh") for seed in (0, 1))
    agreement = train.check_agreement(a, b, [(points.train_x, points.train_y)], 0.1, 0.9)
    assert not agreement.passed
    assert agreement.steps[0].wrong_masks > 0
    assert agreement.steps[0].weight_error > train.TOLERANCE


def test_reference_has_nothing_to_be_compared_with(arguments, capsys):
    assert train.run(arguments("--backend", "reference", "--epochs", "1")) == 0
    assert "nothing to compare" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "/no/such/place"], "there is no /no/such/place"),
        (["--keep", "1.5"], "keep fraction in (0, 1], got 1.5"),
        (["--backend", "cuda"], "backend 'cuda' cannot run here"),
    ],
)
def test_a_run_that_cannot_start_says_why(arguments, capsys, words, message):
    assert train.run(arguments(*words)) == 2
    assert message in capsys.readouterr().err


def test_threads_are_those_asked_for_and_afterwards_those_before(arguments, capsys):
    before = torch.get_num_threads()
    for threads in (1, 2):
        assert train.run(arguments("--epochs", "0", "--check-steps", "0", "--threads", str(threads))) == 0
        assert f"cpu, {threads} thread" in capsys.readouterr().out
        assert torch.get_num_threads() == before


@pytest.mark.parametrize("words", [["--epochs", "-1"], ["--width", "0"], ["--lr", "nan"], ["--batch-size", "x"]])
def test_numbers_out_of_range_are_refused(arguments, capsys, words):
    with pytest.raises(SystemExit) as caught:
        arguments(*words)
    assert caught.value.code == 2
    assert words[0] in capsys.readouterr().err
