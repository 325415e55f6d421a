"""Recipes of COMET trees, the sparse ViT, V-MoE and CompeteSMoE on small data."""

from __future__ import annotations

import math

import pytest
import torch

import moe_kernels as mk
from moe_kernels.nn import GateOutput, HashGate, MoE
from moe_kernels.papers import recipes
from moe_kernels.papers.recipes import Batch, Splits
from moe_kernels.papers.recipes._text import IGNORED, bits
from moe_kernels.papers.recipes.comet_gpt import CometGPT
from moe_kernels.papers.recipes.comet_sarcos import CometSarcos
from moe_kernels.papers.recipes.competesmoe import CompeteSMoE
from moe_kernels.papers.recipes.moebert import MoEBERT
from moe_kernels.papers.recipes.movielens import MovieLens
from moe_kernels.papers.recipes.vmoe import VMoE
from moe_kernels.papers.train import comparison
from moe_kernels.papers.train.loop import Run
from tests.helpers.small_sets import images, ratings, table


def blocks_with_experts(side, **changed):
    points = images()
    small = {"patch": 2, "dim": 16, "depth": 6, "heads": 2, "hidden": 12, "experts": 4} | changed
    recipe = VMoE(sides=(side,), batch_size=8, epochs=2, **small)
    run = Run(recipe, 0, Splits(points, points.train, points.test))
    return run, [i for i, block in enumerate(run.task.model.blocks.blocks) if type(block).__name__ == "MoEBlock"]


@pytest.mark.parametrize(
    ("side", "changed", "blocks"),
    [
        ("vmoe", {}, [3, 5]),  # V-MoE's "last-2": the last two of blocks 1, 3 and 5
        ("e3", {}, [3, 5]),
        ("vmoe", {"moe_layers": 99}, [1, 3, 5]),  # V-MoE's "every-2": every second block
        ("bpr", {"moe_every": 1, "moe_layers": 1}, [5]),
        ("softmax", {}, [0, 1, 2, 3, 4, 5]),  # the sparse ViT: every block
        ("token_choice", {"moe_layers": 0}, []),
        ("matched", {}, []),
    ],
)
def test_experts_are_in_the_blocks_of_the_papers(side, changed, blocks):
    assert blocks_with_experts(side, **changed)[1] == blocks


def test_the_matched_dense_model_has_the_parameters_of_the_experts():
    def parameters(run):
        return sum(each.numel() for each in run.task.model.parameters())

    matched, dense, sparse = (parameters(blocks_with_experts(side)[0]) for side in ("matched", "dense", "token_choice"))
    assert dense < 0.7 * sparse
    assert sparse <= matched < 1.2 * sparse
    assert parameters(blocks_with_experts("matched", moe_layers=0)[0]) == dense
    fc1 = blocks_with_experts("matched")[0].task.model.blocks.blocks[0].ffn.fc1
    assert fc1.out_features == 12 * fc1.in_features // 16  # as wide as the model, in the proportions of the others


def layers_of(run):
    return [each for each in run.task.model.modules() if isinstance(each, MoE)]


@pytest.mark.parametrize(("side", "members"), [("vmoe", 1), ("e3", 2)])
def test_capacity_and_losses_of_v_moe(side, members):
    """Capacity factors of training and evaluation, groups of 8 images (an image has 17 tokens), multiples of 4."""
    run, _ = blocks_with_experts(side, capacity=0.3, capacity_eval=(0.9,), balance=0.25, experts=8)
    layer = layers_of(run)[0]
    tokens, k, count = 8 * 17 * members, 2, 8
    assert layer.policy.group == tokens
    gate = GateOutput(torch.ones(tokens, k), torch.arange(k, dtype=torch.int32).expand(tokens, k), count)
    for training, factor in ((True, 0.3), (False, 0.9)):
        plan, _ = layer.policy(gate, training)
        room = 4 * math.ceil(math.ceil(tokens * k * factor / count) / 4)
        assert plan.kept[:k].tolist() == [room] * k
    torch.manual_seed(0)
    found = {name: value.item() for name, value in run.task.loss(run.batch(0)).items()}
    assert set(found) == {"loss", "task", "importance", "load"}
    assert found["loss"] == pytest.approx(found["task"] + found["importance"] + found["load"])
    torch.manual_seed(0)
    outputs = run.task.model(run.batch(0).tensors[0])[1]
    for name in ("importance", "load"):  # summed over the layers
        assert found[name] == pytest.approx(sum(out.losses[name].item() for out in outputs), rel=1e-5)
    twice = blocks_with_experts(side, capacity=0.3, capacity_eval=(0.9,), balance=0.5, experts=8)[0]
    torch.manual_seed(0)
    losses = twice.task.loss(twice.batch(0))
    assert losses["importance"].item() == pytest.approx(2 * found["importance"], rel=1e-4)
    assert losses["load"].item() == pytest.approx(2 * found["load"], rel=1e-4)


