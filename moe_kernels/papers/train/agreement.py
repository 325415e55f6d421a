"""The agreement check: the same training steps on the fast backend and on the reference.

Two backends round differently. Rounding alone can decide on which side of 0 the argument of a ReLU is (a kink), or
which of two experts with nearly equal scores is chosen (a tie). At a kink or tie the gradient jumps, and both results
are right. The check finds these jumps: the reference repeats the step with weights that differ by some 4e-6 of their
values. Each number, the loss or an element of a gradient, may then differ by TOLERANCE plus twice its own largest
change in these repetitions. In mixed precision both backends round to 16 bits, at other places: the tolerance is then
the dtype's eps, and the weights differ by an eighth of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_kernels import backends
from moe_kernels.nn.gates import CompetitionGate
from moe_kernels.papers.train.loop import AMP, Run

# Allowed difference of a loss, relative to max(1, |loss|), and of a gradient, relative to the model's largest gradient.
# Weights are not compared: where the exact gradient is 0, as for an attention's key bias, the sign of a rounding error
# decides Adam's step.
TOLERANCE = 1e-5

# If a step fails, the reference repeats it with weights w (1 + PERTURBATION n) and w (1 - PERTURBATION n), n from
# N(0, 1), in at most PAIRS pairs. The two move the argument of a ReLU in opposite directions, so one of them can cross
# a kink nearby.
PERTURBATION = 4e-6
PAIRS = 4
SLACK = 2.0  # allowed multiple of the largest jump: backends can differ at two kinks; a repetition may cross only one


def tolerance_of(amp: str) -> float:
    """TOLERANCE, or for a recipe's `amp` other than "none" the eps of that dtype: 7.8e-3 (bfloat16), 9.8e-4."""
    dtype = AMP[amp]
    return TOLERANCE if dtype is None else torch.finfo(dtype).eps


def perturbation_of(amp: str) -> float:
    return PERTURBATION if AMP[amp] is None else tolerance_of(amp) / 8


@dataclass(frozen=True)
class Step:
    """Errors of one training step: how far the backends differ beyond SLACK times the jumps of the reference.

    The error of the loss is relative to max(1, |reference|).
    """

    step: int
    wrong_masks: int  # elements of the routing that differ where the reference's do not jump, over all layers
    loss: float
    reference_loss: float
    loss_error: float
    gradient_error: float  # largest error in any gradient, over the largest absolute value in the reference's gradients
    tolerance: float = TOLERANCE
    repeated: int = 0  # repetitions of the reference with perturbed weights; 0: the backends agreed without any

    @property
    def passed(self) -> bool:
        # Comparisons with NaN are False, so NaN fails.
        return self.wrong_masks == 0 and self.loss_error <= self.tolerance and self.gradient_error <= self.tolerance


@dataclass(frozen=True)
class Agreement:
    """The agreement check of one model, step by step."""

    steps: list[Step]

    @property
    def passed(self) -> bool:
        return all(step.passed for step in self.steps)


@dataclass
class StepRecord:
    """The routing of a batch before a training step, and the step's loss and gradients."""

    routing: list[Tensor]
    loss: Tensor
    gradients: list[Tensor | None]


def check_agreement(fast: Run, make_reference: Callable[[], Run], steps: int) -> Agreement:
    """Takes the same steps on the current backend and on the reference, and compares each of them.

    Every step starts from the weights and the optimiser's state of the run on the current backend. The routing may
    differ only where that of the reference jumps; the loss and the gradients may differ by TOLERANCE plus SLACK times
    the jumps.
    """
    with backends.use_backend("reference"):
        reference = make_reference()
    found = []
    for number in range(1, steps + 1):
        before = copy.deepcopy(reference.state())
        got = _take_step(fast)
        with backends.use_backend("reference"):
            expected = _take_step(reference)
            allowed = Jumps(expected, tolerance_of(reference.recipe.amp))
            step = allowed.compare(number, got)
            if not step.passed:
                for other in _perturbed(reference, before, number):
                    allowed.widen(other)
                    step = allowed.compare(number, got)
                    if step.passed:
                        break
        _restore(reference, fast.state())
        found.append(step)
    return Agreement(found)


def compete_in_turn(model: nn.Module) -> None:
    """Replaces the chance of a competition: all layers compete in the first step, in the third and so on.

    At the chances of a training the few steps of a check might hold no competition.
    """
    for module in model.modules():
        if isinstance(module, CompetitionGate):
            module.rate = lambda step: float(step % 2 == 0)


def follow_agreement(fast: Run, steps: int) -> None:
    """Takes the steps of a check on a rank other than 0; rank 0 compares."""
    for _ in range(steps):
        _take_step(fast)
        fast.state()  # a collective call: rank 0 needs the gathered state


