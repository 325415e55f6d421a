"""COMET fixed routing, appendix A.5: COMET against the dense MLP on a regression, SARCOS: one torque from 21 numbers.

The paper: 4 layers of 100, 500 or 1000 neurons, p = 0.1, 0.5 or 0.9, SGD at 1e-2, 50 epochs, three seeds, on the
published files (sarcos_inv.mat, sarcos_inv_test.mat). The paper does not say whether it scales them. Here inputs and
torques are scaled to mean 0 and variance 1 on the training set, so the loss, a mean squared error, is in units of the
torque's variance. The defaults take some 30 minutes of a CPU core for a seed; --epochs 5 is enough to try.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from moe_kernels.papers.data import Table
from moe_kernels.papers.recipes import Measures, Splits, option
from moe_kernels.papers.recipes.comet import Comet, Objective


@dataclass(frozen=True)
class CometSarcos(Comet):
    """Sides: those of recipe comet. The paper has only standard and comet."""

    ACCEPTS: ClassVar[type] = Table
    METRIC: ClassVar[str] = "error"
    HIGHER_IS_BETTER: ClassVar[bool] = False

    data: str = option("", "folder with sarcos_inv.mat and sarcos_inv_test.mat")
    torque: int = option(1, "the joint whose torque is predicted, from 1 to 7", low=1, high=7)
    width: tuple[int, ...] = option((100, 500, 1000), "neurons of a hidden layer", low=1)
    epochs: int = option(50, "passes over the training set", low=0)
    momentum: float = option(0.0, "momentum of SGD; the paper: none", low=0)
    check_steps: int = option(5, "steps of the agreement check of fast and reference backend; 0: none", low=0)

    def outputs(self, data: Splits) -> int:
        return 1

    def objective(self) -> Objective:
        def error(found: Tensor, torques: Tensor) -> Tensor:
            return F.mse_loss(found[:, 0], torques[:, self.torque - 1])

        def measures(found: Tensor, torques: Tensor) -> Measures:
            return {"error": (error(found, torques) * len(found), len(found))}

        return Objective(error, measures)
