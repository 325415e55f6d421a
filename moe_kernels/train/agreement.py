"""The agreement check: the same training steps on the fast backend and on the reference.

Two backends round differently, and a network has places where rounding decides: a ReLU whose argument is 0 but for
rounding (its kink), and two experts whose scores are equal but for rounding (a tie). There the gradient jumps, and both
results are right. The check finds these places by their definition: they are where the reference itself jumps when its
weights change by a few units of rounding. A difference counts as a fault where the reference does not jump.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_kernels import backends
from moe_kernels.train.loop import Run

# Allowed between the two runs, relative to max(1, |loss|) and to the largest gradient. Weights are not compared: where
# a gradient is zero but for rounding, as that of an attention's key bias is, Adam's step is its sign. kWTA copies what
# it keeps and writes zeros elsewhere, so its two runs add and multiply the same numbers. Matrix products and gradients
# of biases may sum in another order: one rounding of float32 is 6e-8, and a network amplifies it by less than a
# hundred.
TOLERANCE = 1e-5

# Where a step differs by more, the reference repeats it with weights w (1 + PERTURBATION n) and w (1 - PERTURBATION n),
# n ~ N(0, 1): one of the two crosses a kink that lies nearer than the perturbation moves the argument. 4e-6 moves it
# some ten times as far as rounding does, so four pairs miss a kink between two backends once in 1e4 times.
PERTURBATION = 4e-6
PAIRS = 4
SLACK = 2.0  # times the largest jump of the reference: two jumps may meet in one element


@dataclass(frozen=True)
class Step:
    """One training step on both backends. The loss' difference is relative to max(1, |reference|).

    Errors are what remains after the jumps of the reference are taken off.
    """

    step: int
    wrong_masks: int  # elements of the routing that differ, over all layers
    loss: float
    reference_loss: float
    loss_error: float
    gradient_error: float  # of any parameter, over the largest gradient of the model
    repeated: int = 0  # times that the reference was repeated with perturbed weights; 0: no kink and no tie was met

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


@dataclass
class Taken:
    """What one training step did: who was routed where before it, its loss and its gradients."""

    routed: list[Tensor]
    loss: Tensor
    gradients: list[Tensor | None]


def check_agreement(fast: Run, make_reference: Callable[[], Run], steps: int) -> Agreement:
    """Takes the same steps from the same weights on the backend in force and on the reference, and compares every one.

    Every step starts from the weights and moments of the run on the backend in force. Who is routed where must be the
    same; losses and gradients may differ by TOLERANCE, and by the jumps of the reference.
    """
    with backends.use_backend("reference"):
        reference = make_reference()
    found = []
    for number in range(1, steps + 1):
        before = _saved(reference)
        got = _take(fast)
        with backends.use_backend("reference"):
            expected = _take(reference)
            allowed = Jumps(expected)
            step = allowed.compare(number, got)
            if not step.passed:
                for other in _perturbed(reference, before, number):
                    allowed.widen(other)
                    step = allowed.compare(number, got)
                    if step.passed:
                        break
        reference.step = fast.step
        reference.random.state = dict(fast.random.state)
        state = fast.state()
        reference.task.model.load_state_dict(state["model"])
        reference.task.optimiser.load_state_dict(copy.deepcopy(state["optimiser"]))
        found.append(step)
    return Agreement(found)


def follow_agreement(fast: Run, steps: int) -> None:
    """The part of the other ranks in a check where the run is one of several ranks; rank 0 compares."""
    for _ in range(steps):
        _take(fast)
        fast.state()


class Jumps:
    """How far each number of a reference step moves when its weights change by a few units of rounding."""

    def __init__(self, expected: Taken) -> None:
        self.expected, self.repeated = expected, 0
        self.routed = [torch.zeros_like(each) for each in expected.routed]
        self.loss = torch.zeros_like(expected.loss)
        self.gradients = [None if each is None else torch.zeros_like(each) for each in expected.gradients]

    def widen(self, other: Taken) -> None:
        """Takes in one repetition."""
        self.repeated += 1
        for changed, new, old in zip(self.routed, other.routed, self.expected.routed, strict=True):
            changed |= new != old
        self.loss = torch.maximum(self.loss, _distance(other.loss, self.expected.loss))
        for wide, a, b in zip(self.gradients, other.gradients, self.expected.gradients, strict=True):
            if wide is not None and a is not None and b is not None:
                torch.maximum(wide, _distance(a, b), out=wide)

    def compare(self, number: int, got: Taken) -> Step:
        """What of `got` is neither the reference nor within its jumps."""
        expected = self.expected
        triples = zip(got.routed, expected.routed, self.routed, strict=True)
        wrong = sum(int(((a != b) & ~jumps).sum()) for a, b, jumps in triples)
        loss, right = got.loss, expected.loss
        same = (loss == right) | (loss.isnan() & right.isnan())  # equal infinities, and NaN on both sides, are no error
        error = _beyond(loss, right, self.loss) / right.abs().clamp(min=1)
        error = torch.where(same, torch.zeros_like(error), error)
        return Step(number, wrong, loss.item(), right.item(), error.item(), self._gradient_error(got), self.repeated)

    def _gradient_error(self, got: Taken) -> float:
        """Worst difference of two gradients in the model's largest one, 0 where it has none."""
        worst, largest = [], []
        for a, b, jumps in zip(got.gradients, self.expected.gradients, self.gradients, strict=True):
            if (a is None) != (b is None):
                return torch.inf
            if a is not None and b is not None and jumps is not None and a.numel():
                worst.append(_beyond(a, b, jumps).max())
                largest.append(b.abs().max())
        if not worst:
            return 0.0
        return (torch.stack(worst).max() / torch.stack(largest).max().clamp(min=torch.finfo(torch.float32).tiny)).item()


