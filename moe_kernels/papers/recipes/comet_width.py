"""COMET fixed routing, Figure 4: COMET against the dense MLP on CIFAR-10, by width, each side with a rate of its own.

The claim: COMET learns faster if the network is wide. The paper has one rate for all models (1e-4; 1e-3 in Figure 11).
The best rates of dense and masked networks may differ, so here every model gets the best of four rates. Epochs and
widths are the paper's. With --data digits a run takes hours of a CPU core; with --width 100 500 --epochs 10, minutes.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_kernels.papers.recipes import option
from moe_kernels.papers.recipes.comet import Comet


@dataclass(frozen=True)
class CometWidth(Comet):
    """Sides: those of recipe comet. The table has a row for every side, width and keep fraction."""

    data: str = option("", "folder or file of CIFAR-10")
    width: tuple[int, ...] = option(
        (100, 500, 1000, 3000), "neurons of a hidden layer; the paper's appendix A.2 adds 9000", low=1
    )
    epochs: int = option(100, "passes over the training set", low=0)
    momentum: float = option(0.0, "momentum of SGD; the paper: none, 0.9 in appendix A.6", low=0)
    lr: float = option(1e-4, "learning rate of SGD in the agreement check; training takes that of --tune", low=0)
    tune: tuple[float, ...] = option(
        (1e-4, 1e-3, 1e-2, 1e-1),
        "learning rates to choose from, on a held-out tenth; a single one is taken as it is",
        low=0,
    )
    check_steps: int = option(3, "steps of the agreement check of fast and reference backend; 0: none", low=0)