def test_the_inverse_cvs_of_the_sparse_vit_are_means_over_the_layers():
    run, blocks = blocks_with_experts("softmax", inverse_cv=0.5)
    assert len(blocks) == 6
    torch.manual_seed(0)
    found = run.task.loss(run.batch(0))["inverse cv"]
    torch.manual_seed(0)
    expected = 0.0
    for out in run.task.model(run.batch(0).tensors[0])[1]:
        p = out.gates[0].gates
        s = p.unflatten(0, (8, 17)).sum(1)  # 8 images
        tokens = (p.mean(-1) / (p.var(-1, unbiased=False) + 0.01)).mean()
        images = (s.mean(0) / (s.var(0, unbiased=False) + 0.01)).mean()
        expected += 0.5 * (tokens + images) / 6
    torch.testing.assert_close(found, expected)


def test_the_sparse_vit_trains_dense_gates_then_sparse_gates_then_all():
    run, _ = blocks_with_experts("sparsified", depth=2, steps=9, distill=2.0, inverse_cv=0.0)
    gates = [layer.gate for layer in layers_of(run)]
    stages, trained, losses = [], [], []
    for step in range(9):
        run.task.before_step(step)
        stages.append({gate.stage for gate in gates})
        trained.append({name for name, each in run.task.model.named_parameters() if each.requires_grad})
        losses.append(set(run.task.loss(run.batch(0))) - {"loss", "task"})
    assert stages == [{1}] * 4 + [{2}] * 2 + [{3}] * 3
    everything = {name for name, _ in run.task.model.named_parameters()}
    second = {name for name in everything if ".gate.second." in name}
    assert trained == [everything] * 4 + [second] * 2 + [everything] * 3
    assert losses == [{"inverse cv"}] * 4 + [{"distill"}] * 2 + [set()] * 3


