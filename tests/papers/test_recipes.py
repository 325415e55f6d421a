"""Tests of the recipes."""

from __future__ import annotations

import argparse
import json
import math
from functools import partial

import pytest
import torch

from moe_kernels import backends
from moe_kernels.__main__ import main
from moe_kernels.nn import TopKGate
from moe_kernels.nn.schedules import growing_k
from moe_kernels.papers import data, recipes, train
from moe_kernels.papers.models.comparison import MODELS
from moe_kernels.papers.models.moe import MoEBlock
from moe_kernels.papers.recipes import Batch, Splits, comet
from moe_kernels.papers.recipes.competesmoe import CompeteSMoE
from moe_kernels.papers.recipes.manual import Manual
from moe_kernels.papers.recipes.moebert import MoEBERT
from moe_kernels.papers.recipes.movielens import MovieLens
from moe_kernels.papers.recipes.vmoe import VMoE
from moe_kernels.papers.train import comparison
from moe_kernels.papers.train.loop import Run
from tests.helpers.planted import interrupted, plant
from tests.helpers.results import options_of, told
from tests.helpers.small_sets import images, ratings, table

# Name of a recipe -> data set and options of a small run.
SMALL: dict[str, tuple[str, str]] = {
    "comet": ("images", f"--width 20 --sides {' '.join(MODELS)}"),
    "comet_width": ("images", "--width 8 20 --tune 0.1"),
    "comet_vit": ("images", "--dim 16 --depth 2 --heads 2 --hidden 24"),
    "comet_sarcos": ("table", f"--width 20 --keep 0.25 --sides {' '.join(MODELS)}"),
    "comet_mixer": ("images", "--dim 16 --depth 2"),
    "comet_gpt": ("text", "--dim 16 --depth 2 --heads 2 --length 12 --dropout 0.1"),
    "competesmoe": (
        "text",
        f"--sides {' '.join(CompeteSMoE.SIDES)} --dim 16 --hidden 12 --depth 1 --heads 2 --length 12 --experts 4",
    ),
    "manual": ("digits", "--dim 16 --heads 2 --hidden 12"),
    "moebert": (
        "text",
        f"--sides {' '.join(MoEBERT.SIDES)} --dim 16 --hidden 24 --expert-hidden 8 --share 5 --depth 1 --heads 2 "
        "--length 12 --windows 8",
    ),
    "movielens": (
        "ratings",
        f"--sides {' '.join(MovieLens.SIDES)} --experts 4 --search-epochs 1 --dropout 0.1",
    ),
    "vmoe": (
        "images",
        f"--sides {' '.join(VMoE.SIDES)} --dim 16 --depth 2 --moe-layers 1 --heads 2 --hidden 12 --experts 4",
    ),
}