def print_agreement(name: str, agreement: Agreement, backend: str) -> None:
    """The verdict, and the first steps that disagree."""
    failed = [s for s in agreement.steps if not s.passed]
    where = f"agreement of {name} on {backend} with the reference"
    if not failed:
        exact = all(s.loss_error == 0 and s.gradient_error == 0 and not s.repeated for s in agreement.steps)
        jumped = sum(s.repeated > 0 for s in agreement.steps)
        note = ", every bit the same" if exact else f", {jumped} of them across a kink or a tie" if jumped else ""
        print(f"{where}: passed, {len(agreement.steps)} steps{note}")
        return
    print(f"{where}: FAILED in {len(failed)} of {len(agreement.steps)} steps, first in step {failed[0].step}")
    print(f"{'step':>6} {'routing':>12} {'loss':>12} {'reference':>12} {'loss error':>11} {'gradient error':>15}")
    for s in failed[:5]:
        masks = "same" if s.wrong_masks == 0 else f"{s.wrong_masks} differ"
        print(
            f"{s.step:>6} {masks:>12} {s.loss:>12.8f} {s.reference_loss:>12.8f} {s.loss_error:>11.1e} "
            f"{s.gradient_error:>15.1e}"
        )


def _take(run: Run) -> Taken:
    """A training step, after a look at who the routers choose for its batch."""
    run.task.model.eval()
    with run.random.use(), torch.no_grad():
        routed = [layer.active for layer in run.task.routing(run.batch(run.step))]
    run.task.model.train()
    with run.random.use():
        loss = run.take_step()["loss"]
    return Taken(routed, loss, run.gradients())


def _saved(run: Run) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "step": run.step,
            "random": run.random.state,
            "model": run.task.model.state_dict(),
            "optimiser": run.task.optimiser.state_dict(),
        }
    )


def _perturbed(run: Run, before: dict[str, Any], seed: int) -> Iterator[Taken]:
    """The step after `before`, repeated with weights that differ by a few units of rounding."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(PAIRS):
        noise = [torch.randn(each.shape, generator=generator).to(each) for each in run.task.model.parameters()]
        for sign in (PERTURBATION, -PERTURBATION):
            state = copy.deepcopy(before)
            run.step, run.random.state = state["step"], state["random"]
            run.task.model.load_state_dict(state["model"])
            run.task.optimiser.load_state_dict(state["optimiser"])
            with torch.no_grad():
                for parameter, each in zip(run.task.model.parameters(), noise, strict=True):
                    parameter.mul_(1 + sign * each)
            yield _take(run)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """|a - b|, 0 where that is not finite: an overflow of the reference allows nothing."""
    return (a - b).abs().nan_to_num(nan=0.0, posinf=0.0)


def _beyond(a: Tensor, b: Tensor, jumps: Tensor) -> Tensor:
    """By how much |a - b| exceeds SLACK * jumps; NaN stays NaN."""
    return ((a - b).abs() - SLACK * jumps).clamp(min=0)
