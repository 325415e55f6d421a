"""The agreement check: the same training steps on the fast backend and on the reference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_kernels import backends
from moe_kernels.train.loop import Run

# Allowed between the two runs, relative to max(1, |loss|) and to the largest gradient. Weights are not compared: where
# a gradient is zero but for rounding, as that of an attention's key bias is, Adam's step is its sign. kWTA copies what
# it keeps and writes zeros elsewhere, so its two runs add and multiply the same numbers. Matrix products and gradients
# of biases may sum in another order: one rounding of float32 is 6e-8, and a network amplifies it by less than a
# hundred.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Step:
    """One training step on both backends. The loss' difference is relative to max(1, |reference|)."""

    step: int
    wrong_masks: int  # elements of the routing that differ, over all layers
    loss: float
    reference_loss: float
    loss_error: float
    gradient_error: float  # of any parameter, over the largest gradient of the model

    @property
    def passed(self) -> bool:
        # Written so that a NaN on one side fails.
        return self.wrong_masks == 0 and self.loss_error <= TOLERANCE and self.gradient_error <= TOLERANCE


@dataclass(frozen=True)
class Agreement:
    """The agreement check of one side, step by step."""

    steps: list[Step]

    @property
    def passed(self) -> bool:
        return all(step.passed for step in self.steps)


def check_agreement(fast: Run, make_reference: Callable[[], Run], steps: int) -> Agreement:
    """Takes the same steps from the same weights on the backend in force and on the reference, and compares every one.

    Every step starts from the weights and moments of the run on the backend in force. Who is routed where must be the
    same; losses and gradients may differ by TOLERANCE.
    """
    with backends.use_backend("reference"):
        reference = make_reference()
    found = []
    for number in range(1, steps + 1):
        routed, loss = _routed(fast), _step(fast)
        with backends.use_backend("reference"):
            wrong = sum(int((a != b).sum()) for a, b in zip(routed, _routed(reference), strict=True))
            expected = _step(reference)
        gradients = _gradient_error(fast.task.model, reference.task.model)
        reference.task.model.load_state_dict(fast.task.model.state_dict())
        reference.task.optimiser.load_state_dict(copy.deepcopy(fast.task.optimiser.state_dict()))
        found.append(Step(number, wrong, loss.item(), expected.item(), _error(loss, expected).item(), gradients))
    return Agreement(found)


def print_agreement(name: str, agreement: Agreement, backend: str) -> None:
    """The verdict, and the first steps that disagree."""
    failed = [s for s in agreement.steps if not s.passed]
    where = f"agreement of {name} on {backend} with the reference"
    if not failed:
        exact = all(s.loss_error == 0 and s.gradient_error == 0 for s in agreement.steps)
        print(f"{where}: passed, {len(agreement.steps)} steps{', every bit the same' if exact else ''}")
        return
    print(f"{where}: FAILED in {len(failed)} of {len(agreement.steps)} steps, first in step {failed[0].step}")
    print(f"{'step':>6} {'routing':>12} {'loss':>12} {'reference':>12} {'loss error':>11} {'gradient error':>15}")
    for s in failed[:5]:
        masks = "same" if s.wrong_masks == 0 else f"{s.wrong_masks} differ"
        print(
            f"{s.step:>6} {masks:>12} {s.loss:>12.8f} {s.reference_loss:>12.8f} {s.loss_error:>11.1e} "
            f"{s.gradient_error:>15.1e}"
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


def _gradient_error(model: nn.Module, reference: nn.Module) -> float:
    """Worst difference of two gradients in the model's largest one, 0 where it has none."""
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    grads = [(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None]
    if len(grads) < sum((a.grad is not None) or (b.grad is not None) for a, b in pairs):
        return torch.inf
    if not grads:
        return 0.0
    largest = torch.stack([b.abs().max() for _, b in grads]).max().clamp(min=torch.finfo(torch.float32).tiny)
    return (torch.stack([(a - b).abs().max() for a, b in grads]).max() / largest).item()


def _error(a: Tensor, b: Tensor) -> Tensor:
    """Worst |a - b| / max(1, |b|); equal infinities and NaN on both sides are no error."""
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs() / b.abs().clamp(min=1)).max()
