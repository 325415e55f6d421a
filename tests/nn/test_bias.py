"""Balance without a loss: TopKGate(balance_rate=...) and nn.update_biases."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moe_kernels as mk
from moe_kernels import nn as mnn
from moe_kernels.nn import bias
from tests.helpers.ranks import shared

D, E, K, T = 8, 6, 2, 40
X = torch.randn(T, D, generator=torch.Generator().manual_seed(0))


def layer(rate: float | None = 0.01, **options) -> mnn.MoE:
    torch.manual_seed(1)
    gate = mnn.TopKGate(D, E, K, scores="sigmoid", renormalise=True, balance_rate=rate, **options)
    return mnn.MoE(gate, mnn.ExpertMLP(E, D, 5), mnn.TokenChoice(1.0), output="tensor")


def requests(model: mnn.MoE, x: torch.Tensor = X) -> torch.Tensor:
    experts = model.gate.eval()(x).experts
    model.gate.train()
    return torch.bincount(experts.flatten(), minlength=E).float()


def test_loads_are_the_requests_in_training_before_drops():
    model = layer()
    expected = requests(model)
    assert not model.gate.loads.any()
    model(X)
    model.eval()(X)
    assert torch.equal(model.gate.loads, expected)
    mask = torch.arange(T) < 7
    model.train()(X, mask=mask)
    assert torch.equal(model.gate.loads, expected + requests(model, X[:7]))


def plain(model, x):
    return model(x)


def again(model, x):
    return checkpoint(model, x, use_reentrant=False)


def again_reentrant(model, x):
    return checkpoint(model, x, use_reentrant=True)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("run", [plain, again, again_reentrant])
def test_micro_batches_count_and_repeated_forwards_do_not(run, compiled):
    if compiled and run is again_reentrant:
        pytest.skip("torch.compile does not trace reentrant checkpoints")
    model = layer()
    call = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
    for part in X.chunk(4):
        call(model, part.clone().requires_grad_()).sum().backward()
    assert torch.equal(model.gate.loads, requests(model))


@pytest.mark.parametrize("recentre", [False, True])
def test_the_rule(recentre):
    model = layer()
    model(X)
    loads = model.gate.loads.clone()
    change = 0.01 * (loads.mean() - loads).sign()
    expected = change - change.mean() if recentre else change
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *_: mnn.update_biases(model, recentre=recentre))
    optimizer.step()
    assert torch.equal(model.gate.balance_bias, expected)
    assert not model.gate.loads.any()
    model.gate.update_bias()  # no loads, no change
    assert torch.equal(model.gate.balance_bias, expected)


def test_each_gate_is_compared_with_its_own_mean():
    """Gates with 80 requests for 6 experts and with 120 for 3."""
    gates = torch.nn.ModuleList([layer().gate, mnn.TopKGate(D, 3, 3, scores="sigmoid", balance_rate=0.1)])
    for gate in gates:
        gate(X)
    gates[1].loads += torch.tensor([1.0, 0.0, -1.0])
    expected = [gate.balance_rate * (gate.loads.mean() - gate.loads).sign() for gate in gates]
    mnn.update_biases(gates)
    assert expected[1].tolist() == pytest.approx([-0.1, 0, 0.1])
    assert all(torch.equal(gate.balance_bias, each) for gate, each in zip(gates, expected, strict=True))


def test_the_bias_balances_without_touching_weights():
    model, x = layer(rate=0.003), torch.randn(600, D)
    first = requests(model, x)
    assert first.max() > 1.2 * first.mean()
    for _ in range(100):
        model.gate(x)
        mnn.update_biases(model)
    last = requests(model, x)
    assert last.max() <= 1.1 * last.mean()
    found = model.gate(X)
    scores = model.gate.project(model.gate.linear, X).sigmoid().gather(1, found.experts.long())
    torch.testing.assert_close(found.weights, scores / scores.sum(1, keepdim=True))


def test_buffers_are_saved_moved_and_reset():
    model = layer()
    model(X)
    state = copy.deepcopy(model.state_dict())
    assert state["gate.loads"].dtype == state["gate.balance_bias"].dtype == torch.float32
    fresh = layer()
    fresh.load_state_dict(state)
    assert torch.equal(fresh.gate.loads, model.gate.loads)
    for keep in (True, False):
        narrow = copy.deepcopy(model)
        narrow.gate.keep_float32 = keep
        narrow.bfloat16()
        assert torch.equal(narrow.gate.loads, model.gate.loads)
        narrow(X.bfloat16())
        assert narrow.gate.loads.sum() == 2 * model.gate.loads.sum()
    double = copy.deepcopy(model).double()
    double(X.double())
    assert double.gate.loads.dtype == double.gate.balance_bias.dtype == torch.float32
    assert double.gate.loads.sum() == 2 * model.gate.loads.sum()
    model.gate.reset_parameters()
    assert not model.gate.loads.any()


@pytest.mark.parametrize("several", [False, True])
def test_evaluation_gives_back_the_loads_that_ddp_replaced(several, monkeypatch):
    gate = layer().gate
    gate(X)
    expected = gate.loads.clone()
    gate.loads.zero_()  # those of rank 0
    monkeypatch.setattr(bias, "_several", lambda: several)
    wrapper = SimpleNamespace(broadcast_buffers=True)
    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", wrapper)
    gate.eval()(X)
    assert torch.equal(gate.loads, expected if several else torch.zeros(E))


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), layer(rate=None)], ids=["no gate", "no rate"])
def test_a_model_without_a_balance_rate_is_left_as_it_is(model):
    state = copy.deepcopy(model.state_dict())
    mnn.update_biases(model)
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())


def test_the_choice_is_that_of_the_operation():
    gate = mnn.TopKGate(D, E, K, scores="sigmoid", groups=(3, 2), scale=2.5, balance_rate=0.1)
    gate.balance_bias.normal_()
    logits = gate.project(gate.linear, X)
    expected = mk.topk_gate(logits, K, scores="sigmoid", groups=(3, 2), scale=2.5, bias=gate.balance_bias)
    found = gate(X)
    assert torch.equal(found.experts, expected[1])
    assert torch.equal(found.weights, expected[0])


def test_losses_of_sigmoid_scores_use_shares():
    gate = mnn.TopKGate(D, E, K, scores="sigmoid", balance=1.0, importance=1.0, z=1.0)
    found, logits = gate(X), gate.project(gate.linear, X)
    shares = logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True)
    first = torch.bincount(found.experts[:, 0], minlength=E)
    torch.testing.assert_close(found.losses["balance"], mnn.balance_loss(shares, first))
    torch.testing.assert_close(found.losses["importance"], mnn.importance_loss(shares))
    torch.testing.assert_close(found.losses["z"], mnn.router_z_loss(logits))
    torch.testing.assert_close(gate.router_probs(X), shares)


def test_errors():
    with pytest.raises(ValueError, match=r"update_bias: TopKGate has no balance_rate"):
        mnn.TopKGate(D, E, K).update_bias()
    with pytest.raises(ValueError, match="balance_rate must be above 0"):
        mnn.TopKGate(D, E, K, balance_rate=0.0)
    with pytest.raises(ValueError, match="TopKGate: order has no meaning"):
        mnn.TopKGate(D, E, K, scores="sigmoid", order="softmax_topk")
    with pytest.raises(ValueError, match=r"TopKGate: groups\[0\] must divide the 6 experts"):
        mnn.TopKGate(D, E, K, groups=(4, 1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_have_the_bias_of_one_process(kind):
    shared().run("bias", "steps", 2, kind)


@pytest.mark.slow
def test_loads_decide_on_several_ranks():
    shared().run("bias", "loads_are_the_truth", 2)