class Jumps:
    """For every number of a step on the reference: its largest change in the repetitions with perturbed weights."""

    def __init__(self, expected: StepRecord, tolerance: float = TOLERANCE) -> None:
        self.expected, self.tolerance, self.repeated = expected, tolerance, 0
        self.routing = [torch.zeros_like(each) for each in expected.routing]
        self.loss = torch.zeros_like(expected.loss)
        self.gradients = [None if each is None else torch.zeros_like(each) for each in expected.gradients]

    def widen(self, other: StepRecord) -> None:
        """Includes the changes of one repetition."""
        self.repeated += 1
        for changed, new, old in zip(self.routing, other.routing, self.expected.routing, strict=True):
            changed |= new != old
        self.loss = torch.maximum(self.loss, _distance(other.loss, self.expected.loss))
        for jumps, a, b in zip(self.gradients, other.gradients, self.expected.gradients, strict=True):
            if jumps is not None and a is not None and b is not None:
                torch.maximum(jumps, _distance(a, b), out=jumps)

    def compare(self, number: int, got: StepRecord) -> Step:
        """The errors of `got`: its differences from the reference beyond SLACK times the jumps."""
        expected = self.expected
        triples = zip(got.routing, expected.routing, self.routing, strict=True)
        wrong = sum(int(((a != b) & ~jumps).sum()) for a, b, jumps in triples)
        loss, reference = got.loss, expected.loss
        same = (loss == reference) | (loss.isnan() & reference.isnan())  # equal infinities and two NaNs are no error
        error = _excess(loss, reference, self.loss) / reference.abs().clamp(min=1)
        error = torch.where(same, torch.zeros_like(error), error)
        values = loss.item(), reference.item(), error.item()
        return Step(number, wrong, *values, self._gradient_error(got), self.tolerance, self.repeated)

    def _gradient_error(self, got: StepRecord) -> float:
        """Largest difference of two gradients beyond SLACK times the jumps, over the reference's largest gradient.

        0 without gradients, infinite if only one of the two runs has a parameter's gradient.
        """
        worst, largest = [], []
        for a, b, jumps in zip(got.gradients, self.expected.gradients, self.gradients, strict=True):
            if (a is None) != (b is None):
                return torch.inf
            if a is not None and b is not None and jumps is not None and a.numel():
                worst.append(_excess(a, b, jumps).max())
                largest.append(b.abs().max())
        if not worst:
            return 0.0
        return (torch.stack(worst).max() / torch.stack(largest).max().clamp(min=torch.finfo(torch.float32).tiny)).item()


def print_agreement(name: str, agreement: Agreement, backend: str) -> None:
    failed = [s for s in agreement.steps if not s.passed]
    where = f"agreement of {name} on {backend} with the reference"
    if not failed:
        exact = all(s.loss_error == 0 and s.gradient_error == 0 and not s.repeated for s in agreement.steps)
        at_jumps = sum(s.repeated > 0 for s in agreement.steps)
        note = ", exactly equal" if exact else f", {at_jumps} of them across a kink or a tie" if at_jumps else ""
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


def _take_step(run: Run) -> StepRecord:
    """Takes a training step and records the routing of its batch before it."""
    run.task.model.eval()
    with run.random.use(), torch.no_grad(), run.autocast():
        routing = [layer.active for layer in run.task.routing(run.batch(run.step))]
    run.task.model.train()
    with run.random.use():
        loss = run.take_step()["loss"]
    return StepRecord(routing, loss, run.gradients())


def _restore(run: Run, state: dict[str, Any]) -> None:
    """Sets step, random state, weights, optimiser and scale, also for steps after the last (Run.load_state raises)."""
    state = copy.deepcopy(state)
    run.step, run.random.state = state["step"], state["random"]
    run.task.model.load_state_dict(state["model"])
    run.task.optimiser.load_state_dict(state["optimiser"])
    run.scaler.load_state_dict(state["scaler"])


def _perturbed(run: Run, before: dict[str, Any], seed: int) -> Iterator[StepRecord]:
    """Repeats the step from state `before` with perturbed weights: PAIRS times with noise and with its negative."""
    generator, size = torch.Generator().manual_seed(seed), perturbation_of(run.recipe.amp)
    for _ in range(PAIRS):
        noise = [torch.randn(each.shape, generator=generator).to(each) for each in run.task.model.parameters()]
        for sign in (size, -size):
            _restore(run, before)
            with torch.no_grad():
                for parameter, each in zip(run.task.model.parameters(), noise, strict=True):
                    parameter.mul_(1 + sign * each)
            yield _take_step(run)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """|a - b|, or 0 if it is not finite, so that an overflow of the reference does not excuse every difference."""
    return (a - b).abs().nan_to_num(nan=0.0, posinf=0.0)


def _excess(a: Tensor, b: Tensor, jumps: Tensor) -> Tensor:
    """The part of |a - b| above SLACK * jumps; NaN stays NaN."""
    return ((a - b).abs() - SLACK * jumps).clamp(min=0)
