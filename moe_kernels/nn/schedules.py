"""Schedules as plain functions of the training step, and two functions that choose the parameters to train.

Steps count from 0. A learning rate schedule maps a step to a factor of the base rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from moe_kernels.nn.gates import Gate, StagedGate

LearningRate = Callable[[int], float]


def constant(step: int) -> float:
    """A constant learning rate.

    Example:
        >>> schedules.constant(1000)
        1.0
    """
    return 1.0


def warmup(steps: int, then: LearningRate = constant) -> LearningRate:
    """(step + 1) / steps in the first `steps` steps; after them the schedule `then`, from its step 0.

    Example:
        >>> rate = schedules.warmup(4, then=schedules.cosine(10))
        >>> [round(rate(step), 3) for step in (0, 3, 4, 9, 14)]
        [0.25, 1.0, 1.0, 0.5, 0.0]
    """
    return lambda step: (step + 1) / steps if step < steps else then(step - steps)


def cosine(steps: int, floor: float = 0.0) -> LearningRate:
    """Half a cosine from 1 down to `floor` over `steps` steps, then `floor`.

    Example:
        >>> rate = schedules.cosine(10, floor=0.1)
        >>> [round(rate(step), 3) for step in (0, 5, 10, 20)]
        [1.0, 0.55, 0.1, 0.1]
    """
    return lambda step: floor + (1 - floor) * (1 + math.cos(math.pi * min(step / max(steps, 1), 1))) / 2


def inverse_root(steps: int) -> LearningRate:
    """min((step + 1) / steps, sqrt(steps / (step + 1))): a warm-up to 1, then a fall as 1 / sqrt(step + 1).

    Example:
        >>> rate = schedules.inverse_root(4)
        >>> [rate(step) for step in (0, 3, 15)]
        [0.25, 1.0, 0.5]
    """
    steps = max(steps, 1)
    return lambda step: min((step + 1) / steps, math.sqrt(steps / (step + 1)))


def growing_k(step: int, steps: int, lowest: int = 2, highest: int = 16) -> int:
    """lowest + round((highest - lowest) step / steps), half to even, clamped to [lowest, highest].

    SMoE-Dropout (Chen et al. 2023) has a frozen TopKGate, whose `k` grows in this way.

    Example:
        >>> [schedules.growing_k(step, 100) for step in (0, 50, 100)]
        [2, 9, 16]
    """
    return min(max(round((highest - lowest) * step / max(steps, 1)) + lowest, lowest), highest)


def falling_rate(step: int, period: int = 1000) -> float:
    """2 / (2 + sqrt(i + 1)), i = step // period: a `rate` for CompetitionGate, from CompeteSMoE's published code.

    Example:
        >>> [round(schedules.falling_rate(step), 3) for step in (0, 1000, 8000)]
        [0.667, 0.586, 0.4]
    """
    return 2 / (2 + math.sqrt(step // period + 1))


def freeze(module: nn.Module) -> nn.Module:
    """Freezes the module's parameters and returns the module. CompeteSMoE's baseline SMoE-Fixed has a frozen router.

    Example:
        >>> any(each.requires_grad for each in schedules.freeze(TopKGate(16, 4, 2)).parameters())
        False
    """
    return module.requires_grad_(False)


def train_gates_alone(model: nn.Module) -> list[nn.Parameter]:
    """Freezes all parameters except those of gates; of a StagedGate only the second trains. Returns the trained ones.

    In stage two of the sparse ViT only the second gates, which are sparse, train.

    Example:
        >>> layer = MoE(SoftmaxGate(16, 4), ExpertMLP(4, 16, 32))
        >>> [tuple(each.shape) for each in schedules.train_gates_alone(layer)]
        [(4, 16), (4,)]
    """
    model.requires_grad_(False)
    gates = [module for module in model.modules() if isinstance(module, Gate)]
    for gate in gates:
        gate.requires_grad_()
    for gate in gates:
        if isinstance(gate, StagedGate):
            gate.first.requires_grad_(False)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
