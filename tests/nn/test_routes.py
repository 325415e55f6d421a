"""nn.record_routing and nn.replay_routing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moe_kernels as mk
from moe_kernels import nn as mnn
from moe_kernels.nn._replay import Replay
from moe_kernels.nn.routes import unwrapped

D, E, K, T = 8, 6, 2, 10
X = torch.randn(T, D, generator=torch.Generator().manual_seed(0))


def layer(**options) -> mnn.MoE:
    return mnn.MoE(mnn.TopKGate(D, E, K, **options), mnn.ExpertMLP(E, D, 5), output="tensor")


class Twice(torch.nn.Module):
    """Two layers, of which the second runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer(), layer(scores="sigmoid", balance_rate=0.1, renormalise=True)

    def forward(self, x):
        return self.second(self.second(self.first(x)))


def other(model: torch.nn.Module) -> torch.nn.Module:
    """The model with routers that choose otherwise."""
    changed = copy.deepcopy(model)
    for each in changed.modules():
        if isinstance(each, mnn.TopKGate):
            torch.nn.init.normal_(each.linear.weight)
    return changed


def test_a_record_holds_the_choices_by_name():
    model = Twice()
    with mnn.record_routing(model) as routes:
        model(X)
    assert sorted(routes) == ["first.gate", "second.gate"]
    assert routes["first.gate"].dtype == torch.int16
    logits = X @ model.first.gate.linear.weight.T + model.first.gate.linear.bias
    assert torch.equal(routes["first.gate"].int(), mk.topk_gate(logits, K)[1])
    assert [each.shape for each in routes["second.gate"]] == [(T, K), (T, K)]
    model(X)
    assert len(routes["second.gate"]) == 2


def test_calls_of_a_gate_are_recorded_and_replayed_in_their_order():
    gate, xs = mnn.TopKGate(D, E, K), [X, X.flip(0), -X, X[:4]]
    with mnn.record_routing(gate) as routes:
        chosen = [gate(x).experts for x in xs]
    assert len(routes[""]) == 4
    assert all(torch.equal(one.int(), two) for one, two in zip(routes[""], chosen, strict=True))
    changed = other(gate)
    with mnn.replay_routing(changed, routes):
        assert all(torch.equal(changed(x).experts, each) for x, each in zip(xs, chosen, strict=True))


def test_the_outer_replay_goes_on_after_a_nested_one():
    model, records, alone = layer(), [], []
    for _ in range(2):
        changed = other(model)
        with mnn.record_routing(changed) as routes:
            changed(X)
        records.append(dict(routes))
    for record in records:
        with mnn.replay_routing(model, record):
            alone.append(model(X))
    assert not torch.equal(*alone)
    with mnn.replay_routing(model, records[0]):
        with mnn.replay_routing(model, records[1]):
            assert torch.equal(model(X), alone[1])
        assert torch.equal(model(X), alone[0])


def test_wide_records_and_masked_rows():
    gate = mnn.TopKGate(D, 40_000, 1)
    with mnn.record_routing(gate) as routes:
        gate(X[:2])
    assert routes[""].dtype == torch.int32
    gate = mnn.TopKGate(D, E, K)
    mask = torch.arange(T) % 3 > 0
    with mnn.record_routing(gate) as routes:
        found = gate(X, mask=mask)
    assert (routes[""][~mask] == -1).all()
    assert torch.equal(routes[""][mask].int(), found.experts[mask])
    with mnn.replay_routing(other(gate), routes), mnn.record_routing(gate) as again:
        gate(X, mask=mask)
    assert torch.equal(again[""], routes[""])


@pytest.mark.parametrize("wrap", [lambda model: model, torch.nn.DataParallel, torch.compile], ids=["bare", "dp", "c"])
def test_a_replay_chooses_what_was_recorded(wrap):
    model = Twice()
    with mnn.record_routing(wrap(model)) as routes:
        model(X)
    changed = other(model)
    with mnn.record_routing(changed) as apart:
        changed(X)
    assert not torch.equal(apart["first.gate"], routes["first.gate"])
    with mnn.replay_routing(wrap(changed), routes), mnn.record_routing(changed) as again:
        changed(X)
    assert torch.equal(again["first.gate"], routes["first.gate"])
    assert all(map(torch.equal, again["second.gate"], routes["second.gate"]))
    with mnn.record_routing(changed) as after:
        changed(X)
    assert torch.equal(after["first.gate"], apart["first.gate"])


def test_free_places_are_filled_and_weights_are_live():
    gate = mnn.TopKGate(D, E, K)
    record = torch.full((T, K), -1)
    record[:, 1] = 4
    with mnn.replay_routing(gate, {"": record}):
        found = gate(X)
    logits = gate.project(gate.linear, X)
    expected = mk.topk_gate(logits, K, forced=record)
    assert torch.equal(found.experts, expected[1])
    assert torch.equal(found.weights, expected[0])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_a_replay_under_recomputation(reentrant, compiled):
    if compiled and reentrant:
        pytest.skip("torch.compile does not trace reentrant checkpoints")
    model, x = layer(), X.clone().requires_grad_()
    with mnn.record_routing(model) as routes:
        model(X)
    model, found = other(model), []
    run = lambda x, again: checkpoint(model, x, use_reentrant=reentrant) if again else model(x)  # noqa: E731
    if compiled:
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    for again in (False, True):
        with mnn.replay_routing(model, routes):
            (run(x, again) * X).sum().backward()
        found.append([each.grad for each in (x, *model.parameters())])
        model.zero_grad()
        x.grad = None
    assert found[0][1].any()
    assert all(map(torch.equal, *found))


