"""The agreement check: the same training steps on the fast backend and on the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels import backends
from moe_kernels.train.loop import Run

# Allowed between the two runs, relative to max(1, |loss|) and max(1, |weight|). kWTA copies what it keeps and writes
# zeros elsewhere, so both runs add and multiply the same numbers, and on most machines agree in every bit. A matrix
# product may still sum in another order from one call to the next (torch promises none): one rounding of float32 is
# 6e-8, and some dozens of steps of a stable run amplify it by less than a hundred.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Step:
    """One training step on both backends. Differences are relative to max(1, |reference|)."""

    step: int
    wrong_masks: int  # elements of the routing that differ, over all layers
    loss: float
    reference_loss: float
    loss_error: float
    weight_error: float  # the worst parameter after the step

    @property
    def passed(self) -> bool:
        # Written so that a NaN on one side fails.
        return self.wrong_masks == 0 and self.loss_error <= TOLERANCE and self.weight_error <= TOLERANCE


@dataclass(frozen=True)
class Agreement:
    """The agreement check of one side, step by step."""

    steps: list[Step]

    @property
    def passed(self) -> bool:
        return all(step.passed for step in self.steps)


def check_agreement(fast: Run, make_reference: Callable[[], Run], steps: int) -> Agreement:
    """Takes the same steps from the same weights on the backend in force and on the reference, and compares every one.

    Who is routed where must be the same; losses and weights may differ by TOLERANCE.
    """
    with backends.use_backend("reference"):
        reference = make_reference()
    found = []
    for number in range(1, steps + 1):
        routed, loss = _routed(fast), _step(fast)
        with backends.use_backend("reference"):
            wrong = sum(int((a != b).sum()) for a, b in zip(routed, _routed(reference), strict=True))
            expected = _step(reference)
        pairs = zip(fast.task.model.parameters(), reference.task.model.parameters(), strict=True)
        weights = torch.stack([_error(a.detach(), b.detach()) for a, b in pairs]).max().item()
        found.append(Step(number, wrong, loss.item(), expected.item(), _error(loss, expected).item(), weights))
    return Agreement(found)


def print_agreement(name: str, agreement: Agreement, backend: str) -> None:
    """The verdict, and the first steps that disagree."""
    failed = [s for s in agreement.steps if not s.passed]
    where = f"agreement of {name} on {backend} with the reference"
    if not failed:
        exact = all(s.loss_error == 0 and s.weight_error == 0 for s in agreement.steps)
        print(f"{where}: passed, {len(agreement.steps)} steps{', every bit the same' if exact else ''}")
        return
    print(f"{where}: FAILED in {len(failed)} of {len(agreement.steps)} steps, first in step {failed[0].step}")
    print(f"{'step':>6} {'routing':>12} {'loss':>12} {'reference':>12} {'loss error':>11} {'weight error':>13}")
    for s in failed[:5]:
        masks = "same" if s.wrong_masks == 0 else f"{s.wrong_masks} differ"
        print(
            f"{s.step:>6} {masks:>12} {s.loss:>12.8f} {s.reference_loss:>12.8f} {s.loss_error:>11.1e} "
            f"{s.weight_error:>13.1e}"
        )


@torch.no_grad()
def _routed(run: Run) -> list[Tensor]:
    """Who the routers choose for the training batch that comes next."""
    if run.task.routing is None:
        return []
    run.task.model.eval()
    with run.random.use():
        active = [layer.active for layer in run.task.routing(run.batch(run.step))]
    run.task.model.train()
    return active


def _step(run: Run) -> Tensor:
    with run.random.use():
        return run.take_step()["loss"]


def _error(a: Tensor, b: Tensor) -> Tensor:
    """Worst |a - b| / max(1, |b|); equal infinities and NaN on both sides are no error."""
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs() / b.abs().clamp(min=1)).max()
