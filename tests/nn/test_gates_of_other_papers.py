"""Gates, losses and schedules of the sparse ViT, V-MoE, E^3, THOR and CompeteSMoE."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import moe_kernels as mk
from moe_kernels.nn import ExpertMLP, MoE, SoftmaxGate, StagedGate, TokenChoice, TopKGate, losses, schedules
from moe_kernels.nn.gates.competition import CompetitionGate
from moe_kernels.nn.gates.ensemble import EnsembleGate, ensemble_log_probs, tile
from moe_kernels.nn.gates.hyper import HyperRouterGate
from moe_kernels.nn.gates.manual import MNIST, ManualGate
from moe_kernels.nn.gates.stable import StableGate
from moe_kernels.nn.gates.thor import RandomGate
from moe_kernels.nn.gates.xmoe import XMoEGate
from moe_kernels.ops.expert_norms import expert_norms
from moe_kernels.papers.models.moe import MoEBlock

T, D, H, E, K = 10, 6, 5, 4, 2


def every_output(experts, x, activation=F.gelu):
    """Outputs (T, E, Dout) of all experts for all tokens."""
    hidden = activation(torch.einsum("td,edh->teh", x, experts.w_in) + experts.b_in)
    return torch.einsum("teh,ehd->ted", hidden, experts.w_out) + experts.b_out


def competing(**options):
    experts, router = ExpertMLP(E, D, H, activation="relu"), TopKGate(D, E, K)
    return MoE(CompetitionGate(router, experts, **options), experts).double()


def test_winners_are_the_strongest_experts():
    torch.manual_seed(0)
    layer, x = competing(rate=1.0, alpha=3.0), torch.randn(T, D, dtype=torch.float64)
    every = every_output(layer.experts, x, F.relu)
    norms = every.norm(dim=-1)
    top = norms.topk(K)
    target = torch.zeros(T, E, dtype=torch.float64).scatter(1, top.indices, top.values.softmax(-1))
    logits = layer.gate.router.linear(x)
    best = logits.topk(K)
    routed = torch.zeros(T, E, dtype=torch.float64).scatter(1, best.indices, best.values.softmax(-1))

    out = layer(x)
    torch.testing.assert_close(out.y, (target[..., None] * every).sum(1))
    torch.testing.assert_close(out.losses["router"], 3 * (routed - target).square().mean())
    shared = torch.tensor(
        [len(set(a) & set(b)) / K for a, b in zip(top.indices.tolist(), best.indices.tolist(), strict=False)]
    )
    torch.testing.assert_close(out.statistics["agreement"], shared.mean())


def test_a_competition_differentiates_the_norms_of_winners_alone(monkeypatch):
    promised = []
    monkeypatch.setattr(
        "moe_kernels.nn.experts.expert_norms",
        lambda *given, winners, **named: promised.append(winners) or expert_norms(*given, winners=winners, **named),
    )
    layer, x = competing(rate=1.0), torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    every = every_output(layer.experts, x, F.relu)
    top = every.norm(dim=-1).topk(K)
    chosen = every.gather(1, top.indices[..., None].expand(-1, -1, D))
    y = (top.values.softmax(-1)[..., None] * chosen).sum(1)
    grad, leaves = torch.randn_like(y), [x, *layer.experts.parameters()]
    found, expected = (torch.autograd.grad(each, leaves, grad) for each in (layer(x).y, y))
    for name, *each in zip(["x", *dict(layer.experts.named_parameters())], found, expected, strict=True):
        torch.testing.assert_close(*each, msg=name)
    assert promised == [K]


@pytest.mark.parametrize("through_norms", [True, False])
def test_who_learns_from_a_competition(through_norms):
    layer, x = competing(rate=1.0, through_norms=through_norms), torch.randn(T, D, dtype=torch.float64)
    out = layer(x.requires_grad_())
    assert torch.autograd.grad(out.loss, x, allow_unused=True, retain_graph=True) == (None,)
    experts, router = layer.experts, layer.gate.router.linear
    grads = torch.autograd.grad(out.loss, experts.parameters(), allow_unused=True, retain_graph=True)
    assert all(grad is None for grad in grads)
    assert torch.autograd.grad(out.loss, router.weight, retain_graph=True)[0].abs().sum() > 0
    # Only the loss trains the router, since the weights in y come from the experts' norms.
    (grad,) = torch.autograd.grad(out.y.sum(), router.weight, allow_unused=True, retain_graph=True)
    assert grad is None
    weights = layer.gate(x).weights
    assert weights.requires_grad == through_norms


def test_the_coin():
    layer, x = competing(rate=lambda step: float(step == 1), coin=torch.Generator()), torch.randn(T, D).double()
    competed = [float(layer(x).statistics["competed"]) for _ in range(2)]
    with torch.device("meta"):  # under another default device the draw stays on the CPU
        competed.append(float(layer(x).statistics["competed"]))
    assert competed == [0, 1, 0]
    other = competing()
    other.load_state_dict(layer.state_dict())
    assert other.gate.steps == 3
    assert not layer.eval()(x).losses
    assert layer.gate.steps == 3
    assert sum(name.startswith("gate._experts") for name, _ in layer.named_parameters()) == 0


def test_ensemble_members_have_experts_of_their_own():
    torch.manual_seed(0)
    gate, x = EnsembleGate(D, E, 1, members=2), torch.randn(5, D)
    tiled, members = tile(x, 2)
    assert torch.equal(tiled[::2], x)
    assert members.tolist() == [0, 1] * 5
    out = gate(tiled, members)
    for t in range(10):
        m = t % 2
        probs = (tiled[t] @ gate.weight[m]).softmax(-1)
        assert out.experts[t, 0] == m * 2 + probs.argmax()
        torch.testing.assert_close(out.weights[t, 0], probs.max())  # softmax over the member's two experts
    logits = torch.randn(6, 3)
    expected = torch.stack([logits[2 * b : 2 * b + 2].softmax(-1).mean(0) for b in range(3)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", None)  # torch.tensor must not be called: on a GPU its copy makes the host wait
        log_probs = ensemble_log_probs(logits, 2)
    torch.testing.assert_close(log_probs.exp(), expected)
    with pytest.raises(ValueError, match="EnsembleGate: expected ids"):
        gate(x)


def test_thor_draws_one_expert_a_batch_and_one_a_token_or_sentence():
    gate, x = RandomGate(E, generator=torch.Generator().manual_seed(0)), torch.randn(1000, D)
    draws = [gate(x).experts for _ in range(60)]
    assert all(bool((each == each[0]).all()) for each in draws)
    assert {int(each[0]) for each in draws} == set(range(E))
    counts = gate.eval()(x).experts.flatten().bincount(minlength=E)
    assert (counts - 250).abs().max() < 5 * math.sqrt(1000 * 0.25 * 0.75)
    gate.inference = "ids"
    sentences = torch.arange(1000) // 10
    by_sentence = gate(x, sentences).experts.view(100, 10)
    assert (by_sentence == by_sentence[:, :1]).all()
    assert len(by_sentence[:, 0].unique()) == E
    with pytest.raises(ValueError, match="RandomGate: expected ids, one for all tokens of a sentence"):
        gate(x)


def test_labels_decide():
    wide = ManualGate((0, 2), num_experts=5)
    assert wide(torch.randn(2, D), torch.tensor([1, 0])).gates.tolist() == [[0, 0, 1, 0, 0], [1, 0, 0, 0, 0]]
    with pytest.raises(ValueError, match="ManualGate: num_experts must be from 3"):
        ManualGate((0, 2), num_experts=2)
    gate = ManualGate(MNIST)
    assert gate.num_experts == 5
    experts = gate(torch.zeros(10, D), torch.arange(10)).experts[:, 0].tolist()
    pairs = [{d for d in range(10) if experts[d] == e} for e in range(5)]
    assert pairs == [{1, 7}, {2, 5}, {3, 4}, {6, 9}, {0, 8}]


@pytest.mark.parametrize("score", ["code", "cosine"])
def test_xmoe_scores(score):
    gate, x = XMoEGate(D, E, K, score=score, temperature=0.5).double(), torch.randn(T, D, dtype=torch.float64)
    out = gate(x)
    r, e = x @ gate.linear.weight.t(), gate.embeddings
    cosine = (r @ e.t()) / e.norm(dim=-1)
    scores = cosine if score == "code" else cosine / r.norm(dim=-1, keepdim=True) / 0.5
    torch.testing.assert_close(out.weights, scores.topk(K).values.softmax(-1))
    norms = e.norm(dim=-1)
    torch.testing.assert_close(norms, torch.full_like(norms, 1.5 if score == "code" else 0.32), rtol=1e-6, atol=0)


def test_xmoes_embeddings_are_scaled_once_in_the_mode_batch_invariant():
    gate, x = XMoEGate(D, E, K), torch.randn(T, D)
    with torch.no_grad():
        gate.embeddings.mul_(torch.tensor([3.0, 0.5, 1.0001, 0.9999] * E)[:E, None])
    with mk.batch_invariant():
        gate(x)
        once = gate.embeddings.clone()
        torch.testing.assert_close(once.norm(dim=-1), torch.full((E,), 1.5), rtol=3e-7, atol=0)
        gate(x)
    assert torch.equal(gate.embeddings, once)


@pytest.mark.parametrize("steps", [-5, -2, 0, 2, 3, 4])
def test_xmoes_embeddings_may_be_three_roundings_off_in_the_mode_batch_invariant(steps):
    gate, x, one = XMoEGate(D, E, K), torch.randn(T, D), torch.finfo(torch.float32).eps
    for invariant in (True, False):
        with torch.no_grad():
            gate.embeddings.zero_()[:, 0] = 1.5 + steps * one
        with mk.batch_invariant(invariant):
            gate(x)
        if invariant and abs(steps) <= 3:
            assert gate.embeddings[:, 0].tolist() == [1.5 + steps * one] * E
        else:
            torch.testing.assert_close(gate.embeddings[:, 0], torch.full((E,), 1.5), rtol=0, atol=one)


def test_evaluation_leaves_xmoes_embeddings_alone():
    gate, x = XMoEGate(D, E, K), torch.randn(T, D)
    with torch.no_grad():
        gate.embeddings[1] = 0
    before = gate.eval().embeddings.clone()
    weights = gate(x).weights
    assert torch.equal(gate.embeddings, before)
    torch.testing.assert_close(gate.train()(x).weights, weights)
    assert gate.embeddings[1].eq(0).all()  # a zero vector cannot be normalised and stays 0


def test_stable_routing_by_hand():
    gate = StableGate(D, E, vocabulary=7)
    layer, x, ids = MoE(gate, ExpertMLP(E, D, H), pass_through=True), torch.randn(T, D), torch.arange(T) % 7
    out = layer(x, ids)
    affinity = x @ gate.centroids.t()
    chosen = affinity.argmax(-1)
    alpha = affinity.max(-1).values.sigmoid()
    count = chosen.bincount(minlength=E).float()
    balance = sum((count[e] - T / E) / (T / E) * affinity[chosen == e, e].sigmoid().sum() for e in range(E))
    logits = gate.embedding(ids) @ gate.router.weight.t()
    torch.testing.assert_close(out.losses["balance"], 0.3 * balance / T)
    torch.testing.assert_close(out.losses["distill"], 0.3 * F.cross_entropy(logits, chosen))
    grads = [torch.autograd.grad(each, gate.centroids, retain_graph=True) for each in (out.losses["balance"], balance)]
    torch.testing.assert_close(grads[0][0], 0.3 / T * grads[1][0])
    every = every_output(layer.experts, x)
    expected = alpha[:, None] * every[torch.arange(T), chosen] + (1 - alpha[:, None]) * x
    torch.testing.assert_close(out.y, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gate.router_probs(x, ids), logits.softmax(-1).detach())
    evaluated = gate.eval()(x, ids)  # in evaluation the router over embedded ids chooses, even in stage one
    assert evaluated.losses == {}
    assert torch.equal(evaluated.experts[:, 0].long(), logits.argmax(-1))

    gate.train().begin_stage_two()
    other = StableGate(D, E, vocabulary=7)
    other.load_state_dict(gate.state_dict())
    assert other.stage == 2
    two = other(x, ids)
    assert two.losses == {}
    assert torch.equal(two.experts[:, 0].long(), logits.argmax(-1))
    assert torch.equal(StableGate.forward(gate.eval(), x, ids).experts, two.experts)


@pytest.mark.parametrize("pass_through", [False, True])
def test_stable_experts_in_a_block_are_added_to_its_residual(pass_through):
    """A block computes a + alpha FF(LN(a)); a is `attended`, alpha the gate's weight. A dropped token's output is a."""
    gate, ids = StableGate(D, E, vocabulary=7), (torch.arange(T) % 7)[None]
    layer = MoE(gate, ExpertMLP(E, D, H), TokenChoice(0.5), pass_through=pass_through)
    block, x = MoEBlock(D, 2, layer).eval(), torch.randn(1, T, D)
    gate.begin_stage_two()
    y, out = block(x, ids)
    attended = block.block.attend(x)[0]
    tokens = F.layer_norm(attended, (D,))
    chosen = gate.router_probs(attended, ids[0]).argmax(-1)
    alpha = (tokens @ gate.centroids.t()).sigmoid()[torch.arange(T), chosen]
    every = every_output(layer.experts, tokens)
    kept = out.plan.slot_row[:, 0] >= 0
    expected = attended + torch.where(kept, alpha, 0)[:, None] * every[torch.arange(T), chosen]
    assert 0 < kept.sum() < T
    torch.testing.assert_close(y[0], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(y[0][~kept], attended[~kept])


def test_stable_losses_are_those_of_a_batch_twice_as_large():
    """The losses are means over tokens."""
    gate, x, ids = StableGate(D, E, vocabulary=7), torch.randn(T, D), torch.arange(T) % 7
    torch.testing.assert_close(gate(x.repeat(2, 1), ids.repeat(2)).losses, gate(x, ids).losses)
    narrow = StableGate(D, E, vocabulary=7)
    narrow.keep_float32 = False
    narrow.bfloat16()  # adding ones in bfloat16 stops at 256, but one expert has all 600 tokens
    torch.nn.init.zeros_(narrow.centroids)
    balance = narrow(torch.randn(600, D), torch.zeros(600, dtype=torch.int64)).losses["balance"]
    assert balance.item() == pytest.approx(0.3 * (E - 1) / 2)


def test_a_hypernetwork_makes_the_router():
    gate, x = HyperRouterGate(D, E, K, hidden=8), torch.randn(T, D)
    rows = gate.hypernetwork(gate.embedding).view(E, D + 1)
    logits = x @ rows[:, :D].t() + rows[:, D]
    torch.testing.assert_close(gate(x).weights, logits.topk(K).values.softmax(-1))
    for _ in range(2):
        assert [name for name, each in gate.named_parameters() if each.requires_grad] == ["embedding"]
        schedules.train_gates_alone(gate)
    expected = torch.autograd.grad(gate(x).weights[:, 0].sum(), gate.embedding)
    model = torch.nn.Sequential(gate).requires_grad_(False).requires_grad_()
    gate(x).weights[:, 0].sum().backward()
    torch.testing.assert_close(gate.embedding.grad, expected[0])
    assert [name for name, each in model.named_parameters() if each.grad is not None] == ["0.embedding"]


def test_losses_of_the_sparse_vit():
    probs = torch.tensor([[0.25] * 4, [1.0, 0, 0, 0]])
    # Mean 1/4 in both rows; variance 0 in the first, 1/4 - 1/16 = 3/16 in the second.
    assert losses.inverse_cv(probs, 0.01).item() == pytest.approx((25 + 0.25 / (3 / 16 + 0.01)) / 2)
    images = torch.tensor([[[1.0, 0], [1, 0]], [[0, 1], [1, 0]]])  # sums over tokens: [[2, 0], [1, 1]]
    assert losses.batch_inverse_cv(images, 0.01).item() == pytest.approx((1.5 / 0.26 + 0.5 / 0.26) / 2)
    assert losses.batch_variation(images, 0).item() == pytest.approx((0.25 / 1.5 + 0.25 / 0.5) / 2)


def test_consistency_is_a_symmetric_divergence():
    p, q = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])
    expected = 0.5 * (0.4 * math.log(0.9 / 0.5) - 0.4 * math.log(0.1 / 0.5))
    assert losses.symmetric_kl(p.log(), q.log()).item() == pytest.approx(expected)
    assert losses.symmetric_kl(q.log(), p.log()).item() == pytest.approx(expected)


def test_schedules():
    # 2 + round(3.5 t) up to 16; 3.5 is rounded to 4, 10.5 to 10.
    assert [schedules.growing_k(t, 4) for t in range(6)] == [2, 6, 9, 12, 16, 16]
    assert [schedules.falling_rate(step) for step in (0, 999, 1000)] == [2 / 3, 2 / 3, 2 / (2 + math.sqrt(2))]
    assert [schedules.cosine(0, floor=0.1)(step) for step in (0, 1)] == pytest.approx([1, 0.1])
    assert [schedules.inverse_root(0)(step) for step in (0, 3)] == [1, 0.5]
    assert [schedules.warmup(2, then=float)(step) for step in (0, 1, 2, 5)] == [0.5, 1, 0, 3]
    layer = competing()
    schedules.train_gates_alone(layer)
    trains = {name for name, each in layer.named_parameters() if each.requires_grad}
    assert trains == {"gate.router.linear.weight", "gate.router.linear.bias"}


def test_phase_two_trains_the_sparse_gates_alone():
    layer = MoE(StagedGate(SoftmaxGate(D, E), TopKGate(D, E, 1)), ExpertMLP(E, D, H))
    left = schedules.train_gates_alone(layer)
    assert {name for name, each in layer.named_parameters() if each.requires_grad} == {
        "gate.second.linear.weight",
        "gate.second.linear.bias",
    }
    assert all(one is other for one, other in zip(left, layer.gate.second.parameters(), strict=True))


def test_xmoe_with_a_normalisation_layer_and_a_learnable_temperature():
    """XMoE as in CompeteSMoE: the cosine of LayerNorm(W x) and an embedding, divided by a learned temperature."""
    gate, x = XMoEGate(D, E, K, embedding=3, score="learned", temperature=0.5), torch.randn(T, D)
    with torch.no_grad():
        gate.norm.weight.copy_(torch.tensor([1.0, 2.0, 0.5]))
        gate.norm.bias.copy_(torch.tensor([0.1, 0.0, -0.2]))
    r = x @ gate.linear.weight.t()
    centred = r - r.mean(-1, keepdim=True)
    r = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gate.norm.weight + gate.norm.bias
    cosine = (r / r.norm(dim=-1, keepdim=True)) @ (gate.embeddings / gate.embeddings.norm(dim=-1, keepdim=True)).t()
    expected = (cosine / 0.5).topk(K)
    out = gate(x)
    torch.testing.assert_close(out.weights, expected.values.softmax(-1), rtol=1e-4, atol=1e-5)
    assert torch.equal(out.experts.long(), expected.indices)
    out.weights[:, 0].sum().backward()
    assert gate.log_temperature.grad.abs() > 1e-3
    assert gate.norm.weight.grad.abs().min() > 0
    torch.testing.assert_close(gate.router_probs(x), (cosine / 0.5).softmax(-1).detach(), rtol=1e-4, atol=1e-5)


def test_members_of_an_ensemble_have_the_losses_of_v_moe_each_over_its_own_tokens():
    draw = torch.Generator().manual_seed(3)
    gate = EnsembleGate(D, 6, K, members=2, noise=True, importance=0.5, load=0.25)
    x, ids = torch.randn(T, D), torch.arange(T) % 2
    gate.generator = torch.Generator().manual_seed(3)
    out = gate(x, ids)
    noise = torch.empty(T, 3).normal_(generator=draw) / 3
    logits = torch.stack([x[t] @ gate.weight[ids[t]] for t in range(T)])
    own = [ids == member for member in range(2)]
    importance = sum(losses.importance_loss(logits[mine].softmax(-1)) for mine in own) / 2
    load = sum(losses.load_loss(logits[mine], (logits + noise)[mine], K, 1 / 3) for mine in own) / 2
    torch.testing.assert_close(out.losses["importance"], 0.5 * importance)
    torch.testing.assert_close(out.losses["load"], 0.25 * load)
    assert gate.eval()(x, ids).losses == {}
    torch.testing.assert_close(gate.router_probs(x, ids), logits.softmax(-1).detach())


def test_xmoe_starts_anew_as_it_was_built():
    gate = XMoEGate(D, E, K, score="learned", temperature=0.5)
    with torch.no_grad():
        gate.embeddings.zero_()
        gate.log_temperature.zero_()
    gate.reset_parameters()
    torch.testing.assert_close(gate.embeddings.norm(dim=-1), torch.full((E,), 0.32))
    assert gate.log_temperature.exp().item() == pytest.approx(0.5)


def test_a_staged_gate_distils_in_stage_two_alone():
    gate, x = StagedGate(SoftmaxGate(D, E), TopKGate(D, E, K), distill=1.0), torch.randn(T, D)
    said = []
    for gate.stage in (1, 2, 3):
        said.append(list(gate(x).losses))
    assert said == [[], ["distill"], []]
    gate.stage = 2
    p, q = gate.first(x).gates, gate.second.linear(x).softmax(-1)
    loss = gate(x).losses["distill"]
    torch.testing.assert_close(loss, (p * (p / q).log()).sum(-1).mean())
    loss.backward()
    assert gate.first.linear.weight.grad is None or not gate.first.linear.weight.grad.any()  # `first` is the teacher
    assert gate.second.linear.weight.grad.any()


@pytest.mark.parametrize("early", [False, True])
def test_which_of_two_stages_evaluation_uses(early):
    gate, x = StagedGate(SoftmaxGate(D, E), TopKGate(D, E, K), second_in_evaluation=early), torch.randn(T, D)
    assert gate(x).dense
    gate.eval()
    assert gate(x).dense != early
    gate.stage = 2
    assert not gate(x).dense


def test_a_staged_gate_has_as_many_experts_in_both_stages():
    assert StagedGate(SoftmaxGate(D, E), TopKGate(D, E, K)).num_experts == E
    message = r"^StagedGate: first and second must have equally many experts, got 4 and 5$"
    with pytest.raises(ValueError, match=message):
        StagedGate(SoftmaxGate(D, E), TopKGate(D, E + 1, K))


def test_a_staged_gate_distils_into_a_topk_gate_alone():
    assert StagedGate(SoftmaxGate(D, E), SoftmaxGate(D, E)).distill == 0
    with pytest.raises(TypeError, match=r"^StagedGate: distill needs second to be a TopKGate, got SoftmaxGate$"):
        StagedGate(TopKGate(D, E, K), SoftmaxGate(D, E), distill=0.1)
