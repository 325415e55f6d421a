"""Recipes of papers 001 to 004 on small data."""

from __future__ import annotations

import math

import pytest
import torch
from small_sets import images, ratings
from test_recipes import small_text  # noqa: F401 a fixture

import moe_kernels as mk
from moe_kernels.papers.recipes import Splits
from moe_kernels.papers.recipes.competesmoe import CompeteSMoE
from moe_kernels.papers.recipes.movielens import MovieLens
from moe_kernels.papers.recipes.vmoe import VMoE
from moe_kernels.papers.train import comparison
from moe_kernels.papers.train.loop import Run


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
        ("softmax", {}, [0, 1, 2, 3, 4, 5]),  # paper 002: every block
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


def test_priority_matters_with_two_choices_of_v_moe():
    changed = {"capacity": 0.3, "capacity_eval": 0.3, "group": 0}
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
    run, _ = blocks_with_experts(side, capacity_eval=0.4, eval_batch=33, experts=8, group=4)
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
    found = run.evaluate()
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
    combine = 2 * 256 * (16 - 2)  # and in a task's sum over experts: MultiGateMoE adds one of each task, 2, not 16
    assert many - few == 2 * (gate + combine)


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