@pytest.mark.parametrize("name", ["vmoe", "competesmoe"])
def test_thors_losses_are_of_two_passes(name, text):
    def losses(alpha):
        if name == "vmoe":
            run = blocks_with_experts("thor", consistency=alpha)[0]
        else:
            recipe = CompeteSMoE(sides=("thor",), consistency=alpha, model_dropout=0.0, **SMALL_GPT)
            run = Run(recipe, 0, recipe.splits(text))
        batch, passes = run.batch(0), []
        run.task.model.register_forward_hook(lambda model, args, out: passes.append(out[0]))
        torch.manual_seed(2)
        found = run.task.loss(batch)
        y = batch.tensors[1] if name == "vmoe" else batch.tensors[0][:, 1:].long()
        return found, [each.reshape(-1, each.shape[-1]) for each in passes], y.flatten()

    found, (first, second), y = losses(3.0)
    p, q = first.log_softmax(-1), second.log_softmax(-1)
    assert not torch.equal(p, q)
    own = found["task" if name == "vmoe" else "text"]
    torch.testing.assert_close(own, -p[torch.arange(len(y)), y].mean())
    torch.testing.assert_close(found["second pass"], -q[torch.arange(len(y)), y].mean())
    divergence = 0.5 * ((p.exp() - q.exp()) * (p - q)).sum(-1).mean()
    torch.testing.assert_close(found["consistency"], 3 * divergence, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(found["loss"], own + found["second pass"] + found["consistency"])


def test_bits_are_of_the_targets_that_count():
    """A byte with probability 1/8 takes 3 bits, one with probability 1/2 takes 1; an ignored one takes none."""
    probs = torch.tensor([[[1 / 8, 3 / 8, 1 / 2], [1 / 2, 1 / 4, 1 / 4], [1 / 3, 1 / 3, 1 / 3]]])
    total, count = bits(probs.log(), torch.tensor([[0, 0, IGNORED]]))["bits"]
    assert (total.item(), count) == (pytest.approx(3 + 1), 2)


def test_recipes_of_comet_train_what_they_say(text):
    recipe = CometGPT(sides=("comet",), dim=16, depth=1, heads=2, length=12, warmup=4, steps=24, weight_decay=0.3)
    task = Run(recipe, 0, recipe.splits(text)).task
    assert [task.schedule(step) for step in (0, 3, 14, 24)] == pytest.approx([1 / 4, 1, 1 / 2, 0])
    for group in task.optimiser.param_groups:
        assert {each.dim() > 1 for each in group["params"]} == {group["weight_decay"] == 0.3}
    rows = table()
    recipe = CometSarcos(sides=("standard",), width=(8,), torque=3)
    run = Run(recipe, 0, Splits(rows, rows.train, rows.test))
    error = (run.task.predict(rows.test[0])[:, 0] - rows.test[1][:, 2]).square().mean().item()
    assert run.evaluate()["test error"] == pytest.approx(error, rel=1e-5)


SMALL_GPT = {"dim": 16, "hidden": 12, "depth": 2, "heads": 2, "length": 12, "experts": 4, "batch_size": 8}


def competing(side, text, **changed):
    recipe = CompeteSMoE(sides=(side,), **SMALL_GPT | changed)
    return Run(recipe, 0, recipe.splits(text))


def test_the_baselines_of_competesmoe_follow_their_papers(text):
    gates = {side: layers_of(competing(side, text, steps=40, k=2))[0] for side in CompeteSMoE.SIDES[1:]}
    switch, stable = gates["switch"].policy, gates["stable"].policy
    assert (switch.factor, switch.factor_eval, stable.factor) == (1.25, 2.0, 2.0)
    assert all(gates[side].policy.factor is None for side in gates.keys() - {"switch", "stable"})
    frozen = {side for side, layer in gates.items() if not any(p.requires_grad for p in layer.gate.parameters())}
    assert frozen == {"fixed", "dropout", "thor"}
    assert all(each.requires_grad for layer in gates.values() for each in layer.experts.parameters())
    run = competing("compete", text, alpha=2.5, rate=0.25)
    assert [layer.gate.alpha for layer in layers_of(run)] == [2.5, 2.5]
    rates = [layer.gate.rate.rate for layer in layers_of(run)]
    assert rates == [0.25, 0.25]
    assert competing("dense", text, k=3).task.model.blocks.blocks[0].ffn.fc1.out_features == 3 * 12
    run = competing("smoe", text, balance=0.5, model_dropout=0.0)
    found = run.task.loss(run.batch(0))
    (x,) = run.batch(0).tensors
    outputs = run.task.model(x[:, :-1].long())[1]
    torch.testing.assert_close(found["balance"], sum(out.losses["balance"] for out in outputs))
    assert 0.5 * 2 * 0.9 < found["balance"] < 0.5 * 2 * 4  # each layer's loss is 1 if balanced, at most 4


def test_schedules_of_competesmoe(text):
    """The rate rises over a tenth of the steps; k grows from 2 to all experts; StableMoE's second stage then begins."""
    run = competing("dropout", text, steps=40, experts=8)
    assert [run.task.schedule(step) for step in (0, 3, 15, 39)] == pytest.approx([1 / 4, 1, 1 / 2, (4 / 40) ** 0.5])
    chosen = []
    for step in (0, 10, 20, 39):
        run.task.before_step(step)
        chosen.append([layer.gate.k for layer in layers_of(run)])
    assert chosen == [[2, 2], [4, 4], [5, 5], [8, 8]]
    run = competing("stable", text, steps=40)
    stages = []
    for step in (0, 3, 4, 39):
        run.task.before_step(step)
        stages.append({layer.gate.stage for layer in layers_of(run)})
    assert stages == [{1}, {1}, {2}, {2}]


def test_figures_of_movielens_by_hand():
    """Recomputes every measure of the test rows, in batches of 30, 30 and 20."""
    points = ratings()
    recipe = MovieLens(sides=("topk",), experts=4, rows=0, eval_batch=30, lr=0.01, watched_weight=0.75)
    run = Run(recipe, 0, Splits(points, points.train, points.test))
    for _ in range(4):
        run.take_step()
    found, (*ids, truth, stars) = run.evaluate(), points.test
    run.task.model.eval()
    with torch.no_grad():
        logit, rating = run.task.predict(*ids)
    p = logit.sigmoid()
    entropy = -(truth * p.log() + (1 - truth) * (1 - p).log()).mean().item()
    rated = stars > 0
    assert 0.2 < rated.float().mean() < 0.8
    error = (rating - stars)[rated].square().mean().item()
    right = ((p > 0.5) == (truth == 1)).float().mean().item()
    assert ((logit > 0.5) == (truth == 1)).float().mean().item() != right
    assert found["test watched loss"] == pytest.approx(entropy, rel=1e-5)
    assert found["test rating error"] == pytest.approx(error, rel=1e-5)
    assert found["test watched accuracy"] == pytest.approx(right)
    assert found["test loss"] == pytest.approx(0.75 * entropy + 0.25 * error, rel=1e-5)
    batch = Batch(points.test, None)
    assert run.task.loss(batch)["task"].item() == pytest.approx(found["test loss"], rel=1e-5)


@pytest.mark.parametrize("gate", ["hash", "topk", "comet", "dselect", "softmax"])
def test_gates_and_searches_of_movielens(gate):
    points, found = ratings(), {}
    for plus in ("", "+", "+untrained"):
        recipe = MovieLens(sides=(gate + plus,), experts=4, rows=0, batch_size=32, search_epochs=2)
        found[plus] = Run(recipe, 0, Splits(points, points.train, points.test)).task.model.moe
    assert (found[""].gates[0] is found[""].gates[1]) == (gate == "hash")  # hash: a user has one expert in both tasks
    assert found[""].search is None
    for plus in ("+", "+untrained"):
        search = found[plus].search
        assert search.steps == 2 * 3  # 80 rows: three batches an epoch
        assert search.renormalise == (gate != "dselect")
        assert search.scores.requires_grad == (plus == "+")


def moebert(side, text, **changed):
    small = {"dim": 16, "hidden": 24, "expert_hidden": 8, "share": 5, "depth": 2, "heads": 2, "length": 12}
    recipe = MoEBERT(
        sides=(side,), **small | {"steps": 20, "dense_share": 0.3, "batch_size": 8, "windows": 9} | changed
    )
    return Run(recipe, 0, recipe.splits(text))


@pytest.mark.parametrize("side", MoEBERT.SIDES[1:])
def test_layers_of_moebert(side, text):
    """Of 20 steps 6 train the dense model; a search learns in the first half of the other 14."""
    run = moebert(side, text, experts=4)
    tokens = run.data.train[0][:, :-1].long().flatten()
    for layer in layers_of(run):
        gate = layer.gate
        assert layer.experts.num_experts == (1 if side == "small" else 4)
        if side.endswith("+"):
            assert gate.search.steps == 7
            assert gate.search.renormalise == (side != "topk+")
            gate = gate.gate
        if isinstance(gate, HashGate):
            assert (gate.frequencies is not None) == (side == "balanced")
        if side == "balanced":
            assert gate.frequencies.tolist() == [int((tokens == each).sum()) for each in range(len(gate.frequencies))]
            loads = gate.table[tokens].bincount(minlength=4)
            assert loads.max() - loads.min() <= gate.frequencies.max()


@pytest.mark.parametrize("side", ["hash", "unguided"])
def test_the_importance_of_neurons_is_of_the_first_windows(side, text, monkeypatch):
    seen, rows, values = [], [], []
    original, fill = recipes.moebert.importance, recipes.moebert.Pair.fill

    def importance(teacher, batches):
        seen.extend(batches)
        return original(teacher, seen)

    monkeypatch.setattr(recipes.moebert, "importance", importance)
    monkeypatch.setattr(recipes.moebert.Pair, "fill", lambda pair, given: values.append(given) or fill(pair, given))
    run = moebert(side, text, eval_batch=4, model_dropout=0.5)
    for step in range(8):
        run.task.before_step(step)
        rows.append(run.task.model.split)
    assert rows == [False] * 6 + [True] * 2
    assert len(values) == 1
    if side == "unguided":
        assert seen == []
        return
    x, y = (torch.cat(each) for each in zip(*seen, strict=True))
    assert torch.equal(torch.cat([x, y[:, -1:]], 1), run.data.train[0][:9].long())
    assert [len(each) for each, _ in seen] == [4, 4, 1]
    repeated = original(run.task.model.teacher.requires_grad_(True), [(x, y)])  # without dropout
    torch.testing.assert_close(values[0], repeated, rtol=1e-3, atol=1e-6)


def test_priority_matters_with_two_choices_of_v_moe():
    changed = {"capacity": 0.3, "capacity_eval": (0.3,), "group": 0}
    runs = [blocks_with_experts(side, **changed)[0] for side in ("vmoe", "bpr")]
    x = runs[0].data.test[0][:16]
    kept = []
    for run in runs:
        run.task.model.eval()
        out = run.task.model(x)[1][0]
        assert out.gates[0].experts.shape[1] == 2
        weights = out.gates[0].weights
        kept.append(weights[:, 0][out.plan.slot_row[:, 0] >= 0].mean())
    assert kept[1] > kept[0]


@pytest.mark.parametrize("side", ["vmoe", "e3"])
def test_figures_of_an_evaluation_weigh_batches_by_their_images(side):
    """Recomputes the columns from the single batches: 33 images, then 7."""
    run, _ = blocks_with_experts(side, capacity_eval=(0.4,), eval_batch=33, experts=8, group=4)
    with torch.no_grad():
        run.task.model.embed.project.weight.mul_(20)  # the images then differ in their routing
    found, model, members = run.evaluate(), run.task.model.eval(), 2 if side == "e3" else 1
    dropped, varied, loss, right, sizes = [], [], [], [], []
    for x, y in zip(*(each.split(33) for each in run.data.test), strict=True):
        with torch.no_grad():
            logits, outputs = model(x)
        sizes.append(len(y))
        dropped.append([(out.plan.slot_row < 0).float().mean().item() for out in outputs])
        sums = [out.gates[0].gates.unflatten(0, (len(y) * members, -1)).sum(1) for out in outputs]
        varied.append([(each.var(0, unbiased=False) / (each.mean(0) + 1e-6)).mean().item() for each in sums])
        probs = logits.softmax(-1).unflatten(0, (-1, members)).mean(1)
        loss.append(-probs[torch.arange(len(y)), y].log().mean().item())
        right.append((probs.argmax(-1) == y).float().mean().item())
    first, last = (sum(each) / 2 for each in dropped)
    assert abs(first - last) > 0.01

    def whole(values):
        return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)

    assert sizes == [33, 7]
    assert found["test dropped"] == pytest.approx(whole([sum(each) / 2 for each in dropped]), rel=1e-5)
    assert found["test batch variation"] == pytest.approx(whole([sum(each) / 2 for each in varied]), rel=1e-4)
    assert found["test loss"] == pytest.approx(whole(loss), rel=1e-5)
    assert found["test accuracy"] == pytest.approx(whole(right))