@pytest.fixture
def arguments(monkeypatch, text):
    """arguments(name, *words): the parsed command line of a small run of a recipe on the CPU."""
    digits = partial(data.load, "digits")
    made = {"table": table, "images": images, "digits": digits, "ratings": ratings, "text": lambda: text}
    monkeypatch.setattr(train, "load", lambda name: made[name]())

    def parse(name: str, *words: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        train.add_arguments(parser, [name])
        source, small = SMALL[name]
        common = ["--data", source, "--device", "cpu", "--batch-size", "16", "--steps", "3", "--threads", "1"]
        return parser.parse_args([name, *common, *small.split(), *words])

    return parse


@pytest.mark.parametrize("name", recipes.names())
def test_fast_backend_and_reference_take_the_same_steps(arguments, tmp_path, capsys, name):
    assert train.run(arguments(name, "--check-steps", "2", "--json", str(tmp_path / "run.json"))) == 0
    report = json.loads((tmp_path / "run.json").read_text())
    sides = {run["side"] for run in report["runs"]}
    assert set(report["agreement"]) == sides
    for side, agreement in report["agreement"].items():
        assert agreement["passed"], side
        assert len(agreement["steps"]) == 2
    metric = recipes.find(name).METRIC
    for run in report["runs"]:
        assert run["rows"][-1][f"test {metric}"] is not None
        assert run["rows"][-1]["loss"] > 0
        assert run["flops"] > 0


@pytest.mark.parametrize("name", recipes.names())
def test_help_and_tables_have_at_most_100_columns(arguments, capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main(["train", name, "--help"])
    assert train.run(arguments(name, "--check-steps", "0")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("usage:") for line in lines)
    assert any(line.startswith("side ") for line in lines)
    assert [line for line in lines if len(line) > 100 and not line.startswith("step ")] == []


def test_the_options_of_every_recipe(stored):
    lines = []
    for name in recipes.names():
        recipe = recipes.find(name)
        lines.append(f"{name}: {recipe.METRIC}, {recipe.ACCEPTS.__name__}, {' '.join(recipe.SIDES)}, {recipe.UNUSED}")
        lines.append(options_of(recipe))
    stored("options", "\n".join(lines))


@pytest.mark.parametrize("name", recipes.names())
def test_the_models_of_a_finished_run_load_and_predict(arguments, tmp_path, capsys, stored, pictures, name):
    args = arguments(name, "--check-steps", "0", "--out", str(tmp_path))
    assert train.run(args) == 0
    found = json.loads((tmp_path / "result.json").read_text())
    stored(f"train_{name}", told(found, capsys.readouterr().out, tmp_path, pictures), tolerance=1e-3)
    for run in found["runs"]:
        if run["stage"] != "final":
            continue
        path = tmp_path / f"model-{run['side']}-{run['seed']}.pt".replace(" ", "-")
        state = torch.load(path, weights_only=True)
        assert any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in state.values())
        loaded = train.load_model(path)
        reloaded = Run(loaded.recipe, loaded.seed, loaded.recipe.splits(train.load(args.data)))
        if reloaded.task.before_step is not None:
            reloaded.task.before_step(2)
        reloaded.task.model.load_state_dict(loaded.model.state_dict())
        if run["side"] != "thor":  # THOR draws random experts
            metric = f"test {recipes.find(name).METRIC}"
            assert reloaded.evaluate()[metric] == pytest.approx(run["rows"][run["chosen"]][metric], rel=1e-5)
        inputs = loaded.recipe.inputs(next(reloaded.test_batches()))
        reloaded.task.model.eval()
        both = [loaded.predict(*inputs), reloaded.task.predict(*inputs)]
        first, last = (each[0] if isinstance(each, tuple) else each for each in both)
        assert len(first) == len(inputs[0])
        assert first.isfinite().all()
        assert run["side"] == "thor" or torch.equal(first, last.detach())


def test_a_model_has_what_the_step_of_its_evaluation_sets(arguments, tmp_path):
    """SMoE-Dropout's k grows; the model of the best evaluation, not the last, has that step's."""
    words = ("--check-steps", "0", "--steps", "8", "--sides", "dropout", "--out", str(tmp_path))
    assert train.run(arguments("competesmoe", *words)) == 0
    path, beside = tmp_path / "model-dropout-0.pt", tmp_path / "model-dropout-0.json"
    facts, found = json.loads(beside.read_text()), []
    for step in (1, 8):
        beside.write_text(json.dumps(facts | {"step": step}))
        loaded = train.load_model(path)
        found.append({each.k for each in loaded.model.modules() if isinstance(each, TopKGate)})
        assert found[-1] == {growing_k(step - 1, 8, loaded.recipe.k, loaded.recipe.experts)}
    assert found[0] != found[1]


def test_a_damaged_hostile_or_mismatched_model_is_an_error(arguments, tmp_path):
    assert train.run(arguments("comet_vit", "--check-steps", "0", "--sides", "comet", "--out", str(tmp_path))) == 0
    path, beside = tmp_path / "model-comet-0.pt", tmp_path / "model-comet-0.json"
    train.load_model(path)
    facts = json.loads(beside.read_text())
    for changed in (facts | {"recipe": "tea"}, facts | {"options": facts["options"] | {"dim": 24}}, {}):
        beside.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"model-comet-0.pt and model-comet-0.json are no model of this program"):
            train.load_model(path)
    beside.write_text(json.dumps(facts))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="is no whole checkpoint of tensors and plain containers"):
        train.load_model(path)
    with pytest.raises(ValueError, match="there is no checkpoint"):
        train.load_model(tmp_path / "none.pt")


def worst_expert(original, logits, k, *options):
    weights, _, *rest = original(logits, k, *options)
    return weights, (-logits).topk(k).indices.int(), *rest


def an_expert_too_large(original, x, weights, w_in, w_out, b_in, b_out, *rest):
    scale = torch.ones(len(w_out), 1)
    scale[0] = 1.001
    return original(x, weights, w_in, w_out * scale[:, None], b_in, b_out * scale, *rest)


