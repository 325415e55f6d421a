"""Paper 000, appendix A.5: COMET against the dense MLP on a regression, SARCOS, one torque from 21 numbers.

The paper: 4 layers of 100, 500 and 1000 neurons, p = 0.1, 0.5 and 0.9, SGD at 1e-2, 50 epochs, three seeds, on the
published files (sarcos_inv.mat, sarcos_inv_test.mat). Inputs and torques are scaled to mean 0 and variance 1, which the
paper does not say; the loss is the mean squared error, here a share of the torque's variance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.data import Table
from moe_kernels.models.mlp import comet_mlp
from moe_kernels.nn.comet import ACTIVATIONS
from moe_kernels.ops.kwta import unpack_bits
from moe_kernels.recipes import Batch, Evaluation, Recipe, Routing, Splits, Task, option, total_loss


@dataclass(frozen=True)
class CometSarcos(Recipe):
    """Sides: standard (dense) and comet, from the same initial weights."""

    SIDES: ClassVar[tuple[str, ...]] = ("standard", "comet")
    ACCEPTS: ClassVar[type] = Table
    METRIC: ClassVar[str] = "error"
    HIGHER_IS_BETTER: ClassVar[bool] = False

    data: str = option("", "folder with sarcos_inv.mat and sarcos_inv_test.mat")
    sides: tuple[str, ...] = option(("standard", "comet"), "models to compare")
    torque: int = option(1, "the joint to tell, from 1 to 7", low=1, high=7)
    width: tuple[int, ...] = option((100, 500, 1000), "neurons of a hidden layer", low=1)
    layers: int = option(4, "linear layers", low=2)
    keep: float = option(0.5, "keep fraction p; the paper: 0.1, 0.5, 0.9", low=0, high=1, sweep=True)
    activation: str = option("tanh", "of the hidden layers", choices=tuple(sorted(ACTIVATIONS)))
    epochs: int = option(50, "passes over the training set", low=0)
    lr: float = option(0.01, "learning rate of SGD", low=0)

    def of_sides(self) -> dict[str, Recipe]:
        return {
            f"{side} {width}" if len(self.width) > 1 else side: replace(self, sides=(side,), width=(width,))
            for width in self.width
            for side in self.sides
        }

    def build(self, data: Splits, seed: int, steps: int) -> Task:
        x, _ = data.train
        (width,) = self.width
        p = self.keep if self.side == "comet" else 1.0
        model = comet_mlp(
            x.shape[1], width, 1, layers=self.layers, p=p, activation=self.activation, seed=seed, device="cpu"
        ).to(x.device)
        kept = None if model.dense else model.router.kept(x)

        def truth(batch: Batch) -> Tensor:
            return batch.tensors[1][:, self.torque - 1]

        def loss(batch: Batch) -> dict[str, Tensor]:
            found = model(batch.tensors[0], kept, None if kept is None else batch.rows)[:, 0]
            return total_loss(F.mse_loss(found, truth(batch)), {})

        def evaluate(batch: Batch) -> Evaluation:
            rows, y = batch.tensors[0], truth(batch)
            bits = None if model.dense else model.router(rows)
            error = F.mse_loss(model(rows, bits)[:, 0], y, reduction="sum")
            masks = model.masks(rows) if bits is None else [unpack_bits(each, width) for each in bits]
            return Evaluation({"error": (error, len(y))}, [Routing(mask, unit="neurons") for mask in masks])

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return Task(model, torch.optim.SGD(trained, self.lr), loss, evaluate, predict=lambda rows: model(rows)[:, 0])
