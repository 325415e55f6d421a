"""Recipe vmoe: one model at several capacities, E^3 beside its members, phases of the sparse ViT."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from moe_kernels.papers import train
from moe_kernels.papers.data import Images
from moe_kernels.papers.recipes import Batch, Splits
from moe_kernels.papers.recipes._routers import policies
from moe_kernels.papers.recipes.vmoe import VMoE, in_phases
from moe_kernels.papers.train import heatmaps, plotting
from moe_kernels.papers.train.loop import Run
from moe_kernels.papers.train.statistics import calibration_error
from tests.helpers.results import told
from tests.helpers.small_sets import images

SMALL = {"patch": 2, "dim": 16, "depth": 2, "heads": 2, "hidden": 12, "experts": 4, "batch_size": 8, "lr": 0.01}


def trained(side, steps=20, **changed):
    points = images()
    recipe = VMoE(sides=(side,), steps=steps, **SMALL | changed)
    run = Run(recipe, 0, Splits(points, points.train, points.test))
    while run.step < run.steps - 1:
        run.take_step()
    return run


@pytest.mark.parametrize("length", [{"steps": 20}, {"steps": 0, "epochs": 4}], ids=["steps", "epochs"])
def test_the_last_evaluation_is_at_every_capacity_and_in_every_order(length):
    """Each column equals the accuracy of the same weights in a model whose policy has that capacity and order."""
    run = trained("vmoe", **length, capacity_eval=(2.0, 0.2, 0.5), group=2)
    assert run.step > 0
    assert not any(" at " in name for name in run.evaluate())
    run.take_step()
    found = run.evaluate()
    columns = [name for curve in run.recipe.curves().values() for name in curve.values()]
    assert set(columns) == {name for name in found if " at " in name}
    assert set(columns) <= set(run.recipe.columns())
    assert len(columns) == 9
    for side, order in (("vmoe", "by position"), ("bpr", "by weight")):
        for value in (2.0, 0.2, 0.5):
            other = trained(side, 1, capacity_eval=(value,), group=2)
            other.task.model.load_state_dict(run.task.model.state_dict())
            assert found[f"test accuracy {order} at {value:g}"] == other.evaluate()["test accuracy"]
    assert (
        found["test accuracy"] == found["test accuracy by position at 2"] != found["test accuracy by position at 0.2"]
    )
    assert found["test accuracy at random at 2"] == pytest.approx(found["test accuracy"], abs=0.03)


def test_a_run_at_several_capacities_prints_and_draws_them(monkeypatch, tmp_path, capsys, stored, pictures):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.setattr(train, "load", lambda name: images())
    parser = argparse.ArgumentParser()
    train.add_arguments(parser, ["vmoe"])
    words = (
        "vmoe --data corners --sides vmoe bpr --seeds 2 --steps 4 --dim 16 --depth 2 --heads 2 --hidden 12 --experts 4"
    )
    words += " --patch 2 --capacity-eval 2 0.2 0.5 --check-steps 0 --device cpu --threads 1 --batch-size 16 --out"
    assert train.run(parser.parse_args([*words.split(), str(tmp_path)])) == 0
    found = json.loads((tmp_path / "result.json").read_text())
    stored("train_capacities", told(found, capsys.readouterr().out, tmp_path, pictures), tolerance=1e-3)


def test_orders_drop_equally_many_choices_but_others():
    run = trained("vmoe", capacity_eval=(1.0, 0.4), group=2)
    model, x = run.task.model.eval(), run.data.test[0][:8]
    kept = {}
    with torch.no_grad():
        model.embed.project.weight.mul_(20)  # the images then differ in their routing
        for priority in (None, "max", "random"):
            with policies(model, factor_eval=0.4, priority=priority):
                out = model(x)[1][0]
            kept[priority] = out.plan.slot_row >= 0
            weights = out.gates[0].weights
    counts = {int(each.sum()) for each in kept.values()}
    assert len(counts) == 1
    assert not torch.equal(kept[None], kept["random"])
    means = {priority: weights[:, 0][each[:, 0]].mean().item() for priority, each in kept.items()}
    assert means["max"] > max(means[None], means["random"])
    last = kept[None].unflatten(0, (4, -1))[:, -17:].float().mean()  # of the second image in each group of two
    assert last < kept["random"].unflatten(0, (4, -1))[:, -17:].float().mean()
    out = model(x)[1][0]
    assert (out.plan.slot_row >= 0).float().mean() > kept[None].float().mean()  # the model has its own policy again


def test_the_picture_shows_which_patches_are_dropped(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    drawn = []
    monkeypatch.setattr(plotting, "save", lambda canvas, path: drawn.append(canvas))
    run = trained("bpr", capacity_eval=(1.0, 0.2, 0.0))
    run.task.model.eval()
    with torch.no_grad():
        shares = run.task.dropped(run.data.test[0][:8])
    assert list(shares) == [
        f"{order}, {at}" for order in ("by position", "by weight", "at random") for at in ("0", "0.2")
    ]
    for name, share in shares.items():
        assert share.shape == (8, 4, 4)
        assert share.eq(1).all() if name.endswith(" 0") else 0 < share.mean() < 1
    assert heatmaps.draw_dropped(tmp_path / "dropped.png", run, "dropped")
    assert [axis.get_title() for axis in drawn[0].axes] == ["image", *shares] + [""] * 7 * 7
    assert not any(len(axis.get_xticks()) + len(axis.get_yticks()) for axis in drawn[0].axes)
    panels = [axis.images[0].get_array() for axis in drawn[0].axes]
    assert len(panels) == 8 * 7
    whole, nothing, some = panels[0], panels[1], panels[4]  # the first image, then at capacity 0, then by weight at 0.2
    assert whole.max() > 0
    assert abs(nothing).max() == 0
    left = 1 - shares["by weight, 0.2"][0].repeat_interleave(2, 0).repeat_interleave(2, 1)
    image = (run.data.test[0][0].reshape(8, 8) + 1) / 2
    torch.testing.assert_close(torch.tensor(some[..., 0]), (image * left).clamp(0, 1))
    assert run.task.model.training


@pytest.mark.parametrize("classes", [20, 21])
def test_a_heat_map_names_up_to_twenty_classes(monkeypatch, tmp_path, classes):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    drawn = []
    monkeypatch.setattr(plotting, "save", lambda canvas, path: drawn.append(canvas))
    maps = [heatmaps.TokenMap(torch.rand(3, 2, 2) / 2, torch.rand(3, classes), kind) for kind in ("share", "weight")]
    maps[0].classes[1, 2] = 1.5
    names = tuple(f"kind {number}" for number in range(classes))
    assert heatmaps.draw(tmp_path / "tokens.png", maps, names, "tokens")
    *panels, bar = drawn[0].axes
    assert bar.get_ylabel() == "share, weight"
    assert [panel.get_title() for panel in panels] == [f"expert {n}" for n in range(3)] + ["of each class"] + [""] * 4
    assert [panel.get_ylabel() for panel in panels] == ["layer 0", "", "", "expert", "layer 1", "", "", "expert"]
    shown = [each for layer in maps for each in [*layer.positions, layer.classes]]
    for panel, values in zip(panels, shown, strict=True):
        (image,) = panel.images
        assert image.get_array().tolist() == values.tolist()
        assert image.get_clim() == (0, 1.5)
    for panel in panels[3::4]:
        assert panel.get_yticks().tolist() == [0, 1, 2]
    labels = [label.get_text() for label in panels[7].get_xticklabels()]
    assert labels == (list(names) if classes == 20 else [])
    assert panels[7].get_xticks().tolist() == list(range(20)) * (classes == 20)


def test_maps_of_wide_images_are_wide():
    points = images()
    wide = Images(**vars(points) | {"image_shape": (1, 4, 16)})
    run = Run(VMoE(sides=("vmoe",), steps=1, **SMALL), 0, Splits(wide, points.train, points.test))
    x, y = points.test
    run.task.model.eval()
    (layer,), (found,) = run.task.routing(Batch((x, y), None)), heatmaps.token_maps(run)
    used = layer.active.unflatten(0, (len(x), 1 + 2 * 8)).float()
    torch.testing.assert_close(found.positions, used[:, 1:].mean(0).t().unflatten(1, (2, 8)))
    for kind in range(3):
        torch.testing.assert_close(found.classes[:, kind], used[y == kind].mean((0, 1)))


def test_a_pixel_is_darkened_by_the_share_of_its_patch():
    pictures = torch.rand(2, 3, 6, 8)
    share = torch.tensor([[[0.0, 1.0], [0.5, 0.25]], [[1.0, 0.75], [0.0, 0.5]]])
    found = heatmaps._darkened(pictures, share)
    for row in range(6):
        for column in range(8):
            left = 1 - share[:, row // 3, column // 4]
            torch.testing.assert_close(found[:, :, row, column], pictures[:, :, row, column] * left[:, None])


def test_an_ensemble_is_measured_beside_its_members():
    run = trained("e3", capacity_eval=(1.05,), eval_batch=16)
    run.take_step()
    found, (x, y) = run.evaluate(), run.data.test
    with torch.no_grad():
        log_probs = torch.cat([run.task.model.eval()(each)[0] for each in x.split(16)]).log_softmax(-1)
    probs = log_probs.exp().unflatten(0, (-1, 2))
    for name, own in (("", probs.mean(1)), ("member 1 ", probs[:, 0]), ("member 2 ", probs[:, 1])):
        best, predicted = own.max(-1)
        assert found[f"test {name}loss"] == pytest.approx(-own[torch.arange(len(y)), y].log().mean().item(), rel=1e-4)
        assert found[f"test {name}accuracy"] == pytest.approx((predicted == y).float().mean().item())
        assert found[f"test {name}ECE"] == pytest.approx(calibration_error(best, predicted == y), rel=1e-3)
    assert found["test loss"] < (found["test member 1 loss"] + found["test member 2 loss"]) / 2  # Jensen
    assert not any("member" in name for name in trained("vmoe", 1).evaluate())


def test_phases_of_sparsified_have_rates_of_their_own():
    rate = in_phases(40, 0.3)
    assert [rate(step) for step in (0, 10, 20, 25, 30, 35)] == pytest.approx([1, 0.5, 1, 0.5, 0.3, 0.15])
    assert max(rate(19), rate(29), rate(39)) < 0.03
    points = images()
    for side, at in (("sparsified", 0.6), ("softmax", (2**0.5 / 2 + 1) / 2 - 0.5)):
        recipe = VMoE(sides=(side,), steps=40, last_rate=0.6, **SMALL)
        run = Run(recipe, 0, Splits(points, points.train, points.test))
        assert run.task.schedule(30) == pytest.approx(at if side == "sparsified" else (1 - 2**0.5 / 2) / 2)


def test_a_model_that_was_saved_with_one_capacity_loads(tmp_path):
    run = trained("vmoe", 1, capacity_eval=(0.5,))
    run.advance(1)
    train.trained.save_model(tmp_path, "vmoe-0", run, run.model_state())
    path = tmp_path / "model-vmoe-0.json"
    text = path.read_text()
    assert '"capacity_eval": [\n   0.5\n  ]' in text
    path.write_text(text.replace('"capacity_eval": [\n   0.5\n  ]', '"capacity_eval": 0.5'))
    loaded = train.load_model(tmp_path / "model-vmoe-0.pt")
    (policy,) = {each.policy for each in loaded.model.modules() if hasattr(each, "policy")}
    assert policy.factor_eval == 0.5
