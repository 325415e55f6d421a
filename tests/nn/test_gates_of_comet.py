"""Gates of COMET trees."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

import moe_kernels as mk
from moe_kernels import nn as mnn


def seeded_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_tree_gate_is_the_operation_and_its_entropy():
    gate, x = mnn.TreeGate(6, 5, 2, gamma=0.5, entropy=0.3, generator=seeded_generator()), torch.randn(7, 6) * 40
    out = gate(x)
    given = {"split_bias": gate.split_bias, "leaf_bias": gate.leaf_bias, "gamma": 0.5}
    gates, probs = mk.tree_gate(x, gate.split_weight, gate.leaf_weight, **given)
    assert torch.equal(out.gates, gates)
    torch.testing.assert_close(gate.router_probs(x.double()), gates.detach())
    entropy = -(probs * (probs + 1e-6).log()).sum() / 7
    torch.testing.assert_close(out.losses["entropy"], 0.3 * entropy)
    assert out.statistics["experts_per_sample"] == (gates >= 1e-5).sum() / 7
    (out.gates[:, 0].sum() + out.loss).backward()
    assert all(each.grad.isfinite().all() and each.grad.any() for each in gate.parameters())
    assert gate.eval()(x).losses == {}


def test_entropy_by_hand():
    probs = torch.tensor([[[0.5, 0.5], [1.0, 0.0]], [[0.25, 0.75], [0.0, 1.0]]], dtype=torch.float64)
    expected = (2 * 0.5 * math.log(2) + 0.25 * math.log(4) + 0.75 * math.log(4 / 3)) / 2
    assert mnn.tree_entropy(probs, eps=0.0).isnan()  # 0 log(0) is NaN
    assert mnn.tree_entropy(probs, eps=1e-30).item() == pytest.approx(expected, abs=1e-12)
    assert mnn.tree_entropy(probs).item() == pytest.approx(expected, abs=5e-6)


def test_tree_gate_starts_as_the_published_code_does():
    gate = mnn.TreeGate(300, 16, 2, gamma=2.0, generator=seeded_generator())
    for name, bound in (("split_weight", 0.02), ("leaf_weight", 0.05)):
        parameter = getattr(gate, name)
        assert parameter.abs().max() <= bound
        assert abs(parameter.std().item() - bound / math.sqrt(3)) < 0.02 * bound
    assert not gate.split_bias.any()
    assert 0.04 < gate.leaf_bias.abs().max() <= 0.05
    assert mnn.TreeGate(4, 3, bias=False).leaf_bias is None
    again = mnn.TreeGate(300, 16, 2, gamma=2.0, generator=seeded_generator())
    assert all(map(torch.equal, gate.parameters(), again.parameters()))


def test_tree_gate_routes_where_it_is_saturated_and_only_there():
    gate, x = mnn.TreeGate(6, 9, 2, gamma=1e-5, route=True, generator=seeded_generator()).eval(), torch.randn(50, 6)
    with torch.no_grad():
        gate.split_weight.mul_(1e8)
    out = gate(x)
    assert not out.dense
    assert out.weights.shape == (50, 2)
    assert 3 <= out.statistics["nodes_visited"] <= 4
    assert gate.train()(x).dense
    gate.eval().route = False
    torch.testing.assert_close(out.gates, gate(x).gates)
    assert torch.equal(out.statistics["experts_per_sample"], gate(x).statistics["experts_per_sample"])
    gate.route = True
    with torch.no_grad():
        gate.split_bias.zero_()
    x[7] = 0  # split logits of 0: the trees of token 7 are not saturated
    assert gate(x).dense
    masked = gate(x, mask=torch.arange(50) != 7)
    assert masked.weights.shape == (50, 2)
    assert 3 <= masked.statistics["nodes_visited"] <= 4
    gate.gamma = 1e4
    assert gate(x).dense  # no tree is saturated
    assert gate.train()(x).dense


def test_hash_gate_is_a_table():
    gate = mnn.HashGate(1000, 4, generator=seeded_generator())
    assert gate.table.bincount(minlength=4).min() > 200
    again = mnn.HashGate(1000, 4)
    again.load_state_dict(gate.state_dict())
    assert torch.equal(again.codes, gate.codes)
    ids = torch.tensor([3, 999, 3])
    out = gate(torch.randn(3, 8), ids)
    assert out.experts.dtype == torch.int32
    assert torch.equal(out.experts[:, 0], gate.table[ids])
    assert out.weights.tolist() == [[1.0]] * 3
    assert out.gates.sum() == 3
    assert list(gate.state_dict()) == [name for name, _ in gate.named_buffers()]  # for loaders that go by name
    assert not list(gate.parameters())


def test_hash_gate_balances_frequencies():
    frequencies = torch.tensor([1, 7, 0, 5, 4, 3, 2, 0])
    gate = mnn.HashGate(8, 2, frequencies=frequencies, generator=seeded_generator())
    # Frequency 7 goes to expert 0, 5 to 1, 4 to 1 (load 5 < 7), 3 to 0 (7 < 9), 2 to 1 (9 < 10), 1 to 0 (10 < 11).
    assert gate.table[[1, 3, 4, 5, 6, 0]].tolist() == [0, 1, 1, 0, 1, 0]
    loads = torch.zeros(2, dtype=torch.int64).index_add_(0, gate.table.long(), frequencies)
    assert loads.tolist() == [11, 11]
    assert set(gate.table[[2, 7]].tolist()) <= {0, 1}
    unseen = mnn.HashGate(100, 4, frequencies=torch.zeros(100), generator=seeded_generator())
    assert len(unseen.table.unique()) == 4  # ids of frequency 0 get a random expert


def step(t: float, gamma: float) -> float:
    u = min(max(t / gamma + 0.5, 0.0), 1.0)
    return u * u * (3 - 2 * u)


@pytest.mark.parametrize("experts", [2, 3, 4, 6])
def test_dselect_by_hand(experts):
    """Loops over all codes, highest bit first. The reciprocal loss penalises codes >= E, which have no expert."""
    bits, gamma, k = math.ceil(math.log2(experts)), 1.0, 2
    gate = mnn.DSelectKGate(
        3, experts, k, gamma=gamma, entropy=0.1, reciprocal=0.5, generator=seeded_generator()
    ).double()
    with torch.no_grad():
        gate.code.weight.uniform_(-0.4, 0.4, generator=seeded_generator(1))
    x = torch.randn(4, 3, dtype=torch.float64)
    out, z, w = gate(x), gate.code(x).view(4, k, bits), gate.mix(x).softmax(-1)
    entropy = reciprocal = 0.0
    for t in range(4):
        expected = [0.0] * experts
        for j in range(k):
            kept = 0.0
            for code, spelled in enumerate(product((0, 1), repeat=bits)):
                h = [step(z[t, j, b].item(), gamma) for b in range(bits)]
                r = math.prod(h[b] if bit else 1 - h[b] for b, bit in enumerate(spelled))
                if code < experts:
                    expected[code] += w[t, j].item() * r
                    entropy -= r * math.log(r + 1e-6) / 4
                    kept += r
            reciprocal += 1 / (kept + 1e-6)
        assert out.gates[t].tolist() == pytest.approx(expected, abs=1e-12)
    assert out.losses["entropy"].item() == pytest.approx(0.1 * entropy, abs=1e-12)
    assert ("reciprocal" in out.losses) == (experts in (3, 6))
    if "reciprocal" in out.losses:
        assert out.losses["reciprocal"].item() == pytest.approx(0.5 * reciprocal, abs=1e-10)
    assert gate.eval()(x).losses == {}


def test_dselect_starts_within_a_hundredth_of_its_step():
    gate = mnn.DSelectKGate(300, 16, 2, gamma=2.0, generator=seeded_generator())
    assert 0.019 < gate.code.weight.abs().max() <= 0.02
    assert not gate.code.bias.any()
