"""Heat maps of the experts of image models, over image positions and over classes (the sparse ViT, figures 5 to 14)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_kernels.papers.recipes import Routing
from moe_kernels.papers.train.loop import Run
from moe_kernels.papers.train.plotting import write_picture


class TokenMap(NamedTuple):
    """For each expert of a layer, the share of the tokens that use it, or its mean gate weight: see `of`."""

    positions: Tensor  # (E, rows, columns): over the tokens at one patch of the test images
    classes: Tensor  # (E, C): over all tokens of the test images of a class, class tokens included
    of: str = "share of the tokens"  # or "gate weight", for a gate that uses every expert for every token


@torch.no_grad()
def token_maps(run: Run) -> list[TokenMap]:
    """A map for each layer of experts, over the test images. The patches of an image form the task's `grid`.

    A token that uses several experts counts for each of them. If a gate uses every expert for every token of the first
    batch, all shares would be 1, so the maps of its layer hold mean gate weights instead.
    """
    task = run.task
    assert task.grid is not None
    kinds: list[str] = []
    tokens, classes = 1 + task.grid[0] * task.grid[1], len(run.data.source.classes)
    positions: list[Tensor] = []
    by_class: list[Tensor] = []
    images = torch.zeros(classes, 1, device=run.device)
    task.model.eval()
    with run.random.use():
        for batch in run.test_batches():
            found = task.routing(batch)
            kinds = kinds or ["gate weight" if _dense(layer) else "share of the tokens" for layer in found]
            layers = [
                layer.weights.float() if layer.weights is not None and kind == "gate weight" else layer.active.float()
                for layer, kind in zip(found, kinds, strict=True)
            ]
            # An ensemble copies every image once for each member; the copies are adjacent.
            members = len(layers[0]) // (len(batch.tensors[1]) * tokens)
            one_hot = torch.nn.functional.one_hot(batch.tensors[1].repeat_interleave(members), classes).float()
            images += one_hot.sum(0)[:, None]
            used = [layer.unflatten(0, (-1, tokens)) for layer in layers]  # (B * members, tokens, E)
            new_sums = [each.sum(0) for each in used], [one_hot.t() @ each.mean(1) for each in used]
            positions, by_class = (
                [a + b for a, b in zip(sums, new, strict=True)] if sums else new
                for sums, new in zip((positions, by_class), new_sums, strict=True)
            )
    task.model.train()
    return [
        TokenMap(at_tokens[1:].t().unflatten(1, task.grid) / images.sum(), (sums / images.clamp(min=1)).t(), kind)
        for at_tokens, sums, kind in zip(positions, by_class, kinds, strict=True)
    ]


def _dense(layer: Routing) -> bool:
    return layer.weights is not None and bool(layer.active.all())


def draw(path: Path, maps: list[TokenMap], names: tuple[str, ...], title: str) -> bool:
    """Draws a row for each layer: every expert's map of patches, then one map of classes. False without matplotlib."""
    experts, class_width = len(maps[0].positions), 4
    largest = max(float(each.max()) for layer in maps for each in (layer.positions, layer.classes))

    def draw_maps(grid: Any) -> None:
        for number, (row, layer) in enumerate(zip(grid, maps, strict=True)):
            for expert, (axis, panel) in enumerate(zip(row, [*layer.positions, layer.classes], strict=True)):
                aspect = "equal" if expert < experts else "auto"
                shown = axis.imshow(panel.cpu().numpy(), vmin=0, vmax=largest, aspect=aspect)
                axis.set(xticks=[], yticks=[], title=f"expert {expert}" if expert < experts and number == 0 else "")
            row[0].set_ylabel(f"layer {number}")
            row[-1].set(yticks=range(experts), ylabel="expert")
        grid[0, -1].set_title("of each class")
        grid[-1, -1].set_xlabel("class")
        if len(names) <= 20:
            grid[-1, -1].set_xticks(range(len(names)), names, rotation=90, fontsize="x-small")
        grid[0, 0].figure.colorbar(shown, ax=grid, label=", ".join(dict.fromkeys(each.of for each in maps)))
        grid[0, 0].figure.suptitle(title)

    widths = [1] * experts + [class_width]
    size = {"figsize": (1.3 * sum(widths), 1.6 * len(maps) + 1), "width_ratios": widths}
    return write_picture(path, draw_maps, len(maps), experts + 1, **size)


@torch.no_grad()
def draw_dropped(path: Path, run: Run, title: str, images: int = 8) -> bool:
    """Draws the first test images, a row each, and beside them what `Task.dropped` leaves: a patch whose choices are
    all dropped is black, one that keeps half of them half as bright. False without matplotlib."""
    task, shape = run.task, run.data.source.image_shape
    assert task.dropped is not None
    x = run.data.test[0][:images]
    task.model.eval()
    with run.random.use(), run.autocast():
        found = task.dropped(x)
    task.model.train()
    pictures = ((x.float().unflatten(1, shape) + 1) / 2).cpu()
    shown = [("image", pictures), *((name, _darkened(pictures, share.float().cpu())) for name, share in found.items())]

    def draw_images(grid: Any) -> None:
        for row, axes in enumerate(grid):
            for axis, (name, panel) in zip(axes, shown, strict=True):
                axis.imshow(panel[row].expand(3, -1, -1).permute(1, 2, 0).clamp(0, 1).numpy())
                axis.set(xticks=[], yticks=[])
                if row == 0:
                    axis.set_title(name, fontsize="small")
        grid[0, 0].figure.suptitle(title)

    return write_picture(path, draw_images, len(x), len(shown), figsize=(1.4 * len(shown), 1.4 * len(x) + 0.6))


def _darkened(pictures: Tensor, share: Tensor) -> Tensor:
    """pictures (B, C, H, W) times 1 - share (B, rows, columns) of the patch that a pixel is in."""
    rows, columns = (side // patches for side, patches in zip(pictures.shape[2:], share.shape[1:], strict=True))
    return pictures * (1 - share).repeat_interleave(rows, 1).repeat_interleave(columns, 2)[:, None]