def test_a_backward_outside_of_the_replay_is_refused():
    model = layer()
    with mnn.record_routing(model) as routes:
        checkpoint(model, X, use_reentrant=False).sum().backward()
    assert routes["gate"].shape == (T, K)  # the repetition in backward is not recorded
    for _ in range(2):  # the second replay follows an ended one
        with mnn.replay_routing(model, routes):
            inside = checkpoint(model, X, use_reentrant=False)
        live = checkpoint(model, X, use_reentrant=False)
        live.sum().backward()
        with pytest.raises(RuntimeError, match="repeats a forward of 'gate' after the context has ended"):
            inside.sum().backward()


def test_compiled_as_one_graph():
    model = torch.compile(layer(), backend="aot_eager", fullgraph=True)
    with mnn.record_routing(model) as routes:
        first = model(X)
    for _ in range(3):
        with mnn.replay_routing(model, routes), mnn.record_routing(model) as again:
            assert torch.equal(model(X), first)
        assert torch.equal(again["gate"], routes["gate"])


def test_other_gates_are_refused_by_name():
    model = torch.nn.Sequential(layer(), mnn.MoE(mnn.SoftmaxGate(D, E), mnn.ExpertMLP(E, D, 5), output="tensor"))
    for context in (mnn.record_routing(model), mnn.replay_routing(model, {})):
        with pytest.raises(TypeError, match=r"only TopKGate can be .* has '1.gate' \(SoftmaxGate\)"), context:
            pass
    permuted = mnn.StagedGate(mnn.SoftmaxGate(D, E), mnn.TopKGate(D, E, K))
    with pytest.raises(TypeError, match=r"has '' \(StagedGate\)"), mnn.record_routing(permuted):
        pass
    with pytest.raises(TypeError, match="found none in Linear"), mnn.record_routing(torch.nn.Linear(2, 2)):
        pass


def test_two_gates_of_one_name_are_refused():
    model = torch.nn.ModuleDict({"module": layer(), "gate": mnn.TopKGate(D, E, K)})
    with pytest.raises(ValueError, match=r"names of their own .* twice: \['gate'\]"), mnn.record_routing(model):
        pass
    several = {name: mnn.TopKGate(D, E, K) for name in "fbdcae"}
    several["module"] = torch.nn.ModuleDict({name: mnn.TopKGate(D, E, K) for name in "dbafec"})
    message = r"twice: \['a', 'b', 'c', 'd', 'e', 'f'\]$"
    with pytest.raises(ValueError, match=message), mnn.record_routing(torch.nn.ModuleDict(several)):
        pass


@pytest.mark.parametrize(
    ("routes", "error", "words"),
    [
        ({}, ValueError, "missing: 'first.gate', 'second.gate'; unknown: none"),
        ({"first.gate": X, "second.gate": X, "third": X}, ValueError, "missing: none; unknown: 'third'"),
        ({"first.gate": X, "second.gate": X}, TypeError, "the record of 'first.gate' must be int16, int32 or int64"),
        (
            {"first.gate": torch.zeros(T, 3).short(), "second.gate": [torch.zeros(T).short()]},
            ValueError,
            r"'first.gate' has \(10, 3\), expected \(T, 2\); 'second.gate' has \(10,\), expected \(T, 2\)",
        ),
    ],
)
def test_records_that_do_not_fit_are_listed(routes, error, words):
    with pytest.raises(error, match=words), mnn.replay_routing(Twice(), routes):
        pass


def test_too_few_tokens_or_calls():
    model = layer()
    with mnn.record_routing(model) as routes:
        model(X)
    with mnn.replay_routing(model, routes), pytest.raises(ValueError, match=r"'gate' must be .* \(4, 2\) .*\(10, 2\)"):
        model(X[:4])
    with mnn.replay_routing(model, routes), pytest.raises(ValueError, match="runs more often than it was recorded, 1"):
        model(model(X))


def test_choices_are_handed_out_on_the_device_of_the_logits():
    replay = Replay("gate", [torch.zeros(T, K).short()])
    found = replay.take(torch.empty(T, E, device="meta"), K)
    assert (found.device.type, found.shape, found.dtype) == ("meta", (T, K), torch.int16)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("", ""),
        ("module", ""),
        ("_orig_mod", ""),
        ("module._orig_mod.module.base_model.model", ""),
        ("module.base_model.model.blocks.0._checkpoint_wrapped_module.module", "blocks.0.module"),
        ("base_model.other.model", "base_model.other.model"),
    ],
)
def test_names_without_what_wrappers_add(name, plain):
    assert unwrapped(name) == plain


def test_a_wrapped_gate_replays_what_it_recorded_alone():
    gate, x = mnn.TopKGate(D, E, 2), torch.randn(7, D)
    with mnn.record_routing(gate) as record:
        recorded = gate(x).experts
    wrapped = torch.nn.Module()
    wrapped.module = gate
    with mnn.replay_routing(wrapped, record):
        assert torch.equal(gate(x.flip(0)).experts, recorded)
