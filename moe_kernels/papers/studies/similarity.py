"""COMET fixed routing, section 4.1.1 and Figure 2: do similar inputs get similar masks, and similar activations?

As in the paper, there are by default 500 pairs of inputs of length 100. An input has a random integer mu from 0 to 100
and components from N(mu, 25). The networks have 10 hidden layers of 512 neurons. For every pair the study computes the
cosine of the inputs, that of the masks and that of the masked activations. The last two take all hidden layers together
and are means over 10 networks. The paper draws 10 networks for every pair, as --fresh does; by default all pairs use
the same 10. With the keep fraction p = 1 a network is dense: the baseline of Figure 2b.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_kernels import info
from moe_kernels.nn.comet import ACTIVATIONS, CometMLP
from moe_kernels.ops.kwta import k_from_fraction, kwta_mask
from moe_kernels.papers.studies import Study, option
from moe_kernels.papers.train.plotting import write_picture


@dataclass(frozen=True)
class Similarity(Study):
    pairs: int = option(500, "pairs of inputs", low=1)
    networks: int = option(10, "networks of random weights", low=1)
    fresh: bool = option(False, "draw new networks for every pair, as the paper does")
    inputs: int = option(100, "length of an input", low=2)
    hidden: int = option(512, "neurons of a hidden layer", low=1)
    layers: int = option(10, "hidden layers", low=1)
    keep: tuple[float, ...] = option((0.1, 0.3, 0.5, 0.7, 0.9, 1.0), "keep fractions p", low=0, high=1)
    activation: str = option(
        "tanh", "activation of the backbone; the paper names none here", choices=tuple(sorted(ACTIVATIONS))
    )

    def run(self, out: Path | None) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        means = torch.randint(0, 101, (2, self.pairs, 1), generator=generator)
        x = means + 5 * torch.randn(2, self.pairs, self.inputs, generator=generator)
        of_inputs = torch.cosine_similarity(x[0], x[1])
        masks = {p: torch.zeros(self.pairs) for p in self.keep}
        activations = {p: torch.zeros(self.pairs) for p in self.keep}
        for pairs in torch.arange(self.pairs).split(1 if self.fresh else self.pairs):
            for _ in range(self.networks):
                widths = (self.inputs, *[self.hidden] * self.layers, 1)
                network = CometMLP(widths, 1.0, activation=self.activation, generator=generator)
                for p in self.keep:
                    of_masks, of_activations = self._similarities(network, x[:, pairs], p)
                    masks[p][pairs] += of_masks / self.networks
                    activations[p][pairs] += of_activations / self.networks
        rows = []
        for p in self.keep:
            both = (masks[p], activations[p])
            numbers = [measure(of_inputs, each) for measure in (_correlation, _slope) for each in both]
            rows.append((f"{p:g}", *(f"{number:.3f}" for number in numbers)))
        header = ("keep p", "rank correlation with masks", "with activations", "slope of masks", "of activations")
        print(info.table(header, rows))
        print("Over all pairs: cosine of the two inputs against that of their masks or masked activations.")
        if out is not None:
            self._write(out, of_inputs, masks, activations)

    @torch.no_grad()
    def _similarities(self, network: CometMLP, x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        """x (2, pairs, inputs) -> cosines (pairs) of the masks and of the masked activations of all layers together."""
        k = k_from_fraction(p, self.hidden)
        z, h = x, x
        masks, activations = [], []
        for v, layer in zip(network.router.buffers(), network.hidden, strict=True):
            scores = z @ v.t()
            mask = kwta_mask(scores, k)
            z = scores * mask
            h = layer(h) * mask
            masks.append(mask.float())
            activations.append(h)
        first, second = (torch.cat(each, -1) for each in (masks, activations))
        return torch.cosine_similarity(first[0], first[1]), torch.cosine_similarity(second[0], second[1])

    def _write(self, out: Path, inputs: Tensor, masks: dict[float, Tensor], activations: dict[float, Tensor]) -> None:
        rows = []
        for p in self.keep:
            columns = {"inputs": inputs, "masks": masks[p], "activations": activations[p]}
            for i in range(self.pairs):
                rows.append({"keep": p, "pair": i} | {name: each[i].item() for name, each in columns.items()})
        self.write_rows(out, rows)

        def draw(axes: Any) -> None:
            for axis, found, name in zip(axes[0], (masks, activations), ("masks", "masked activations"), strict=True):
                for p in self.keep:
                    if name == "masks" and p == 1:
                        continue
                    axis.scatter(inputs, found[p], s=4, label=f"p = {p:g}")
                axis.set(xlabel="cosine of the inputs", ylabel=f"cosine of the {name}")
                axis.legend(fontsize="small")

        write_picture(out / "similarity.png", draw, columns=2, figsize=(11, 4.5))


def _ranks(x: Tensor) -> Tensor:
    return x.argsort(stable=True).argsort(stable=True).double()


def _correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's rank correlation, but of equal values the earlier has the lower rank. NaN if a or b is constant."""
    if a.unique().numel() == 1 or b.unique().numel() == 1:
        return float("nan")
    return float(torch.corrcoef(torch.stack([_ranks(a), _ranks(b)]))[0, 1])


def _slope(a: Tensor, b: Tensor) -> float:
    """Slope of the least-squares line of b over a; NaN if a is constant."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return float((a * b).sum() / (a * a).sum()) if a.abs().max() > 0 else float("nan")