def an_expert_that_does_not_learn(original, *args):
    gradients = original(*args)
    gradients[0][0].zero_()
    return gradients


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [
        ("expert_mlp_fwd", an_expert_too_large),
        ("grouped_gemm_bwd_weight", an_expert_that_does_not_learn),
        ("topk_gate_fwd", worst_expert),
        ("combine_fwd", lambda original, *args: original(*args) * 1.001),
        ("topk_gate_bwd", lambda original, *args: original(*args) * 0.9),
    ],
)
def test_a_wrong_kernel_is_not_taken_for_a_kink_or_tie(arguments, monkeypatch, capsys, kernel, wrong):
    """Rounding can decide on which side of 0 a ReLU's argument is (a kink), or which of two experts is chosen (a tie).
    The agreement check allows such differences, but not those of a wrong kernel."""
    plant(monkeypatch, kernel, wrong)
    words = ("--check-steps", "3", "--sides", "compete", "smoe", "dense", "--rate", "0.5", "--backend", "cpu")
    assert train.run(arguments("competesmoe", *words, "--steps", "1")) == 1
    printed = capsys.readouterr().out
    assert "agreement of compete on cpu with the reference: FAILED" in printed
    assert "agreement of smoe on cpu with the reference: FAILED" in printed
    assert "agreement of dense on cpu with the reference: passed" in printed


