"""Paper 000, Figure 4: COMET against the dense MLP on CIFAR-10 as the network grows, each with its own learning rate.

The claim: COMET learns faster once the network is wide. The paper gives every model one rate (1e-4, and 1e-3 in Figure
11); what suits a dense network need not suit a masked one, so here each side and width chooses its own. The defaults
have its length and widths, and four rates to choose from: on the digits hours of a CPU core, and --width 100 500
--epochs 10 minutes.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_kernels.recipes import option
from moe_kernels.recipes.comet import Comet


@dataclass(frozen=True)
class CometWidth(Comet):
    """Sides and widths: every pair is a line of the table."""

    data: str = option("", "folder or file of CIFAR-10")
    width: tuple[int, ...] = option((100, 500, 1000, 3000), "neurons of a hidden layer; A.2 adds 9000", low=1)
    epochs: int = option(100, "passes over the training set", low=0)
    momentum: float = option(0.0, "of SGD; the paper: none, but 0.9 in appendix A.6", low=0)
    lr: float = option(1e-4, "learning rate of SGD where none is tuned", low=0)
    tune: tuple[float, ...] = option(
        (1e-4, 1e-3, 1e-2, 1e-1), "learning rates to choose from, on a held-out tenth; a single one: no choice", low=0
    )
    check_steps: int = option(3, "steps of the agreement check of fast and reference backend; 0: none", low=0)