def test_experts_can_be_switched_off_in_evaluation():
    """A layer without its experts adds nothing to the residual connection."""
    run, _ = blocks_with_experts("softmax", experts_off=True, moe_layers=6)
    with torch.no_grad():
        for parameter in run.task.model.parameters():
            parameter.normal_()
    found = run.evaluate()
    assert found["test accuracy without experts"] != found["test accuracy"]
    with torch.no_grad():
        for module in run.task.model.modules():
            if hasattr(module, "w_out"):
                module.w_out.zero_()
                module.b_out.zero_()
    assert found["test accuracy without experts"] == run.evaluate()["test accuracy"]


def test_an_evaluation_takes_one_forward():
    points = ratings()
    run = Run(
        MovieLens(sides=("comet",), experts=4, rows=0, eval_batch=20), 0, Splits(points, points.train, points.test)
    )
    calls = []
    run.task.model.register_forward_hook(lambda *args: calls.append(args))
    found = run.evaluate()
    assert len(calls) == 80 / 20
    assert found["experts"] > 0


def test_the_entropy_of_routers_is_that_of_their_softmax(text):
    for side in ("smoe", "xmoe", "stable", "hyper", "compete"):
        recipe = CompeteSMoE(sides=(side,), dim=16, hidden=12, depth=2, heads=2, length=12, experts=4, choose="last")
        run = Run(recipe, 0, recipe.splits(text))
        probs: list[torch.Tensor] = []

        def note(gate, args, probs=probs):
            probs.append(gate.router_probs(*args))

        for module in run.task.model.modules():
            if type(module).__name__ == "MoE":
                module.gate.register_forward_pre_hook(note)
        found = run.evaluate()
        entropies = [-(p * p.log()).sum(-1).mean().item() for p in (torch.cat(probs[layer::2]) for layer in (0, 1))]
        assert [found["entropy 1"], found["entropy 2"]] == pytest.approx(entropies, rel=1e-5)
        assert found["entropy"] == pytest.approx(sum(entropies) / 2, rel=1e-5)
        assert 0 < found["entropy"] <= math.log(4) + 1e-6


