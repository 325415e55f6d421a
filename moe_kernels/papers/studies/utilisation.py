"""COMET fixed routing, section 4.1.2 and Figure 3: how often is each neuron of a random network active; are any dead?

As in the paper, 1000 random networks of 4 linear layers, 3 of them hidden, by default get all images of the data set.
Each network draws one width N ~ U(100, 1000) for its hidden layers and a sparsity 1 - p ~ U(0.05, 1). A neuron is dead
if no image activates it. On CIFAR-10 the paper finds 7.6e-4 % of all neurons dead, in fewer than 2 % of the networks;
many of the dead neurons are active on CIFAR-100 (here --other).
In digits and MNIST the mean image is far from zero, so more neurons are dead; --centre subtracts the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_kernels import info
from moe_kernels.nn.comet import FixedRouting
from moe_kernels.nn.utilisation import Utilisation
from moe_kernels.papers.data import Images
from moe_kernels.papers.studies import Study, option
from moe_kernels.papers.train.plotting import write_picture

BINS = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95)  # lower ends of the table's ranges of the keep fraction


@dataclass(frozen=True)
class UtilisationStudy(Study):
    data: str = option("digits", "images: digits, or a path to CIFAR-10 or another set")
    other: str = option("", "a second set, of images of the same size: counts the dead neurons that it activates")
    centre: bool = option(False, "subtract the mean image of the data from both sets")
    networks: int = option(1000, "networks of random weights", low=1)
    layers: int = option(4, "linear layers: one more than hidden ones", low=2)
    width: tuple[int, ...] = option((100, 1000), "smallest and largest number of neurons of a hidden layer", low=1)
    sparsity: tuple[float, ...] = option((0.05, 1.0), "smallest and largest 1 - p", low=0, high=1)
    samples: int = option(0, "use only so many images of each set, the first ones; 0: all", low=0)

    def run(self, out: Path | None) -> None:
        first, second = self._images(self.data), self._images(self.other) if self.other else None
        if second is not None and second.shape[1] != first.shape[1]:
            raise ValueError(f"utilisation: {self.other} must have {first.shape[1]} pixels, got {second.shape[1]}")
        mean = first.mean(0) if self.centre else torch.zeros(())
        first, second = first - mean, None if second is None else second - mean
        generator = torch.Generator().manual_seed(self.seed)
        rows = []
        extremes: dict[str, tuple[float, list[Tensor]]] = {}
        for number in range(self.networks):
            router, p = self._draw(first.shape[1], generator)
            share = _shares(router, first)
            dead = [each == 0 for each in share]
            row = {
                "network": number,
                "width": router.widths[1],
                "keep": p,
                "neurons": sum(each.numel() for each in share),
                "dead": sum(int(each.sum()) for each in dead),
                "least": min(each.min().item() for each in share),
            }
            if second is not None:
                other = _shares(router, second)
                row["woken"] = sum(int((d & (s > 0)).sum()) for d, s in zip(dead, other, strict=True))
            rows.append(row)
            for name, better in (("sparsest", lambda a, b: a < b), ("densest", lambda a, b: a > b)):
                if name not in extremes or better(p, extremes[name][0]):
                    extremes[name] = p, share
        self._print(rows)
        if out is not None:
            self.write_rows(out, rows)
            _draw_picture(out / "utilisation.png", rows, extremes)

    def _images(self, name: str) -> Tensor:
        data = self.load(name, Images)
        return torch.cat([data.train_x, data.test_x])[: self.samples or None]

    def _draw(self, inputs: int, generator: torch.Generator) -> tuple[FixedRouting, float]:
        (narrowest, widest), (low, high) = self.width[:2], self.sparsity[:2]
        width = int(torch.randint(narrowest, widest + 1, (), generator=generator))
        sparsity = low + (high - low) * torch.rand((), generator=generator).item()
        p = max(1 - sparsity, 1e-6)
        return FixedRouting((inputs, *[width] * (self.layers - 1)), p, generator=generator), p

    def _print(self, rows: list[dict[str, float]]) -> None:
        lines = []
        for low, high in [*zip(BINS, (*BINS[1:], 1.0), strict=True), (0.0, 1.0)]:
            group = [row for row in rows if low <= row["keep"] < high or (high == 1 and row["keep"] == 1)]
            if not group:
                continue
            neurons, dead = (sum(row[name] for row in group) for name in ("neurons", "dead"))
            woken = f"{sum(row['woken'] for row in group) / dead:.1%}" if "woken" in group[0] and dead else "-"
            label = "all" if (low, high) == (0.0, 1.0) else f"{low:g} to {high:g}"
            with_dead = sum(row["dead"] > 0 for row in group) / len(group)
            lines.append((label, len(group), neurons, f"{dead / neurons:.2e}", f"{with_dead:.1%}", woken))
        header = ("keep p", "networks", "neurons", "dead", "networks with dead ones", "active on --other")
        print(info.table(header, lines))


@torch.no_grad()
def _shares(router: FixedRouting, x: Tensor) -> list[Tensor]:
    counted = Utilisation()
    for chunk in x.split(4096):
        counted.update(router.masks(chunk))
    return counted.share()


def _draw_picture(path: Path, rows: list[dict[str, float]], extremes: dict[str, tuple[float, list[Tensor]]]) -> None:
    def draw(axes: Any) -> None:
        *single, last = axes[0]
        for axis, (p, share) in zip(single, extremes.values(), strict=True):
            for layer, each in enumerate(share, 1):
                axis.plot(each.sort(descending=True).values, label=f"layer {layer}")
            title = f"one network, p = {p:.3f}"
            axis.set(xlabel="neurons of the layer, sorted", ylabel="share of the images", title=title)
            axis.legend(fontsize="small")
        last.scatter([row["keep"] for row in rows], [row["dead"] / row["neurons"] for row in rows], s=6)
        last.set(xlabel="keep fraction p", ylabel="share of dead neurons", title=f"{len(rows)} networks")

    write_picture(path, draw, columns=3, figsize=(15, 4.5))
