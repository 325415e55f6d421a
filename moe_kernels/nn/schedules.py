"""What changes while a network trains: plain functions of the step, and two that say which parameters train."""

from __future__ import annotations

import math

from torch import nn

from moe_kernels.nn.gates import Gate


def growing_k(step: int, steps: int, lowest: int = 2, highest: int = 16) -> int:
    """Choices a token at `step` of `steps`: round(lowest + (highest - lowest) step / steps), ties to even, within both.

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
    """Freezes all but the gates inside, and returns their parameters: phase two of the sparse ViT (paper 002)."""
    model.requires_grad_(False)
    gates = [gate.requires_grad_() for gate in model.modules() if isinstance(gate, Gate)]
    return [parameter for gate in gates for parameter in gate.parameters()]
