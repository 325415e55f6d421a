"""Tests of MoE, MultiGateMoE and routing policies."""

from __future__ import annotations

import copy
import itertools
import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import moe_kernels as mk
from moe_kernels.nn import ExpertLayer, ExpertMLP, LocalSearch, MoE, MultiGateMoE, SoftmaxGate, TopKGate, TreeGate
from moe_kernels.nn.gates import GateOutput, HashGate, PermutedGate
from moe_kernels.nn.policies import ExpertChoice, NonzeroWeights, PriorityRouting, TokenChoice, nonzero_choices

T, D, H, E = 12, 6, 5, 4


def outputs(experts, x):
    """Outputs (T, E, Dout) of every expert for every token."""
    if isinstance(experts, ExpertLayer):
        return F.relu(torch.einsum("td,edh->teh", x, experts.weight) + experts.bias)
    hidden = F.gelu(torch.einsum("td,edh->teh", x, experts.w_in) + experts.b_in)
    return torch.einsum("teh,ehd->ted", hidden, experts.w_out) + experts.b_out


@pytest.mark.parametrize("experts", [ExpertMLP(E, D, H).double(), ExpertLayer(E, D, H).double()], ids=["mlp", "layer"])
def test_a_layer_is_the_weighted_sum_of_its_experts(experts):
    torch.manual_seed(0)
    x = torch.randn(3, T // 3, D, dtype=torch.float64, requires_grad=True)
    layer = MoE(TopKGate(D, E, 2), experts).double()
    out = layer(x)
    gates = layer.gate(x.reshape(T, D)).gates
    expected = (gates[..., None] * outputs(experts, x.reshape(T, D))).sum(1).reshape(3, T // 3, -1)
    torch.testing.assert_close(out.y, expected)
    inputs = [x, *layer.parameters()]
    grads = [torch.autograd.grad(y.square().sum(), inputs) for y in (out.y, expected)]
    torch.testing.assert_close(*grads)
    assert out.statistics["experts_per_token"] == 2
    torch.testing.assert_close(out.statistics["load"] * T, out.plan.requested.float())


def test_capacity_drops_and_the_dropped_are_zero():
    torch.manual_seed(0)
    layer = MoE(TopKGate(D, E, 1, order="softmax_topk"), ExpertMLP(E, D, H), TokenChoice(0.5))
    out = layer(torch.randn(T, D))
    dropped = (out.plan.slot_row < 0).all(1)
    assert out.plan.kept.max() <= math.ceil(T * 0.5 / E)
    assert torch.equal((out.statistics["load"] * T).round().int(), out.plan.kept)
    assert dropped.any()
    assert not dropped.all()
    assert torch.equal(out.y[dropped], torch.zeros(int(dropped.sum()), D))
    assert (out.y[~dropped] != 0).any(1).all()


def test_capacity_may_change_after_training():
    layer = MoE(TopKGate(D, E, 1), ExpertMLP(E, D, H), TokenChoice(1.0, factor_eval=None, multiple_of=4))
    x = torch.ones(T, D)  # all tokens go to one expert
    assert layer(x).plan.kept.max() == 4
    assert layer.eval()(x).plan.kept.max() == T
    layer.policy = TokenChoice(1.0, factor_eval=2.0)
    assert layer(x).plan.kept.max() == 6  # T / E = 3
    assert layer.train()(x).plan.kept.max() == 3


@pytest.mark.parametrize(("priority", "kept"), [(None, [0, 1]), ("max", [2, 1]), ("sum", [3, 2])])
def test_priorities_of_v_moe(priority, kept):
    weights = torch.tensor([[0.1, 0.5], [0.6, 0.1], [0.1, 0.7], [0.45, 0.44]])
    gate = GateOutput(weights, torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1]], dtype=torch.int32), E)
    plan, _ = TokenChoice(1.0, priority=priority)(gate, True)  # ceil(4 * 2 / 4) = 2 rows
    assert plan.row_token[:2].tolist() == kept


