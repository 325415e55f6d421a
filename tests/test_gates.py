"""The gates of nn.gates: worked numbers, what training and evaluation differ in, one result for all."""

from __future__ import annotations

import math

import pytest
import torch

from moe_kernels import nn as mnn


def fixed(gate, weight, bias=None):
    """The gate with these numbers in its linear layer."""
    with torch.no_grad():
        gate.linear.weight.copy_(torch.tensor(weight))
        if bias is not None:
            gate.linear.bias.copy_(torch.tensor(bias))
    return gate


X = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
LOGITS = [
    [math.log(1), math.log(4)],
    [math.log(3), math.log(1)],
    [math.log(2), math.log(1)],
]  # (E, D): columns by token


def test_softmax_by_hand():
    gate = fixed(mnn.SoftmaxGate(2, 3), LOGITS, [0.0, 0.0, 0.0])
    out = gate(X)
    torch.testing.assert_close(out.gates, torch.tensor([[1 / 6, 3 / 6, 2 / 6], [4 / 6, 1 / 6, 1 / 6]]))
    assert out.dense
    assert out.weights is out.gates
    assert out.experts.tolist() == [[0, 1, 2]] * 2
    assert out.experts.dtype == torch.int32
    assert out.losses == {}
    assert out.loss == 0


def test_topk_by_hand():
    out = fixed(mnn.TopKGate(2, 3, 2), LOGITS, [0.0] * 3)(X)
    assert out.experts.tolist() == [[1, 2], [0, 1]]
    torch.testing.assert_close(out.weights, torch.tensor([[3 / 5, 2 / 5], [4 / 5, 1 / 5]]))
    torch.testing.assert_close(out.gates, torch.tensor([[0, 3 / 5, 2 / 5], [4 / 5, 1 / 5, 0]]))
    assert not out.dense
    out = fixed(mnn.TopKGate(2, 3, 1, order="softmax_topk", bias=False), LOGITS)(X)
    torch.testing.assert_close(out.weights, torch.tensor([[3 / 6], [4 / 6]]))


def test_gates_of_choices_that_are_none():
    weights = torch.tensor([[0.75, 0.0, 0.25], [1.0, 0.0, 0.0]], requires_grad=True)
    experts = torch.tensor([[2, -1, 0], [1, -1, -1]], dtype=torch.int32)
    gates = mnn.GateOutput(weights, experts, 3).gates
    assert gates.tolist() == [[0.25, 0.0, 0.75], [0.0, 1.0, 0.0]]
    (to_weights,) = torch.autograd.grad((gates * torch.tensor([1.0, 2.0, 3.0])).sum(), weights)
    assert to_weights.tolist() == [[3.0, 0.0, 1.0], [2.0, 0.0, 0.0]]


def test_noise_is_for_training():
    x = torch.randn(4000, 8)
    for gate in (mnn.TopKGate(8, 4, 4, noise="vmoe"), mnn.SoftmaxGate(8, 4, noise=True)):
        torch.nn.init.zeros_(gate.linear.weight)
        torch.nn.init.zeros_(gate.linear.bias)
        logs = gate(x).gates.log()
        # Logits N(0, 1 / 16) less their row's mean: their deviation is 1 / 4 times sqrt(3 / 4).
        deviation = (logs - logs.mean(-1, keepdim=True)).std().item()
        assert abs(deviation - math.sqrt(3) / 8) < 0.005
        assert (gate.eval()(x).gates - 0.25).abs().max() < 1e-6


def test_jitter_is_learned():
    gate = mnn.TopKGate(8, 4, 2, noise="jitter", generator=torch.Generator().manual_seed(0))
    x = torch.randn(50, 8)
    out = gate(x)
    out.weights[:, 0].sum().backward()
    assert gate.noise_linear.weight.grad.abs().max() > 0
    noise = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * math.log(2)  # softplus(0)
    weights, experts = (gate.linear(x) + noise).topk(2)
    assert torch.equal(out.experts.long(), experts)
    torch.testing.assert_close(out.weights, weights.softmax(-1))


def test_losses_are_those_of_nn_times_their_coefficients():
    x, generator = torch.randn(64, 8), torch.Generator().manual_seed(5)
    given = {"importance": 0.5, "load": 0.25, "balance": 2.0, "z": 0.1}
    gate = mnn.TopKGate(8, 4, 2, order="softmax_topk", noise="vmoe", generator=generator, **given)
    out = gate(x)
    logits = gate.linear(x)
    noisy = logits + torch.randn(64, 4, generator=torch.Generator().manual_seed(5)) / 4
    probs = logits.softmax(-1)
    expected = {
        "importance": 0.5 * mnn.importance_loss(probs),
        "load": 0.25 * mnn.load_loss(logits, noisy, 2, 0.25),
        "balance": 2.0 * mnn.balance_loss(probs, noisy.argmax(-1).bincount(minlength=4)),
        "z": 0.1 * mnn.router_z_loss(logits),
    }
    assert out.losses.keys() == expected.keys()
    for name, loss in expected.items():
        torch.testing.assert_close(out.losses[name], loss)
    torch.testing.assert_close(out.loss, sum(expected.values()))
    assert gate.eval()(x).losses == {}
    dense = mnn.SoftmaxGate(8, 4, importance=0.5)
    torch.testing.assert_close(dense(x).loss, 0.5 * mnn.importance_loss(dense.linear(x).softmax(-1)))


@pytest.mark.parametrize("gate", [mnn.SoftmaxGate(6, 4), mnn.TopKGate(6, 4, 2)], ids=lambda gate: type(gate).__name__)
def test_gates_compute_in_the_dtype_of_their_parameters(gate):
    x = torch.randn(5, 6).bfloat16()
    plain = gate(x.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = gate(x)
    assert out.weights.dtype == torch.float32
    assert torch.equal(out.gates, plain.gates)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="SoftmaxGate: num_experts must be from 1"):
        mnn.SoftmaxGate(4, 0)
    with pytest.raises(ValueError, match="TopKGate: k must be from 1 to 4"):
        mnn.TopKGate(4, 4, 5)
    with pytest.raises(ValueError, match="TopKGate: load needs noise='vmoe'"):
        mnn.TopKGate(4, 4, 2, load=0.1)
    with pytest.raises(ValueError, match="TopKGate: noise must be one of None, 'jitter', 'vmoe'"):
        mnn.TopKGate(4, 4, 2, noise="gumbel")
    with pytest.raises(ValueError, match=r"TopKGate: x must be \(T, 4\), got shape \(2, 3, 4\)"):
        mnn.TopKGate(4, 4, 2)(torch.randn(2, 3, 4))
