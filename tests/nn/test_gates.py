"""The gates of moe_kernels.nn.gates."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import moe_kernels as mk
from moe_kernels import nn as mnn
from tests.helpers.layers import EVERY, IDS, LAYERS, D, E, Operators, competing, found
from tests.helpers.layers import layer as layer_of


def fixed(gate, weight, bias=None):
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
]  # a weight (E, D): since X is the identity, column t has the logits of token t


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
    assert mnn.GateOutput(weights.bfloat16(), experts, 3).loss.dtype == torch.float32
    records = {"experts_per_sample": torch.tensor([[1e-5, 0.9e-5]])}
    assert mnn.GateOutput(weights, experts, 3, records=records).statistics["experts_per_sample"] == 1
    (to_weights,) = torch.autograd.grad((gates * torch.tensor([1.0, 2.0, 3.0])).sum(), weights)
    assert to_weights.tolist() == [[3.0, 0.0, 1.0], [2.0, 0.0, 0.0]]


def test_noise_is_for_training():
    x = torch.randn(4000, 8)
    for gate in (mnn.TopKGate(8, 4, 4, noise="vmoe"), mnn.SoftmaxGate(8, 4, noise=True)):
        torch.nn.init.zeros_(gate.linear.weight)
        torch.nn.init.zeros_(gate.linear.bias)
        logs = gate(x).gates.log()
        # A row has four logits of standard deviation 1 / 4. After subtraction of their mean it is sqrt(3 / 4) / 4.
        deviation = (logs - logs.mean(-1, keepdim=True)).std().item()
        assert abs(deviation - math.sqrt(3) / 8) < 0.005
        assert (gate.eval()(x).gates - 0.25).abs().max() < 1e-6


def test_jitter_is_learned():
    gate = mnn.TopKGate(8, 4, 2, noise="jitter", generator=torch.Generator().manual_seed(0))
    x = torch.randn(50, 8)
    out = gate(x)
    out.weights[:, 0].sum().backward()
    assert gate.noise_linear.weight.grad.abs().max() > 0
    noise = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * math.log(2)  # softplus(0) = log 2
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
    torch.testing.assert_close(out.losses, expected)
    torch.testing.assert_close(out.loss, sum(expected.values()))
    assert gate.eval()(x).losses == {}
    dense = mnn.SoftmaxGate(8, 4, noise=True, importance=0.5)  # the loss uses probabilities without noise
    torch.testing.assert_close(dense(x).loss, 0.5 * mnn.importance_loss(dense.linear(x).softmax(-1)))


every_gate = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)


def tokens(t=9):
    return torch.randn(t, D), torch.arange(t) % 2


@pytest.mark.parametrize("name", [name for name in EVERY if name != "competition"])
def test_gates_compute_in_the_dtype_of_their_parameters(name):
    """In training, gates and losses of bfloat16 tokens under autocast equal those of the same tokens in float32."""
    gate, (x, ids) = EVERY[name](), tokens()
    x = x.bfloat16()
    before = copy.deepcopy(gate)
    torch.manual_seed(1)
    plain = before(x.float(), ids)
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = gate(x, ids)
    if list(gate.parameters()):
        assert out.weights.dtype == torch.float32
    assert torch.equal(out.gates.float(), plain.gates)
    torch.testing.assert_close(out.losses, plain.losses, rtol=0, atol=0)


def test_experts_compete_in_the_dtype_they_compute_in():
    """Under autocast the norms are those of bfloat16 experts; weights and loss are computed in float32."""
    gate, (x, _) = competing(), tokens()
    (experts,) = gate._experts
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = gate(x)
        assert torch.equal(gate(x.bfloat16()).weights, out.weights)
    every = [parameter.bfloat16() for parameter in (experts.w_in, experts.w_out, experts.b_in, experts.b_out)]
    norms = mk.expert_norms(
        x.bfloat16(), *every[:2], b_in=every[2], b_out=every[3], activation=experts.activation
    ).float()
    weights, winners = mk.topk_gate(norms, 2)
    assert torch.equal(out.weights, weights)
    assert torch.equal(out.experts, winners)
    routed = mk.topk_gate(gate.router.linear(x), 2)
    torch.testing.assert_close(out.losses["router"], mnn.competition_loss(routed, (weights, winners), E))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@every_gate
def test_a_layer_behind_another_trains_under_autocast(make, dtype):
    torch.manual_seed(0)
    before, layer, (x, ids) = torch.nn.Linear(D, D), layer_of(make()), tokens()
    with torch.autocast("cpu", dtype=dtype):
        out = layer(before(x), ids)
        assert layer.eval()(before(x), ids).y.dtype == dtype
    assert out.y.dtype == dtype
    assert out.loss.dtype == torch.float32
    (out.y.float().square().sum() + out.loss).backward()
    trained = [*before.parameters(), *layer.experts.parameters()]
    trained += [each for name, each in layer.gate.named_parameters() if not name.startswith(("hypernetwork", "first"))]
    for parameter in trained:
        assert parameter.grad.dtype == parameter.dtype == torch.float32
        assert parameter.grad.isfinite().all()
    assert all(parameter.grad.any() for parameter in before.parameters())


def test_a_saturated_tree_routes_under_autocast():
    torch.manual_seed(0)
    gate, x = mnn.TreeGate(D, E, 2, route=True).eval(), torch.randn(9, D)
    with torch.no_grad():
        gate.split_weight.mul_(1e6)
    layer = layer_of(gate)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.y.dtype == torch.bfloat16
    assert out.gates[0].weights.shape == (9, 2)  # two trees: one expert each
    torch.testing.assert_close(out.y.float(), layer(x).y, rtol=0.02, atol=0.02)


@every_gate
def test_no_token_is_a_batch_too(make):
    layer = layer_of(make())
    x, ids = tokens(0)
    out = layer(x, ids)
    assert out.y.shape == (0, D)
    assert out.gates[0].gates.shape == (0, layer.gate.num_experts)
    (out.y.sum() + out.loss).backward()
    if not isinstance(layer.gate, mnn.PermutedGate):  # its loss does not depend on the batch
        assert out.loss == 0
    for name, value in out.statistics.items():
        assert value.isfinite().all(), name
    for parameter in layer.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()


@every_gate
def test_two_forwards_before_a_backward(make):
    """Two forward passes before two backward passes give the gradients of two separate passes."""
    layer = layer_of(make())
    if isinstance(layer.gate, mnn.PermutedGate):
        layer.gate.search.step = layer.gate.search.steps  # stage two; in stage one each forward has another temperature
    if isinstance(layer.gate, mnn.XMoEGate):
        layer(*tokens())  # with score "code", the first forward pass scales the embeddings
    twin, (x, ids) = copy.deepcopy(layer), tokens()
    torch.manual_seed(2)
    first, second = layer(x, ids), layer(x * 2, ids)
    (first.y.square().sum() + first.loss).backward()
    (second.y.square().sum() + second.loss).backward()
    torch.manual_seed(2)
    for scale in (1, 2):
        out = twin(x * scale, ids)
        (out.y.square().sum() + out.loss).backward()
    for own, other in zip(layer.parameters(), twin.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None)
        if own.grad is not None:
            torch.testing.assert_close(own.grad, other.grad)


@every_gate
def test_a_state_dict_holds_all_that_decides(make):
    torch.manual_seed(3)
    gate, (x, ids) = make(), tokens()
    gate(x, ids)
    torch.manual_seed(4)
    other = make()
    if isinstance(other, mnn.StagedGate):
        other.stage = 1
    other.load_state_dict(gate.state_dict())
    found = []
    for each in (gate.eval(), other.eval()):
        torch.manual_seed(5)
        found.append(each(x, ids).gates)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["hash", "manual", "random", "stable", "ensemble"])
def test_ids_that_are_none_are_named(name):
    gate, (x, ids) = EVERY[name](), tokens()
    if name == "random":
        gate = mnn.RandomGate(E, inference="ids")
        assert gate(x).experts.shape == (9, 1)  # training needs no ids
        gate.eval()
    called = type(gate).__name__
    with pytest.raises(ValueError, match=f"{called}: expected ids"):
        gate(x)
    with pytest.raises(TypeError, match=f"{called}: ids must have dtype int32, int64; got float32"):
        gate(x, ids.float())
    with pytest.raises(ValueError, match=rf"{called}: ids must be \(9,\) for x \(9, 6\), got \(8,\)"):
        gate(x, ids[1:])
    for wrong in (-1, IDS):
        with pytest.raises(ValueError, match=rf"{called}: ids must be from 0 to \d+, got"):
            gate(x, torch.where(torch.arange(9) == 4, wrong, ids))


def test_compiled_a_negative_id_fails_in_the_lookup():
    """A compiled gate does not check the range of ids, so the lookup must refuse bad ids, also -1."""
    gate, (x, ids) = EVERY["hash"](), tokens()
    compiled = torch.compile(gate, backend="eager")
    assert torch.equal(compiled(x, ids).experts, gate(x, ids).experts)
    for wrong in (-1, IDS):
        with pytest.raises(IndexError, match=r"out of (range|bounds)"):
            compiled(x, torch.full_like(ids, wrong))


def test_ids_without_values_are_not_asked_for_them():
    """FakeTensorMode computes shapes but no values, so the range of the ids is not checked."""
    with FakeTensorMode():
        assert EVERY["hash"]()(*tokens()).experts.shape == (9, 1)


@every_gate
def test_a_gate_without_values_tells_shapes(make):
    """On the meta device, which has no values, outputs have the same shapes and dtypes as on the CPU."""
    gate, (x, ids) = make(), tokens()
    bare = copy.deepcopy(gate).to("meta")
    for experts in getattr(bare, "_experts", ()):  # no submodule of the gate, so `to` does not move them
        experts.to("meta")
    for training in (True, False):
        given = gate.train(training)(x, ids)
        out = bare.train(training)(x.to("meta"), ids.to("meta"))
        assert out.weights.device.type == out.experts.device.type == out.loss.device.type == "meta"
        for each in ("weights", "experts", "gates", "loss"):
            assert getattr(out, each).shape == getattr(given, each).shape
            assert getattr(out, each).dtype == getattr(given, each).dtype


@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("hash", "manual", "random")])
def test_tokens_of_another_width_are_named(name):
    gate = EVERY[name]()
    with pytest.raises(ValueError, match="got shape" if name != "competition" else "expert_norms: w_in must be"):
        gate(torch.randn(9, D + 1), tokens()[1])


def test_gates_of_other_parts_are_refused():
    with pytest.raises(ValueError, match=r"TopKGate: x must be \(T, 4\), got shape \(2, 3, 4\)"):
        mnn.TopKGate(4, 4, 2)(torch.randn(2, 3, 4))
    with pytest.raises(TypeError, match="CompetitionGate: expected router to be a TopKGate and experts an ExpertMLP"):
        mnn.CompetitionGate(mnn.SoftmaxGate(D, E), mnn.ExpertMLP(E, D, 3))
    with pytest.raises(ValueError, match="CompetitionGate: router must have as many experts as `experts`, 3; got 4"):
        mnn.CompetitionGate(mnn.TopKGate(D, E, 2), mnn.ExpertMLP(3, D, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_orthogonal_weights_of_16_bits(dtype):
    for gate in (mnn.StableGate(16, 4, 10, dtype=dtype), mnn.XMoEGate(16, 4, 2, dtype=dtype)):
        weight = (gate.centroids if isinstance(gate, mnn.StableGate) else gate.embeddings).detach()
        assert weight.dtype == dtype
        products = weight.float() @ weight.float().T
        torch.testing.assert_close(
            products, products[0, 0] * torch.eye(4), rtol=2e-2, atol=2e-2 * products[0, 0].item()
        )


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("training", [True, False])
def test_modules_pass_their_backend_on(name, training):
    """With backend "reference" in all modules, operators of moe_kernels run only to check arguments and to make plans:
    modules pass no backend to functions that make plans."""
    net = LAYERS[name]().train(training)
    for module in net.modules():
        if hasattr(module, "backend"):
            module.backend = "reference"
    with Operators() as seen:
        found(net, list(net.parameters()))
    assert all(each.startswith(("make_plan", "plan_", "refuse_")) for each in seen.names)


@pytest.mark.parametrize("name", [name for name, make in EVERY.items() if hasattr(make(), "reset_parameters")])
def test_a_generator_alone_draws_a_gates_own_parameters(name):
    """Compares only the gate's own tensors, since torch's modules inside a gate take no generator."""
    drawn = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        gate = EVERY[name]()
        gate.reset_parameters(torch.Generator().manual_seed(0))
        drawn.append([*gate.parameters(recurse=False), *gate.buffers(recurse=False)])
    torch.testing.assert_close(*drawn, rtol=0, atol=0)