@pytest.mark.parametrize("priority", [None, "max"])
@pytest.mark.parametrize("order", ["choice", "token"])
def test_groups_compete_for_capacity_one_after_the_other(priority, order):
    torch.manual_seed(0)
    experts = ExpertMLP(E, D, H).double()
    gate, x = TopKGate(D, E, 2).double(), torch.randn(T, D, dtype=torch.float64)
    policy = TokenChoice(0.8, priority=priority, order=order, group=5)  # ceil(5 * 2 * 0.8 / 4) = 2 rows an expert
    out = MoE(gate, experts, policy)(x)
    alone = [MoE(gate, experts, TokenChoice(0.8, priority=priority, order=order))(each) for each in x[:10].split(5)]
    alone.append(MoE(gate, experts, TokenChoice(2.0, priority=priority, order=order))(x[10:]))  # also 2 rows an expert
    torch.testing.assert_close(out.y, torch.cat([each.y for each in alone]))
    for name in ("requested", "kept", "dropped"):
        assert torch.equal(getattr(out.plan, name), sum(getattr(each.plan, name) for each in alone)), name
    assert out.plan.dropped > 0
    assert torch.equal(out.plan.expert_offsets.diff(), out.plan.kept)
    assert torch.equal(out.plan.used, torch.cat([each.plan.used for each in alone]))


@pytest.mark.parametrize("tokens", [0, 1, 3, 8])
def test_fewer_tokens_than_a_group_have_the_capacity_of_a_whole_group(tokens):
    gate = GateOutput(torch.ones(tokens, 1), torch.zeros(tokens, 1, dtype=torch.int32), 2)
    plan, _ = TokenChoice(1.0, group=8)(gate, True)  # ceil(8 / 2) = 4 rows
    assert plan.kept.tolist() == [min(tokens, 4), 0]


def test_experts_choose_in_every_group():
    torch.manual_seed(0)
    gate, experts, x = SoftmaxGate(D, E).double(), ExpertMLP(E, D, H).double(), torch.randn(T, D, dtype=torch.float64)
    out = MoE(gate, experts, ExpertChoice(1.3, group=6))(x)  # round(6 * 1.3 / 4) = 2
    alone = [MoE(gate, experts, ExpertChoice(1.3))(each) for each in x.split(6)]
    torch.testing.assert_close(out.y, torch.cat([each.y for each in alone]))
    assert torch.equal(out.plan.used, torch.cat([each.plan.used for each in alone]))
    assert out.plan.kept.tolist() == [4] * E
    assert out.plan.num_rows == 4 * E
    with pytest.raises(ValueError, match="ExpertChoice: T must be a multiple of group = 5, got 12"):
        ExpertChoice(group=5)(gate(x), True)
    with pytest.raises(ValueError, match="TokenChoice: group must be from 1"):
        TokenChoice(group=0)


@pytest.mark.parametrize(
    ("tokens", "policy", "taken"),
    [
        (9, ExpertChoice(), 2),  # 9 / 4 = 2.25
        (10, ExpertChoice(), 2),  # 10 / 4 = 2.5, rounded to even
        (11, ExpertChoice(), 3),
        (10, ExpertChoice(1.4), 4),  # 1.4 * 10 / 4 = 3.5, rounded to even
        (9, ExpertChoice(multiple_of=1), 3),
        (9, ExpertChoice(multiple_of=4), 4),
        (1, ExpertChoice(), 1),  # 0.25: at least one, so that no layer is silently without experts
        (2, ExpertChoice(0.1), 1),
        (9, ExpertChoice(0), 0),
    ],
)
def test_experts_choose_a_whole_number_of_tokens(tokens, policy, taken):
    plan, _ = policy(SoftmaxGate(D, E)(torch.randn(tokens, D)), True)
    assert plan.kept.tolist() == [taken] * E