def test_heat_maps_show_where_tokens_went(arguments, tmp_path, monkeypatch):
    """Each side with experts has a picture, whose shares equal a count over single tokens. Side e3 routes each image
    once for each member of its ensemble."""
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    drawn, original = {}, comparison.draw

    def draw(path, maps, names, title):
        drawn[path.name] = maps
        return original(path, maps, names, title)

    counted, maps_of = {}, comparison.token_maps

    def token_maps(run):
        x, y = run.data.test
        run.task.model.eval()
        tokens = [each.active.tolist() for each in run.task.routing(Batch((x, y), None))]
        run.task.model.train()
        counted[f"tokens-{run.recipe.side}-0.png"] = tokens, y.tolist()
        return maps_of(run)

    monkeypatch.setattr(comparison, "draw", draw)
    monkeypatch.setattr(comparison, "token_maps", token_maps)
    words = ("--sides", "dense", "vmoe", "e3", "--check-steps", "0", "--capacity-eval", "8", "--eval-batch", "17")
    words += ("--experts", "8")  # with 4, each member of e3 has two experts and chooses both
    assert train.run(arguments("vmoe", *words, "--out", str(tmp_path))) == 0
    assert set(drawn) == {"tokens-vmoe-0.png", "tokens-e3-0.png"} == {each.name for each in tmp_path.glob("tokens*")}
    for name, maps in drawn.items():
        assert matplotlib.image.imread(tmp_path / name).shape == (312, 1872, 4)
        layers, y = counted[name]
        assert len(maps) == len(layers) == 1
        images = len(layers[0]) // 5  # an image has a class token, then four patches
        members = images // len(y)
        for expert in range(8):
            for patch in range(4):
                share = sum(layers[0][image * 5 + 1 + patch][expert] for image in range(images)) / images
                assert maps[0].positions[expert, patch // 2, patch % 2].item() == pytest.approx(share)
            for kind in range(3):
                selected = [image for image in range(images) if y[image // members] == kind]
                share = sum(layers[0][image * 5 + token][expert] for image in selected for token in range(5))
                assert maps[0].classes[expert, kind].item() == pytest.approx(share / (5 * len(selected)))
        assert len(maps[0].classes.unique()) > 8  # the shares differ by expert and by class


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_flops_are_those_of_the_experts_that_a_sample_reached(backend):
    """Side topk: each of two tasks chooses two of four experts, so a sample reaches two to four. Side softmax: all."""
    data = ratings()
    found = {}
    with backends.use_backend(backend):
        for side in ("topk", "softmax"):
            run = Run(MovieLens(sides=(side,), experts=4, rows=0), 0, Splits(data, data.train, data.test))
            run.task.model.eval()
            with torch.no_grad():
                out = run.task.model(*(each[:32] for each in data.test[:2]))[2]
            found[side] = run.flops(), out.statistics["experts_per_token"].item()
    (sparse, few), (dense, all_of_them) = found["topk"], found["softmax"]
    assert 2 <= few < 4 == all_of_them
    # An expert takes 2 * 256 * 256 FLOPs a sample. The FLOPs for choosing and summing differ by less than half of that.
    assert dense - sparse == pytest.approx((4 - few) * 2 * 256 * 256, abs=256 * 256)


def test_a_run_with_dropout_resumes_exactly(arguments, tmp_path):
    words = ("--check-steps", "0", "--every", "2", "--steps", "7")
    whole, broken = interrupted(lambda out: arguments("comet_gpt", *words, "--out", str(tmp_path / out)), 8)
    assert whole == broken


@pytest.mark.parametrize(("every", "layers"), [(1, 3), (2, 1), (3, 1), (4, 0)])
def test_experts_are_in_every_nth_block(text, every, layers):
    recipe = CompeteSMoE(sides=("smoe",), dim=16, hidden=12, depth=3, moe_every=every, heads=2, length=12)
    run = Run(recipe, 0, recipe.splits(text))
    run.task.model.eval()
    assert len(run.task.routing(next(run.test_batches()))) == layers
    kinds = [type(block).__name__ for block in run.task.model.blocks.blocks]
    assert kinds == ["MoEBlock" if index % every == every - 1 else "Block" for index in range(3)]


def test_manual_routing_freezes_the_experts_alone_while_the_gate_learns():
    digits = data.load("digits")
    recipe = Manual(sides=("manual",), dim=16, heads=2, hidden=12, batch_size=16, steps=4)
    run = Run(recipe, 0, Splits(digits, digits.train, digits.test))
    changed = []
    for _ in range(4):
        before = {name: each.detach().clone() for name, each in run.task.model.named_parameters()}
        run.take_step()
        changed.append(
            {name for name, each in run.task.model.named_parameters() if not torch.equal(each, before[name])}
        )
    gate = {name for name in before if ".gate." in name}
    experts = {name for name in before if ".experts." in name}
    assert gate
    assert experts
    assert changed[0] == changed[1] == before.keys() - gate
    assert changed[2] == changed[3] == before.keys() - experts


def test_shuffled_pairs_differ_by_seed_and_tied_masks_keep_the_first_neurons():
    digits, found = data.load("digits"), []
    for seed in (0, 1):
        run = Run(
            Manual(sides=("shuffled",), dim=16, heads=2, hidden=12), seed, Splits(digits, digits.train, digits.test)
        )
        found.append(run.task.model.blocks.blocks[0].block.ffn.gate.first.assignment.tolist())
        assert sorted(found[-1]) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert found[0] != found[1]
    points = images()
    tied = Run(comet.Comet(sides=("tied",), width=(20,), keep=0.3), 0, Splits(points, points.train, points.test))
    tied.task.model.eval()
    for layer in tied.task.routing(next(tied.test_batches())):
        assert layer.active.sum(0).tolist() == [40] * 6 + [0] * 14


def test_a_split_with_all_neurons_is_the_dense_model(text):
    """If every expert has every neuron and the learning rate is 0, the split model (the student) equals the dense model
    (the teacher) with any routing."""
    for side in ("small", "hash", "balanced", "comet", "hash+"):
        recipe = MoEBERT(
            sides=(side,), dim=16, hidden=24, expert_hidden=24, share=24, depth=2, heads=2, length=12, steps=4,
            lr=0.0, model_dropout=0.0, entropy=0.0, zeta=0.0,
        )  # fmt: skip
        run = Run(recipe, 0, recipe.splits(text))
        before, after = [], []
        for rows in (before, after):
            for _ in range(2):
                rows.append({name: value.item() for name, value in run.take_step().items()})
            rows.append(run.evaluate())
        assert "distilled" not in before[0]
        assert after[0]["distilled"] == pytest.approx(0, abs=1e-10), side
        assert after[0]["loss"] == pytest.approx(after[0]["text"], abs=1e-8)
        assert after[-1]["test bits"] == pytest.approx(before[-1]["test bits"], rel=1e-6)
        assert "experts" in after[-1]


def test_outputs_of_a_split_model_are_dropped_once(text):
    """The block drops elements of its layer's output, so the experts must not drop them too."""
    recipe = MoEBERT(
        sides=("hash",), dim=16, hidden=24, expert_hidden=24, share=24, depth=2, heads=2, length=12, steps=2,
        model_dropout=0.5,
    )  # fmt: skip
    run = Run(recipe, 0, recipe.splits(text))
    run.take_step()
    run.take_step()  # the first step trains the dense model, the second the split one
    blocks = [each for each in run.task.model.modules() if isinstance(each, MoEBlock)]
    assert len(blocks) == 2
    assert all(each.block.dropout == 0.5 and each.block.ffn.experts.dropout == 0 for each in blocks)


def test_distillation_resumes_exactly(arguments, tmp_path):
    """Interrupted after the split, a run resumes with the same student, local search and frozen teacher."""
    words = ("--check-steps", "0", "--every", "2", "--steps", "8", "--model-dropout", "0.1", "--sides", "comet+")
    whole, broken = interrupted(lambda out: arguments("moebert", *words, "topk", "--out", str(tmp_path / out)), 12)
    assert whole == broken
    assert all(math.isfinite(number) for run in whole for row in run[1:] for number in row)


def test_cached_masks_change_no_loss():
    points = images()
    splits = Splits(points, points.train, points.test)
    found, routed = [], []
    for keep in (True, False):
        run = Run(comet.Comet(sides=("comet",), width=(20,), keep_masks=keep, batch_size=8, eval_batch=17), 0, splits)
        losses = [run.take_step()["loss"].item() for _ in range(8)]
        calls = []
        run.task.model.router.register_forward_hook(lambda *args, calls=calls: calls.append(args))
        found.append((losses, run.evaluate(), run.flops()))
        routed.append(len(calls))
    assert found[0] == found[1]
    # Counting FLOPs routes one image. Without stored masks the evaluation routes its three batches.
    assert routed == [1, 1 + 3]


def test_a_data_set_of_the_wrong_kind_is_an_error(arguments, capsys):
    args = arguments("comet_vit")
    args.data = "text"
    assert train.run(args) == 2
    assert "comet_vit needs Images" in capsys.readouterr().err
    args.data = ""
    assert train.run(args) == 2
    assert "comet_vit needs --data: folder or file of CIFAR-10" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        (
            "moebert",
            ("--hidden", "16", "--expert-hidden", "8", "--share", "9", "--check-steps", "0", "--sides", "hash"),
            "moebert: share must be at most 8, the smaller of hidden and expert-hidden; got 9",
        ),
        (
            "comet_mixer",
            ("--expansion", "1"),
            "expansion must be two numbers, tokens and channels; got (1.0,)",
        ),
    ],
)
def test_options_that_do_not_fit_are_errors(arguments, capsys, name, words, message):
    assert train.run(arguments(name, *words)) == 2
    assert message in capsys.readouterr().err


def test_the_l1_side_adds_the_absolute_weights():
    points = images()
    splits = Splits(points, points.train, points.test)
    plain, l1 = (Run(comet.Comet(sides=(side,), width=(20,), l1=0.5), 0, splits) for side in ("standard", "l1"))
    total = sum(p.detach().abs().sum() for p in l1.task.model.parameters() if p.dim() == 2)
    torch.testing.assert_close(l1.take_step()["loss"], plain.take_step()["loss"] + 0.5 * total)


def test_the_loss_of_ratings_does_not_depend_on_the_batches_of_evaluation():
    points, found = ratings(), []
    for size in (7, 80):
        recipe = MovieLens(sides=("topk",), experts=4, rows=0, eval_batch=size)
        found.append(Run(recipe, 0, Splits(points, points.train, points.test)).evaluate()["test loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def vmoe(side):
    points, small = images(), {"patch": 2, "dim": 16, "depth": 2, "heads": 2, "hidden": 12, "moe_layers": 1}
    recipe = VMoE(sides=(side,), experts=4, batch_size=8, epochs=2, eval_batch=17, **small)
    return Run(recipe, 0, Splits(points, points.train, points.test))


def test_the_number_of_evaluations_changes_nothing():
    """THOR draws random experts in evaluation too, but more evaluations must not change the training."""
    found = []
    for points in ((2, 4, 6), (6,)):
        run = vmoe("thor")
        for point in points:
            run.advance(point)
        found.append({name: value for name, value in run.rows[-1].items() if name not in ("loss", "task", "seconds")})
    assert found[0] == found[1]


def test_flops_include_attention():
    """torch's counter omits attention on the CPU; run.flops() adds 4 * tokens^2 * dim FLOPs for each block."""
    run = vmoe("dense")
    _, tokens, dim = run.task.model.embed(run.data.test[0][:1]).shape
    pixels, classes = run.data.test[0].shape[1] // (tokens - 1), len(run.data.source.classes)
    block = 2 * tokens * (4 * dim * dim + 2 * dim * 12) + 2 * 2 * tokens * tokens * dim
    assert run.flops() == 2 * (tokens - 1) * pixels * dim + 2 * block + 2 * dim * classes
