"""Paper 000, Figure 4: COMET against the dense MLP on CIFAR-10 as the network grows, each with its own learning rate.

The claim: COMET learns faster if the network is wide. The paper has one rate for all models (1e-4; 1e-3 in Figure 11).
The best rates of dense and masked networks may differ, so here each side and width gets its own. The defaults have the
paper's epochs and widths, and four rates to choose from. With --data digits they take hours of a CPU core, and minutes
with --width 100 500 --epochs 10.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_kernels.recipes import option
from moe_kernels.recipes.comet import Comet


@dataclass(frozen=True)
class CometWidth(Comet):
    """Sides: those of recipe comet. The table has a row for every pair of a side and a width."""

    data: str = option("", "folder or file of CIFAR-10")
    width: tuple[int, ...] = option((100, 500, 1000, 3000), "neurons of a hidden layer; A.2 adds 9000", low=1)
    epochs: int = option(100, "passes over the training set", low=0)
    momentum: float = option(0.0, "momentum of SGD; the paper: none, 0.9 in appendix A.6", low=0)
    lr: float = option(1e-4, "learning rate of SGD if none is tuned", low=0)
    tune: tuple[float, ...] = option(
        (1e-4, 1e-3, 1e-2, 1e-1), "learning rates to choose from, on a held-out tenth; one: no tuning", low=0
    )
    check_steps: int = option(3, "steps of the agreement check of fast and reference backend; 0: none", low=0)