def test_competition_by_its_schedule_and_glam_by_its_parts(text):
    small = {"dim": 16, "hidden": 12, "depth": 4, "heads": 2, "length": 12, "experts": 4, "rate_schedule": "falling"}
    recipe = CompeteSMoE(sides=("compete",), architecture="glam", **small)
    run = Run(recipe, 0, recipe.splits(text))
    model = run.task.model
    kinds = [type(block).__name__ for block in model.blocks.blocks]
    assert kinds == ["Block", "MoEBlock", "Block", "MoEBlock"]
    assert model.positions is None
    rate = model.blocks.blocks[1].block.ffn.gate.rate.rate  # the schedule: step -> rate
    assert [rate(0), rate(3000)] == pytest.approx([2 / 3, 0.5])
    dense = model.blocks.blocks[0]
    x = torch.randn(2, 5, 16)
    a, b = (x @ dense.ffn.fc1.weight.t() + dense.ffn.fc1.bias).chunk(2, -1)
    by_hand = (torch.nn.functional.gelu(a) * b) @ dense.ffn.fc2.weight.t() + dense.ffn.fc2.bias
    torch.testing.assert_close(dense.eval().ffn(x), by_hand)
    with torch.no_grad():
        dense.relative.copy_(torch.randn_like(dense.relative))
    q, k, v = dense.qkv(dense.norm_attention(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2) / 8**0.5
    for i in range(5):
        for j in range(5):
            scores[:, :, i, j] = scores[:, :, i, j] + dense.relative[:, i - j] if j <= i else -torch.inf
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(dense.attend(x), x + dense.project(mixed), rtol=1e-4, atol=1e-5)
    run.take_step()
    assert dense.relative.grad.abs().max() > 0


def test_saturated_trees_evaluate_one_path_in_evaluation():
    """route=False evaluates 15 nodes and 16 leaves, route=True 4 nodes and a leaf."""
    points, found = ratings(), []
    for route in (True, False):
        recipe = MovieLens(sides=("comet",), experts=16, rows=0, k=1, route=route)
        run = Run(recipe, 0, Splits(points, points.train, points.test))
        with torch.no_grad():
            for gate in run.task.model.moe.gates:
                gate.split_weight.mul_(1e6)
        found.append((run.evaluate(), run.flops()))
    (descent, few), (dense, many) = found
    assert descent == pytest.approx(dense, rel=1e-6)
    assert dense["experts"] == 1
    gate = 2 * 256 * (15 + 16) - 2 * 256 * 5  # FLOPs of a sample that route=True saves in a task's gate
    assert many - few == 2 * gate  # the sum over experts adds the rows in use alone in both


@pytest.mark.parametrize(("side", "k"), [("vmoe", 2), ("token_choice", 1), ("softmax", 4)])
def test_flops_of_backends_differ_by_combine(side, k):
    """Both count the products of rows in use. "cpu" also counts combine, which is sums to torch in the definition."""
    run, blocks = blocks_with_experts(side, capacity=1.05)
    found = {}
    for backend in ("reference", "cpu"):
        with mk.use_backend(backend):
            found[backend] = run.flops()
    combine = 2 * 17 * k * 16  # 16 patches and a class token, of 16 features
    assert found["cpu"] - found["reference"] == len(blocks) * combine


def test_movielens_reports_the_area_under_the_curve_of_who_watches():
    points = ratings()
    run = Run(MovieLens(sides=("topk",), experts=4, rows=0, lr=0.01), 0, Splits(points, points.train, points.test))
    for _ in range(30):
        run.take_step()
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    run.task.model.eval()
    with torch.no_grad():
        watched = run.task.predict(*points.test[:2])[0]
    expected = metrics.roc_auc_score(points.test[2].numpy(), watched.numpy())
    assert run.evaluate()["test watched AUC"] == pytest.approx(expected, rel=1e-6)


def test_the_heat_map_of_a_dense_gate_shows_its_weights():
    """The map shows mean weights, since shares would all be 1: every token uses every expert."""
    run, _ = blocks_with_experts("softmax", depth=1)
    (layer,) = comparison.token_maps(run)
    run.task.model.eval()
    with torch.no_grad():
        weights = run.task.model(run.data.test[0])[1][0].gates[0].gates.unflatten(0, (40, -1))
    assert layer.of == "gate weight"
    torch.testing.assert_close(layer.positions, weights[:, 1:].mean(0).t().unflatten(1, (4, 4)))
    torch.testing.assert_close(layer.positions.sum(0), torch.ones(4, 4))
    rows_of_task = run.data.test[1] == 2
    torch.testing.assert_close(layer.classes[:, 2], weights[rows_of_task].mean((0, 1)))
    assert comparison.token_maps(blocks_with_experts("token_choice", depth=1)[0])[0].of == "share of the tokens"