def test_experts_choose():
    torch.manual_seed(0)
    layer = MoE(SoftmaxGate(D, E), ExpertMLP(E, D, H), ExpertChoice(1.0)).double()
    x = torch.randn(T, D, dtype=torch.float64)
    out, gates = layer(x), layer.gate(x).gates
    taken = torch.zeros_like(gates).scatter_(0, gates.topk(T // E, dim=0).indices, 1)
    torch.testing.assert_close(out.y, ((gates * taken)[..., None] * outputs(layer.experts, x)).sum(1))
    assert out.plan.kept.tolist() == [T // E] * E


def test_priority_routing_gives_every_token_one_expert_and_even_loads():
    layer = MoE(SoftmaxGate(D, E), ExpertMLP(E, D, H), PriorityRouting())
    out = layer(torch.randn(T, D))
    assert out.plan.kept.tolist() == [T // E] * E
    assert (out.plan.slot_row >= 0).all()
    layer.policy = PriorityRouting(0.6)
    assert layer(torch.randn(T, D)).plan.kept.tolist() == [2] * E  # 0.6 T / E = 1.8, rounded up


def test_expert_dropout_is_by_sample_and_in_training_alone():
    torch.manual_seed(0)
    experts = ExpertMLP(E, D, H)
    layer = MoE(SoftmaxGate(D, E), experts, expert_dropout=0.5)
    x = torch.randn(40, 2, D)
    x[:, 1] = x[:, 0]  # equal tokens of a sample: y is equal if both lose the same experts
    y = layer(x).y
    torch.testing.assert_close(y[:, 0], y[:, 1])
    every, gates = outputs(experts, x[:, 0]), layer.gate(x[:, 0]).gates
    subsets = torch.tensor([[(s >> e) & 1 for e in range(E)] for s in range(2**E)])
    possible = torch.einsum("te,se,ted->tsd", gates, subsets.float(), every)
    assert ((possible - y[:, :1]).abs().amax(-1).amin(1) < 1e-5).all()
    full = (gates[..., None] * every).sum(1)
    assert ((y[:, 0] - full).abs().amax(-1) > 1e-4).float().mean() > 0.7  # 15 of 16 subsets lack an expert
    torch.testing.assert_close(layer.eval()(x).y[:, 0], full, atol=1e-5, rtol=1e-5)
    layer.expert_dropout, x = 0.1, torch.randn(1000, 1, D)  # 0.9^4 = 0.66 of the samples keep all four experts
    plain = layer(x).y
    assert 0.5 < ((layer.train()(x).y - plain).abs().amax((1, 2)) < 1e-6).float().mean() < 0.8


@pytest.mark.parametrize("shape", [(60,), (60, 2), (60, 2, 3)], ids=str)
def test_a_sample_of_expert_dropout_is_a_row_of_the_first_dimension(shape):
    torch.manual_seed(0)
    layer = MoE(SoftmaxGate(D, E), ExpertMLP(E, D, H), expert_dropout=0.5)
    x = torch.randn(D).expand(*shape, D)  # equal tokens: only the dropped experts make outputs differ
    y = layer(x).y.reshape(shape[0], -1, D)
    torch.testing.assert_close(y, y[:, :1].expand_as(y))
    assert len(y[:, 0].round(decimals=3).unique(dim=0)) > 8  # of 16 subsets


@pytest.mark.parametrize("kind", [ExpertMLP, ExpertLayer])
def test_dropout_of_the_experts_is_for_training(kind):
    experts, x = kind(E, D, H, dropout=1.0), torch.randn(T, D)
    layer, shared = MoE(TopKGate(D, E, 2), experts), MultiGateMoE([TopKGate(D, E, 2)], experts)
    assert not layer(x).y.any()
    assert not shared(x).y[0].any()
    assert layer.eval()(x).y.any()
    assert shared.eval()(x).y[0].any()


def test_what_no_expert_takes_passes_through():
    gate = TopKGate(D, E, 1, order="softmax_topk")
    layer = MoE(gate, ExpertMLP(E, D, H), TokenChoice(0.5), pass_through=True).double()
    x = torch.randn(T, D, dtype=torch.float64)
    out, weights = layer(x), gate(x).weights
    kept = (out.plan.slot_row >= 0).double() * weights
    inner = MoE(gate, layer.experts, TokenChoice(0.5))(x).y
    torch.testing.assert_close(out.y, inner + (1 - kept) * x)
    layer.expert_dropout = 1.0
    torch.testing.assert_close(layer(x).y, x)  # no expert is left


@pytest.mark.parametrize("experts", [ExpertMLP(E, D, H).double(), ExpertLayer(E, D, H).double()], ids=["mlp", "layer"])
def test_tasks_share_experts_that_run_once(experts):
    gates = [SoftmaxGate(D, E).double(), TopKGate(D, E, 1).double()]
    layer = MultiGateMoE(gates, experts)
    x = torch.randn(T, D, dtype=torch.float64)
    out, every = layer(x), outputs(experts, x)
    for y, gate in zip(out.y, gates, strict=True):
        torch.testing.assert_close(y, (gate(x).gates[..., None] * every).sum(1))
    assert out.statistics["experts_per_token"] == E
    sparse = MultiGateMoE([gates[1], gates[1]], experts)(x)
    assert sparse.statistics["experts_per_token"] == 1  # experts of weight 0 in all tasks do not run
    assert sparse.plan.num_rows == T
    several = [gates[1], TopKGate(D, E, 1).double()]
    out = MultiGateMoE(several, experts)(x)
    assert out.plan.num_rows == out.plan.kept.sum() <= 2 * T
    for y, gate in zip(out.y, several, strict=True):
        torch.testing.assert_close(y, (gate(x).gates[..., None] * every).sum(1))


def test_an_expert_of_weight_zero_is_no_choice():
    gates = torch.tensor([[0.0, 0.5, -0.0, 0.5], [0.0, 0.0, 1.0, 0.0]])
    assert nonzero_choices(gates, 4).tolist() == [[-1, 1, -1, 3], [-1, -1, 2, -1]]
    assert nonzero_choices(gates, 2).tolist() == [[3, 1], [2, -1]]


def test_experts_start_as_linear_layers_do():
    experts = ExpertMLP(3, 400, 100).requires_grad_(False)
    assert experts.w_in.abs().max() <= 1 / 20
    assert experts.w_in.std() == pytest.approx(1 / 20 / math.sqrt(3), rel=0.02)
    assert experts.w_out.abs().max() <= 1 / 10
    assert 1 / 20 < experts.b_out.abs().max() <= 1 / 10


def test_a_gate_over_other_experts_is_refused():
    with pytest.raises(ValueError, match="MoE: a gate must have as many experts as `experts`, 3; got 4"):
        MoE(TopKGate(D, E, 2), ExpertMLP(3, D, H))
    for kind, gate in ((MoE, TopKGate(D, E, 2)), (MultiGateMoE, [TopKGate(D, E, 2)])):
        with pytest.raises(TypeError, match=f"^{kind.__name__}: experts must be .*Experts.*Linear"):
            kind(gate, torch.nn.Linear(D, D))
    with pytest.raises(ValueError, match="TokenChoice: priority"):
        TokenChoice(priority="min")


@pytest.mark.parametrize("masked", [False, True])
def test_policies_take_no_tokens(masked):
    gate = SoftmaxGate(D, E)(torch.randn(0, D))
    mask = torch.ones(0, dtype=torch.bool) if masked else None
    for policy in (
        TokenChoice(1.0),
        ExpertChoice(2.0),
        ExpertChoice(2.0, group=3),
        PriorityRouting(),
        NonzeroWeights(),
    ):
        plan, weights = policy(gate, True, **({"mask": mask} if masked else {}))
        assert (plan.kept.tolist(), plan.num_rows, len(weights)) == ([0] * E, 0, 0)


def test_policies_refuse_at_once():
    for make, words in (
        (lambda: TokenChoice(-1.0), "TokenChoice: factor must be at least 0, got -1.0"),
        (lambda: TokenChoice(1.0, factor_eval="half"), "TokenChoice: factor_eval must be a finite number, got 'half'"),
        (lambda: TokenChoice(1.0, factor_eval="1/0"), "TokenChoice: factor_eval must be a finite number, got '1/0'"),
        (
            lambda: TokenChoice(1.0, multiple_of=0),
            "TokenChoice: multiple_of must be from 1 to 2147483647 .rows., got 0",
        ),
        (lambda: TokenChoice(group=0), "TokenChoice: group must be from 1 to 2147483647 .tokens of a group., got 0"),
        (lambda: TokenChoice(group=2**31), "TokenChoice: group must be from 1 to 2147483647 .tokens of a group."),
        (lambda: TokenChoice(order="tokens"), "TokenChoice: order must be one of None, .*; got 'tokens'"),
        (lambda: ExpertChoice(-1.0), "ExpertChoice: factor must be at least 0, got -1.0"),
        (lambda: ExpertChoice(multiple_of=0), "ExpertChoice: multiple_of must be from 1 to 2147483647 .rows., got 0"),
        (lambda: ExpertChoice(group=0), "ExpertChoice: group must be from 1 to 2147483647 .tokens of a group., got 0"),
        (lambda: ExpertChoice(group=2**31), "ExpertChoice: group must be from 1 to 2147483647 .tokens of a group."),
        (lambda: PriorityRouting(math.nan), "PriorityRouting: factor must be a finite number, got nan"),
    ):
        with pytest.raises(ValueError, match=f"^{words}"):
            make()
    largest = 2**31 - 1
    TokenChoice(multiple_of=largest, group=largest), ExpertChoice(multiple_of=largest, group=largest)


def test_a_gate_of_several_tasks_says_its_losses_once():
    gate = TopKGate(D, E, 2, z=1.0)
    out = MultiGateMoE([gate, gate], ExpertMLP(E, D, H))(torch.randn(T, D))
    assert set(out.losses) == {"task0.z"}
    assert {"task0.gates", "task1.gates"} <= set(out.statistics)


def test_each_task_of_several_has_its_own_statistics_and_losses():
    gates, x = (
        [TopKGate(D, E, 2, z=1.0), SoftmaxGate(D, E, importance=0.5), TopKGate(D, E, 1, z=2.0)],
        torch.randn(T, D),
    )
    out = MultiGateMoE(gates, ExpertMLP(E, D, H))(x)
    alone = [gate(x) for gate in gates]
    for task, each in enumerate(alone):
        assert torch.equal(out.statistics[f"task{task}.gates"], each.gates)
        assert {name: out.losses[f"task{task}.{name}"] for name in each.losses} == each.losses
    torch.testing.assert_close(out.loss, sum(each.loss for each in alone))
    used = torch.stack([each.gates for each in alone]).sum(0) != 0
    assert torch.equal(out.statistics["load"] * T, used.sum(0).float())


def test_what_a_layer_cannot_do_is_refused():
    gate = TopKGate(4, 2, 1)
    with pytest.raises(ValueError, match=r"MoE: expert_dropout must be from 0 to 1 \(a rate\), got 1\.5"):
        MoE(gate, ExpertMLP(2, 4, 4), expert_dropout=1.5)
    with pytest.raises(ValueError, match="MoE: pass_through needs experts from D to D, got 4 and 3"):
        MoE(gate, ExpertMLP(2, 4, 4, 3), pass_through=True)(torch.randn(5, 4))
    with pytest.raises(ValueError, match="MultiGateMoE: expected at least one gate"):
        MultiGateMoE([], ExpertMLP(2, 4, 4))


@pytest.mark.parametrize("experts", [ExpertMLP(2, 4, 8), ExpertLayer(2, 4, 4)], ids=lambda each: type(each).__name__)
def test_x_of_another_dtype_than_the_experts_is_refused(experts):
    layer, x = MoE(TopKGate(4, 2, 1), experts), torch.randn(5, 4, dtype=torch.bfloat16)
    expected = "x must have the dtype of the parameters, torch.float32; got torch.bfloat16; .* torch.autocast"
    with pytest.raises(TypeError, match=f"{type(experts).__name__}: {expected}"):
        layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).y.dtype == torch.bfloat16


def test_tasks_share_a_permutation():
    pytest.importorskip("scipy", reason="hardening needs scipy")
    torch.manual_seed(0)
    gates, search = [SoftmaxGate(D, E), SoftmaxGate(D, E)], LocalSearch(E, 3)
    layer, x = MultiGateMoE(gates, ExpertLayer(E, D, H), search), torch.randn(T, D)
    out = layer(x)
    every = outputs(layer.experts, x)
    for y, gate in zip(out.y, gates, strict=True):
        permuted = gate(x).gates @ search.soft[0]
        torch.testing.assert_close(y, ((permuted / permuted.sum(-1, keepdim=True))[..., None] * every).sum(1))
    assert search.step == 1
    torch.testing.assert_close(out.losses["permutation"], search.regulariser(None))
    layer(x), layer(x)
    assert search.hardened
    hard = layer(x)
    for y, gate in zip(hard.y, gates, strict=True):
        torch.testing.assert_close(y, (gate(x).gates[:, search.source[0], None] * every).sum(1))


def test_a_plan_has_a_choice_for_every_expert_only_while_a_search_mixes_them():
    pytest.importorskip("scipy", reason="hardening needs scipy")
    gates, search, x = [TopKGate(D, E, 1), TopKGate(D, E, 2)], LocalSearch(E, 3), torch.randn(T, D)
    for given, choices in ((search, [E, E, 3, 3]), (None, [3])):
        layer = MultiGateMoE(gates, ExpertLayer(E, D, H), given)
        assert [layer(x).plan.slot_expert.shape[1] for _ in choices] == choices


def test_experts_of_weight_zero_are_not_evaluated():
    torch.manual_seed(0)
    gate, experts = TreeGate(D, E, gamma=0.01), ExpertMLP(E, D, H)
    with torch.no_grad():
        gate.split_weight.mul_(1000)
    found = {}
    for policy in (TokenChoice(), NonzeroWeights()):
        x = torch.randn(T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = MoE(gate, experts, policy).double()(x)
        parameters = [x, *gate.parameters(), *experts.parameters()]
        found[type(policy)] = out, torch.autograd.grad(out.y.square().sum(), parameters)
    (every, expected), (few, grads) = found.values()
    torch.testing.assert_close(few.y, every.y)
    torch.testing.assert_close(grads, expected)
    assert torch.equal(few.plan.kept, (every.gates[0].gates != 0).sum(0).int())
    assert few.plan.kept.sum() < every.plan.kept.sum() == T * E
    sparse = GateOutput(torch.tensor([[0.5, 0.0], [0.25, 0.75]]), torch.tensor([[2, 1], [0, 3]]), E)
    plan, weights = NonzeroWeights()(sparse, False)
    assert plan.kept.tolist() == [1, 0, 1, 1]
    assert weights.sum(1).tolist() == [0.5, 1.0]


@pytest.mark.parametrize("kind", ["tree", "hash"])
def test_a_gate_behind_a_permutation(kind):
    """MoE with a PermutedGate equals MultiGateMoE with one task, before and after the permutation becomes hard."""
    torch.manual_seed(0)
    gate = TreeGate(D, E, entropy=0.1) if kind == "tree" else HashGate(5, E)
    experts, x, ids = ExpertLayer(E, D, H), torch.randn(T, D), torch.arange(T) % 5
    searches = [LocalSearch(E, 3, zeta=0.1, generator=torch.Generator().manual_seed(2)) for _ in range(2)]
    one = MoE(PermutedGate(gate, searches[0]), experts, NonzeroWeights())
    tasks = MultiGateMoE([gate], experts, searches[1])
    for step in range(5):
        for layer in (one, tasks):
            layer.train(step < 4)
        out, expected = one(x, ids), tasks(x, ids)
        torch.testing.assert_close(out.y, expected.y[0])
        torch.testing.assert_close(out.loss, expected.loss)
        torch.testing.assert_close(out.gates[0].gates, expected.statistics["task0.gates"])
        assert torch.equal(out.plan.kept, expected.plan.kept)
        assert ("permutation" in out.losses) == (step < 4)
    assert searches[0].hardened
    with pytest.raises(ValueError, match="PermutedGate: expected a search of one permutation of 4 experts, got 1 of 3"):
        PermutedGate(gate, LocalSearch(3, 1))


def test_probabilities_behind_a_permutation_are_those_of_its_experts():
    torch.manual_seed(0)
    search = LocalSearch(E, 4, bound=1e-3)
    gate, x = PermutedGate(TopKGate(D, E, 1), search), torch.randn(T, D)
    own = gate.gate.router_probs(x)
    torch.testing.assert_close(gate.router_probs(x), own)  # the identity, before the first step
    gate(x)
    expected = own.double() @ search.soft[0].double()
    torch.testing.assert_close(gate.router_probs(x).double(), expected / expected.sum(-1, keepdim=True))
    assert search.step == 1
    with torch.no_grad():
        search.scores[0] = torch.eye(E)[[2, 0, 3, 1]]
    for training in (True, True, False, True, True):
        out = gate.train(training)(x)
    assert search.hardened
    probs = gate.router_probs(x)
    torch.testing.assert_close(probs[:, [2, 0, 3, 1]], own)
    assert torch.equal(probs.argmax(-1), out.gates.argmax(-1))
    assert torch.equal(gate.eval().router_probs(x), probs)
    assert PermutedGate(HashGate(T, E), search).router_probs(x, torch.arange(T)) is None


@pytest.mark.parametrize("policy", [None, TokenChoice(1.0), PriorityRouting(), ExpertChoice(1.0)], ids=repr)
@pytest.mark.parametrize(
    "experts", [ExpertMLP(E, D, H, activation="swiglu"), ExpertLayer(E, D, H)], ids=["mlp", "layer"]
)
def test_a_layer_without_memory_counts_shapes_and_flops(experts, policy):
    """On the meta device, which allocates nothing, a layer has the shapes and FLOPs that it has on the CPU."""
    layer, found = MoE(TopKGate(D, E, 2), experts, policy), []
    for device in ("cpu", "meta"):
        made, x = copy.deepcopy(layer).to(device), torch.randn(T, D, device=device, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            y = made(x).y
            y.sum().backward()
        gradients = [x.grad.shape, *(each.grad.shape for each in made.parameters() if each.grad is not None)]
        found.append((y.shape, gradients, counter.get_total_flops()))
    assert found[0] == found[1]


@pytest.mark.parametrize("factor", [0, 0.29, 1.05, "1.1", Fraction(2, 3), 2])
def test_room_is_that_of_the_exact_factor(factor):
    """Capacities are exact: a float factor stands for the decimal number that repr prints."""
    exact = Fraction(str(factor))
    for tokens, experts, multiple in itertools.product((0, 1, 7, 100, 1000), (1, 3, 8), (1, 4)):
        expected = multiple * math.ceil(Fraction(math.ceil(2 * tokens * exact / experts), multiple))
        assert mk.expert_capacity(tokens, 2, experts, factor, multiple) == expected
        rows = ExpertChoice(factor)._rows(tokens, experts)
        assert rows == max(1 if exact else 0, round(exact * tokens / experts))


@pytest.mark.parametrize("policy", [TokenChoice(0), TokenChoice(0, group=4), PriorityRouting(0), ExpertChoice(0)])
def test_a_factor_of_0_drops_every_token(policy):
    """The output is zero, or with pass_through x, and the experts get zero gradients."""
    layer, x = MoE(SoftmaxGate(D, E), ExpertMLP(E, D, H), policy), torch.randn(T, D)
    out = layer(x)
    assert not out.plan.kept.any()
    assert not out.y.any()
    if isinstance(policy, TokenChoice):
        assert out.statistics["dropped"] == 1
        assert not TokenChoice(factor_eval=0)(out.gates[0], training=False)[0].kept.any()
    torch.testing.assert_close(layer(x, pass_through=True).y, x)
    out.y.sum().backward()
    assert not any(each.grad.any() for each in layer.experts.parameters())


def test_negative_weights_count_as_choices():
    signed = torch.tensor([[-0.5, 0.0, 0.5]])
    assert nonzero_choices(signed, 3).tolist() == [[0, -1, 2]]


def test_an_order_without_a_capacity_is_heeded():
    gate = GateOutput(torch.ones(2, 2), torch.tensor([[1, 0], [0, 1]], dtype=torch.int32), 2)
    rows = {order: TokenChoice(order=order)(gate, True)[0].row_token.tolist() for order in (None, "choice")}
    assert rows == {None: [0, 1, 0, 1], "choice": [1, 0, 0, 1]}
    rows = {order: TokenChoice(1.0, order=order)(gate, True)[0].row_token.tolist() for order in (None, "token")}
    assert rows == {None: [1, 0, 0, 1], "token": [0, 1, 0, 1]}


def test_a_choice_of_no_expert_is_none_in_a_group_too():
    experts = torch.tensor([[0, 1], [-1, 0], [1, -1], [-1, -1]], dtype=torch.int32)
    plan, _ = TokenChoice(0.5, group=2)(GateOutput(torch.ones(4, 2), experts, 2), True)  # one row an expert and group
    assert plan.requested.tolist() == [2, 2]
    assert plan.used.tolist() == [[True, True], [False, False], [False, True], [False, False]]


def test_weights_of_two_tasks_that_cancel_are_choices():
    one, other = SoftmaxGate(6, 4), SoftmaxGate(6, 4)
    one.forward = lambda x, ids=None: GateOutput.of_gates(torch.eye(4))
    other.forward = lambda x, ids=None: GateOutput.of_gates(-torch.eye(4))
    out = MultiGateMoE([one, other], ExpertMLP(4, 6, 5))(torch.randn(4, 6))
    assert out.plan.kept.tolist() == [1, 1, 1, 1]
    torch.testing.assert_close(out.y[0], -out.y[1])
