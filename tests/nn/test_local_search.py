"""nn.LocalSearch: a permutation of the experts, soft and learned in stage one, fixed in stage two."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
import torch
from torch import nn

import moe_kernels as mk
from moe_kernels.nn import LocalSearch
from moe_kernels.nn.local_search import round_to_doubly_stochastic

pytest.importorskip("scipy", reason="scipy is not installed")


def sinkhorn_loop(scores: torch.Tensor, iterations: int, tau: float) -> torch.Tensor:
    log_p = scores.double() / tau
    for _ in range(iterations):
        log_p = log_p - log_p.logsumexp(-1, keepdim=True)
        log_p = log_p - log_p.logsumexp(-2, keepdim=True)
    return log_p.exp()


def test_the_papers_schedule():
    search = LocalSearch(4, 10)
    assert [search.iterations(t) for t in (1, 5, 9)] == [33, 85, 137]
    assert [LocalSearch(3, 100).iterations(t) for t in (9, 99)] == [31, 148]  # 31.7 and 148.7, rounded down
    for t, exponent in ((1, -3.4), (5, -5.0), (9, -6.6)):
        assert search.temperature(t) == pytest.approx(10**exponent)


def test_a_step_of_stage_one_by_hand():
    search = LocalSearch(5, 10, zeta=0.1)
    with torch.no_grad():
        search.scores.mul_(0.02)  # then Sinkhorn's result is far from a permutation
    gates = torch.rand(3, 2, 5).softmax(-1)
    permuted, regulariser = search(gates)
    soft = sinkhorn_loop(search.scores.detach()[0], 33, 10**-3.4)
    raw = torch.zeros(3, 2, 5, dtype=torch.float64)
    for b, c, i, j in itertools.product(range(3), range(2), range(5), range(5)):
        raw[b, c, j] += gates[b, c, i].double() * soft[i, j]
    torch.testing.assert_close(permuted.double(), raw / raw.sum(-1, keepdim=True), rtol=0, atol=1e-6)
    rows = soft / soft.sum(1, keepdim=True)
    entropy = sum(-float(v) * math.log(float(v) + 1e-6) for m in (soft, rows) for v in m.flatten())
    assert regulariser.item() == pytest.approx(0.1 * entropy, rel=1e-5)
    (permuted.square().sum() + regulariser).backward()
    assert search.scores.grad.isfinite().all()
    assert search.scores.grad.any()


def test_hard_in_evaluation_and_from_the_last_step_on():
    search, gates = LocalSearch(6, 4), torch.rand(7, 6).softmax(-1)
    search.eval()
    permuted, regulariser = search(gates)
    torch.testing.assert_close(permuted, gates)  # the identity
    assert regulariser == 0
    search.train()
    for _ in range(3):
        search(gates)
        assert not search.hardened
    columns = mk.harden(search.soft)[0]
    hard = torch.zeros_like(gates)
    hard[:, columns] = gates
    search.eval()
    torch.testing.assert_close(search(gates)[0], hard)
    assert search.step == 3  # evaluation does not count steps
    search.train()
    soft = search.soft.clone()
    permuted, regulariser = search(gates)
    assert search.hardened
    torch.testing.assert_close(permuted, hard)
    assert not regulariser.requires_grad
    expected = (soft[0] - torch.nn.functional.one_hot(columns, 6)).abs().max()
    assert search.distance.item() == pytest.approx(expected.item())
    search(gates)
    assert torch.equal(search.soft, soft)


def test_each_choice_has_its_own_permutation():
    search, gates = LocalSearch(3, 2, permutations=2, renormalise=False), torch.rand(5, 2, 3)
    soft_gates, _ = search(gates)
    expected = sum(gates[:, k].double() @ search.soft[k].double() for k in range(2))
    torch.testing.assert_close(soft_gates.double(), expected, rtol=0, atol=1e-6)
    hard_gates, _ = search(gates)
    columns = mk.harden(search.soft)
    expected = torch.zeros(5, 3)
    for k, i in itertools.product(range(2), range(3)):
        expected[:, columns[k, i]] += gates[:, k, i]
    torch.testing.assert_close(hard_gates, expected)
    with pytest.raises(ValueError, match=r"LocalSearch: gates must be \(\.\.\., 2, 3\), got shape \(5, 3\)"):
        search(torch.rand(5, 3))


def test_the_regulariser_is_the_mean_over_permutations_and_small():
    search = LocalSearch(3, 2, permutations=2)
    assert search.zeta == 1e-4
    p, search.zeta = torch.rand(2, 3, 3), 0.5
    torch.testing.assert_close(search.regulariser(p), (search.regulariser(p[:1]) + search.regulariser(p[1:])) / 2)
    entropies = [-(each * (each + 1e-6).log()).sum() for each in (p[0], p[0] / p[0].sum(1, keepdim=True))]
    torch.testing.assert_close(search.regulariser(p[:1]), 0.5 * sum(entropies))


def test_an_annealed_step_takes_fifty_iterations_at_least():
    search = LocalSearch(5, 100, schedule="annealed")
    soft = mk.sinkhorn(search.scores, 50, tau=search.temperature(1), anneal_from=0.1)
    torch.testing.assert_close(search.permutation(), round_to_doubly_stochastic(soft))


def test_each_permutation_has_its_distance():
    search = LocalSearch(4, 2, permutations=2)
    with torch.no_grad():
        search.scores[0], search.scores[1] = torch.eye(4), 0
    search.permutation(), search.permutation()
    torch.testing.assert_close(search.distance.detach(), torch.tensor([0.0, 0.75]))
    search = LocalSearch(4, 1)  # stage one has no step
    assert search.permutation() is None
    assert search.distance.isnan().all()


def test_gates_of_a_token_without_an_expert_stay_zeros():
    search, gates = LocalSearch(3, 2), torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.25, 0.25], [1e-12, 0.0, 0.0]])
    for permuted in (search(gates)[0], search.eval()(gates)[0]):
        assert permuted.sum(-1).tolist() == pytest.approx([0, 1, 1])


@pytest.mark.parametrize("schedule", ["paper", "annealed"])
def test_noise_moves_the_scores_in_stage_one_alone(schedule):
    search, quiet = (LocalSearch(5, 3, noise=noise, schedule=schedule) for noise in (0.3, 0.0))
    quiet.load_state_dict(search.state_dict())
    torch.manual_seed(7)
    soft = search.permutation()
    torch.manual_seed(7)
    gumbel = -torch.empty(1, 5, 5).exponential_().log()
    assert not torch.equal(soft, quiet.permutation())
    quiet.set_extra_state({"step": 0})
    with torch.no_grad():
        quiet.scores += 0.3 * gumbel
    torch.testing.assert_close(soft, quiet.permutation())
    soft.square().sum().backward()
    assert search.scores.grad is not None
    search.permutation()
    drawn = torch.get_rng_state()
    search.eval().permutation(), search.train().permutation()  # the hard permutation draws no noise
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("taken", [0, 3, 6, 9])
def test_state_survives_a_round_trip(taken):
    gates = torch.rand(4, 5).softmax(-1)
    search = LocalSearch(5, 6)
    for _ in range(taken):
        search(gates)
    loaded = LocalSearch(5, 6)
    loaded.load_state_dict(copy.deepcopy(search.state_dict()))
    others = loaded, copy.deepcopy(search), pickle.loads(pickle.dumps(search))
    assert all((other.step, other.hardened) == (search.step, search.hardened) for other in others)
    for training in (False, True, True, True, True):
        mine = search.train(training)(gates)
        for other in others:
            theirs = other.train(training)(gates)
            assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))
    for other in others:
        torch.testing.assert_close(search.distance, other.distance, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_a_compiled_search_hardens_what_was_learned_or_loaded():
    torch._dynamo.reset()
    gates, search, other = torch.rand(4, 5).softmax(-1), LocalSearch(5, 6), LocalSearch(5, 6).eval()
    for _ in range(3):
        search(gates)
    expected = torch.empty_like(gates)
    expected[:, mk.harden(search.soft)[0]] = gates
    other.load_state_dict(search.state_dict())
    for each in (other, search.eval()):
        torch.testing.assert_close(torch.compile(each, backend="eager")(gates)[0], expected)


def test_the_annealed_schedule_reaches_a_permutation_and_the_papers_does_not():
    gates = torch.rand(4, 16).softmax(-1)
    off = {}
    for schedule in ("paper", "annealed"):
        search = LocalSearch(16, 8, permutations=20, schedule=schedule, generator=torch.Generator().manual_seed(1))
        for _ in range(8):
            search(gates[:, None].expand(-1, 20, -1))
        off[schedule] = search.distance
    assert (off["paper"] > 0.05).float().mean() > 0.9
    assert (off["annealed"] < 0.05).float().mean() > off["paper"].lt(0.05).float().mean() + 0.5


def test_rounding_is_doubly_stochastic_and_leaves_what_is():
    p = torch.rand(3, 6, 6, dtype=torch.float64)
    ones = torch.ones(3, 6, dtype=torch.float64)
    for dim in (-1, -2):
        torch.testing.assert_close(round_to_doubly_stochastic(p).sum(dim), ones)
    identity = torch.eye(6)
    assert torch.equal(round_to_doubly_stochastic(identity), identity)
    small = torch.tensor([[0.5, 0.25], [0.25, 0.25]])  # no sum exceeds 1: p + r c^T / sum(r), r = c = (1/4, 1/2)
    missing = torch.tensor([[1 / 16, 1 / 8], [1 / 8, 1 / 4]]) / 0.75
    torch.testing.assert_close(round_to_doubly_stochastic(small), small + missing)
    above = torch.tensor([[1.0, 1.0], [0.0, 0.5]])  # first row divided by 2, then the second column (.5 + .5) by 1
    expected = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    torch.testing.assert_close(round_to_doubly_stochastic(above), expected)


def test_search_learns_the_permutation_that_a_loss_asks_for():
    gates = torch.eye(4).repeat(8, 1)
    wanted = gates[:, [2, 0, 3, 1]]
    search = LocalSearch(4, 120, schedule="annealed")
    optimiser = torch.optim.Adam(search.parameters(), lr=0.02)
    for _ in range(120):
        permuted, regulariser = search(gates)
        loss = nn.functional.mse_loss(permuted, wanted) + regulariser
        if loss.requires_grad:
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    torch.testing.assert_close(search.eval()(gates)[0], wanted)


def test_a_search_without_scipy_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"LocalSearch: hardening needs scipy: pip install moe_kernels\[assignment\]"):
        LocalSearch(3, 1)


def test_the_wide_schedule_cools_from_a_tenth_to_a_millionth():
    search = LocalSearch(3, steps=10, schedule="wide")
    assert [search.temperature(step) for step in (0, 10)] == pytest.approx([0.1, 1e-6])
    assert search.iterations(1) == 150
