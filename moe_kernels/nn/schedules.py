"""What changes while a network trains: plain functions of the step, and two that say which parameters train.

Steps count from 0. A learning rate is step -> factor of the rate that the recipe names.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from moe_kernels.nn.gates import Gate, StagedGate

LearningRate = Callable[[int], float]


def constant(step: int) -> float:
    """The learning rate stays what it is."""
    return 1.0


def warmup(steps: int, then: LearningRate = constant) -> LearningRate:
    """(step + 1) / steps up to 1, then `then`, counted from the end of the warm-up. No step is taken at rate 0."""
    return lambda step: (step + 1) / steps if step < steps else then(step - steps)


def cosine(steps: int, floor: float = 0.0) -> LearningRate:
    """From 1 down to `floor` along half a cosine over `steps` steps, and there from then on."""
    return lambda step: floor + (1 - floor) * (1 + math.cos(math.pi * min(step / max(steps, 1), 1))) / 2


def inverse_root(steps: int) -> LearningRate:
    """min((step + 1) / steps, sqrt(steps / (step + 1))): a warm-up, then 1 / sqrt(t), continuous where they meet.

    Of 0 steps as of 1.
    """
    steps = max(steps, 1)
    return lambda step: min((step + 1) / steps, math.sqrt(steps / (step + 1)))


def growing_k(step: int, steps: int, lowest: int = 2, highest: int = 16) -> int:
    """Choices a token at `step` of `steps`: lowest + round((highest - lowest) step / steps), ties to even, within both.

    Set it as the k of a frozen TopKGate: SMoE-Dropout (Chen et al. 2023, a baseline of paper 004).
    """
    return min(max(round((highest - lowest) * step / max(steps, 1)) + lowest, lowest), highest)


def falling_rate(step: int, period: int = 1000) -> float:
    """2 / (2 + sqrt(i + 1)), i = step // period: the falling rate of competition of paper 004's published code."""
    return 2 / (2 + math.sqrt(step // period + 1))


def freeze(module: nn.Module) -> nn.Module:
    """The same module with no parameter that trains: the random router of SMoE-Fixed, say."""
    return module.requires_grad_(False)


def train_gates_alone(model: nn.Module) -> list[nn.Parameter]:
    """Freezes all but the gates inside, of a StagedGate the first one too, and returns what is left to train.

    Phase two of the sparse ViT (paper 002): the new sparse gates learn, the dense ones that they replace do not.
    """
    model.requires_grad_(False)
    gates = [module for module in model.modules() if isinstance(module, Gate)]
    for gate in gates:
        gate.requires_grad_()
    for gate in gates:
        if isinstance(gate, StagedGate):
            gate.first.requires_grad_(False)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
