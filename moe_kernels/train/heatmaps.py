"""Where the tokens of images go: pictures of the experts over image positions and over classes (paper 002, figures 5
to 14)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moe_kernels.recipes import Routing
from moe_kernels.train.loop import Run
from moe_kernels.train.plotting import plotting, save


class TokenMap(NamedTuple):
    """One layer's experts: shares, from 0 to 1, that each of them got."""

    positions: Tensor  # (E, rows, columns): of the test images, the token at that patch
    classes: Tensor  # (E, C): of the tokens of the test images of a class, the class token among them
    of: str = "share of the tokens"  # what is drawn; "gate weight" of a gate that uses every expert for every token


@torch.no_grad()
def token_maps(run: Run) -> list[TokenMap]:
    """One a layer of experts, over the test set of images; the task's `grid` says how its patches lie.

    An expert that many tokens choose at once, or a token that takes several experts, counts as often as it happens.
    A gate that uses every expert for every token would give 1 everywhere: its weights are counted instead.
    """
    task = run.task
    assert task.grid is not None
    kinds: list[str] = []
    tokens, classes = 1 + task.grid[0] * task.grid[1], len(run.data.source.classes)
    positions: list[Tensor] = []
    by_class: list[Tensor] = []
    seen = torch.zeros(classes, 1, device=run.device)
    task.model.eval()
    with run.random.use():
        for batch in run.test_batches():
            found = task.routing(batch)
            kinds = kinds or ["gate weight" if _dense(layer) else "share of the tokens" for layer in found]
            layers = [
                layer.weights.float() if layer.weights is not None and kind == "gate weight" else layer.active.float()
                for layer, kind in zip(found, kinds, strict=True)
            ]
            members = len(layers[0]) // (len(batch.tensors[1]) * tokens)  # of an ensemble: an image's stand together
            one_hot = torch.nn.functional.one_hot(batch.tensors[1].repeat_interleave(members), classes).float()
            seen += one_hot.sum(0)[:, None]
            used = [layer.unflatten(0, (-1, tokens)) for layer in layers]  # (B, S, E)
            new_sums = [each.sum(0) for each in used], [one_hot.t() @ each.mean(1) for each in used]
            positions, by_class = (
                [a + b for a, b in zip(sums, new, strict=True)] if sums else new
                for sums, new in zip((positions, by_class), new_sums, strict=True)
            )
    task.model.train()
    return [
        TokenMap(at[1:].t().unflatten(1, task.grid) / seen.sum(), (of / seen.clamp(min=1)).t(), kind)
        for at, of, kind in zip(positions, by_class, kinds, strict=True)
    ]


def _dense(layer: Routing) -> bool:
    return layer.weights is not None and bool(layer.active.all())


def draw(path: Path, maps: list[TokenMap], names: tuple[str, ...], title: str) -> bool:
    """A row a layer: every expert's share of each patch, then that of each class. False without matplotlib."""
    pyplot = plotting()
    if pyplot is None:
        return False
    experts, wide = len(maps[0].positions), 4
    canvas, grid = pyplot.subplots(
        len(maps),
        experts + 1,
        squeeze=False,
        figsize=(1.3 * experts + 1.3 * wide, 1.6 * len(maps) + 1),
        width_ratios=[1] * experts + [wide],
        layout="constrained",
    )
    most = max(float(each.max()) for layer in maps for each in (layer.positions, layer.classes))
    for number, (row, layer) in enumerate(zip(grid, maps, strict=True)):
        panels = [*layer.positions, layer.classes]
        for expert, (axis, panel) in enumerate(zip(row, panels, strict=True)):
            shown = axis.imshow(panel.cpu().numpy(), vmin=0, vmax=most, aspect="equal" if expert < experts else "auto")
            axis.set(xticks=[], yticks=[], title=f"expert {expert}" if expert < experts and number == 0 else "")
        row[0].set_ylabel(f"layer {number}")
        row[-1].set(yticks=range(experts), ylabel="expert")
    grid[0, -1].set_title("of each class")
    grid[-1, -1].set_xlabel("class")
    if len(names) <= 20:
        grid[-1, -1].set_xticks(range(len(names)), names, rotation=90, fontsize="x-small")
    canvas.colorbar(shown, ax=grid, label=maps[0].of)
    canvas.suptitle(title)
    save(canvas, path)
    return True
