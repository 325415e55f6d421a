"""The run of `python -m moe_kernels train`: the COMET MLP of paper 000 beside its dense twin, on real images.

First an agreement check: the same training steps through the fast kWTA backend and through the reference. Then both
networks are trained from the same initial weights on the same batches, epoch by epoch in turn.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels import backends
from moe_kernels.data import Dataset, load
from moe_kernels.models.mlp import comet_mlp, dense_twin
from moe_kernels.nn.comet import ACTIVATIONS, CometMLP
from moe_kernels.nn.utilisation import Utilisation
from moe_kernels.ops.kwta import TIES, k_from_fraction

# Allowed between the two runs of the agreement check, relative to max(1, |loss|) and max(1, |weight|). kWTA copies what
# it keeps and writes zeros elsewhere, so both runs add and multiply the same numbers, and on most machines agree in
# every bit. A matrix product may still sum in another order from one call to the next (torch promises none): one
# rounding of float32 is 6e-8, and some dozens of steps of a stable run amplify it by less than a hundred.
TOLERANCE = 1e-5

_DESCRIPTION = """Trains the COMET MLP of paper 000 on real images, dense and kWTA side by side from the same initial
weights, after a check that the fast kWTA backend and the reference take the same training steps (exit status 1 if not).
The paper trains 4 layers of 100 to 3000 neurons on CIFAR-10 for 100 epochs by SGD at a learning rate of 1e-4 (1e-3 and
momentum in its appendices). The defaults here are a small network, momentum and a higher rate, so that scikit-learn's
digits reach their accuracy in seconds; no augmentation, no decay and no schedule, as in the paper.
Utilisation depends on the images and the seed alone, so that it is the same after every epoch. Where the mean image is
far from zero, as in digits and MNIST, all scores share a part and some 3 % of the neurons never win; on CIFAR-10, and
on MNIST with its mean taken off, every neuron wins for some image."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `run`."""
    parser.description = parser.description or _DESCRIPTION
    number, rate = _at_least(int, 1), _at_least(float, 0)
    parser.add_argument(
        "--data", default="digits", help="digits, or a path to MNIST, CIFAR-10 or an .npz of JPEGs (default: digits)"
    )
    parser.add_argument("--width", type=number, default=500, help="neurons of a hidden layer (default: 500)")
    parser.add_argument("--layers", type=_at_least(int, 2), default=4, help="linear layers (default: 4, as the paper)")
    parser.add_argument("--keep", type=float, default=0.5, metavar="P", help="keep fraction of kWTA (default: 0.5)")
    parser.add_argument(
        "--activation",
        choices=sorted(ACTIVATIONS),
        default="tanh",
        help="default: tanh, which the paper uses in its larger networks; its public code has softplus in the MLP",
    )
    parser.add_argument("--ties", choices=TIES, default="index", help="who wins a tie (default: index)")
    parser.add_argument("--epochs", type=_at_least(int, 0), default=10, help="default: 10 (paper: 100)")
    parser.add_argument("--batch-size", type=number, default=32, help="default: 32, as the public code")
    parser.add_argument("--lr", type=rate, default=0.01, help="learning rate of SGD (default: 0.01; paper: 1e-4, 1e-3)")
    parser.add_argument("--momentum", type=rate, default=0.9, help="default: 0.9 (paper: none, but in appendix A.6)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of the images (default: 0)")
    parser.add_argument("--backend", choices=backends.NAMES, help="of kWTA (default: the fastest that runs here)")
    parser.add_argument(
        "--threads",
        type=number,
        help="of the CPU (default: torch's; 1 for digits, whose steps are over before a second thread wakes)",
    )
    parser.add_argument("--device", help="torch device (default: cuda if there is one, else cpu)")
    parser.add_argument(
        "--check-steps", type=_at_least(int, 0), default=30, help="steps of the agreement check (default: 30; 0: none)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every number there")


def run(args: argparse.Namespace) -> int:
    """Check, training, table. 0, or 1 if backend and reference disagree, or 2 if the run cannot start."""
    try:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        k_from_fraction(args.keep, args.width)
        backend = backends.choose("kwta", args.backend, torch.empty(0, device=device))
        data = _to(load(args.data), device)
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads or (1 if args.data == "digits" else threads))
    try:
        return _run(args, data, device, backend)
    finally:
        torch.set_num_threads(threads)


def _run(args: argparse.Namespace, data: Dataset, device: torch.device, backend: str) -> int:
    _print_settings(args, data, device, backend)
    agreement = None
    if backend == "reference":
        print("agreement: kWTA runs on the reference itself here, so there is nothing to compare")
    elif args.check_steps:
        agreement = check_agreement(
            _model(args, data, backend),
            _model(args, data, "reference"),
            _check_batches(args, data),
            args.lr,
            args.momentum,
        )
        print_agreement(agreement, backend)
    comet = _model(args, data, backend)
    histories = train({"dense": dense_twin(comet), f"kWTA p={args.keep:g}": comet}, data, args)
    _print_table(histories)
    status = 1 if agreement is not None and not agreement.passed else 0
    if args.json:
        _write_json(args, data, device, backend, agreement, histories, status)
    return status


@dataclass(frozen=True)
class Step:
    """One training step on both backends. Differences are relative to max(1, |reference|)."""

    step: int
    wrong_masks: int  # elements that differ, over all hidden layers
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
    """The agreement check, step by step."""

    steps: list[Step]

    @property
    def passed(self) -> bool:
        return all(step.passed for step in self.steps)


@dataclass(frozen=True)
class Epoch:
    """What one epoch came to. `seconds` is training alone; utilisation is over the test images."""

    epoch: int
    loss: float
    accuracy: float
    seconds: float
    utilisation: dict[str, float | int]


@dataclass
class History:
    """One network's epochs; `start` is its state before the first."""

    name: str
    start: Epoch
    epochs: list[Epoch] = field(default_factory=list)


def check_agreement(
    fast: CometMLP, reference: CometMLP, batches: Iterable[tuple[Tensor, Tensor]], lr: float, momentum: float
) -> Agreement:
    """Trains both networks, which must start from the same weights, on the same batches and compares every step.

    Masks must be the same bits; losses and weights may differ by TOLERANCE.
    """
    optimisers = [torch.optim.SGD(model.parameters(), lr, momentum) for model in (fast, reference)]
    steps = []
    for i, (x, y) in enumerate(batches, 1):
        wrong = sum(int((a != b).sum()) for a, b in zip(fast.masks(x), reference.masks(x), strict=True))
        losses = [
            _step(model, optimiser, x, y).item() for model, optimiser in zip((fast, reference), optimisers, strict=True)
        ]
        pairs = zip(fast.parameters(), reference.parameters(), strict=True)
        weights = torch.stack([_error(a.detach(), b.detach()) for a, b in pairs]).max().item()
        loss_error = _error(*map(torch.tensor, losses)).item()
        steps.append(Step(i, wrong, losses[0], losses[1], loss_error, weights))
    return Agreement(steps)


def print_agreement(agreement: Agreement, backend: str) -> None:
    """Every fifth step, the first, the last and all that fail; then the verdict."""
    print(f"agreement of {backend} with the reference: same masks, losses and weights within {TOLERANCE:g}")
    print(f"{'step':>6} {'masks':>12} {'loss':>12} {'reference':>12} {'loss error':>11} {'weight error':>13}")
    for s in agreement.steps:
        if s.step % 5 == 0 or s.step in (1, len(agreement.steps)) or not s.passed:
            masks = "same" if s.wrong_masks == 0 else f"{s.wrong_masks} differ"
            print(
                f"{s.step:>6} {masks:>12} {s.loss:>12.8f} {s.reference_loss:>12.8f} {s.loss_error:>11.1e} "
                f"{s.weight_error:>13.1e}{'' if s.passed else '  DISAGREES'}"
            )
    failed = [s.step for s in agreement.steps if not s.passed]
    exact = all(s.loss_error == 0 and s.weight_error == 0 for s in agreement.steps)
    if failed:
        print(f"agreement: FAILED in {len(failed)} of {len(agreement.steps)} steps, first in step {failed[0]}\n")
    else:
        print(f"agreement: passed, {len(agreement.steps)} steps{', every bit the same' if exact else ''}\n")


def train(models: dict[str, CometMLP], data: Dataset, args: argparse.Namespace) -> list[History]:
    """Trains every network on the same batches, in turn within each epoch, and prints a line for each."""
    optimisers = {name: torch.optim.SGD(m.parameters(), args.lr, args.momentum) for name, m in models.items()}
    histories = {name: History(name, _evaluate(m, data, 0, math.nan, 0.0)) for name, m in models.items()}
    generator = torch.Generator().manual_seed(args.seed)
    print(f"{'epoch':>5}  {'network':<12} {'accuracy':>8} {'loss':>8} {'s/epoch':>8}  active: min, mean     dead")
    for epoch in _progress(args.epochs):
        batches = _order(len(data.train_y), args.batch_size, generator)
        for name, model in models.items():
            result = _epoch(model, optimisers[name], data, batches, epoch)
            histories[name].epochs.append(result)
            print(_line(name, result))
    return list(histories.values())


def _epoch(
    model: CometMLP, optimiser: torch.optim.Optimizer, data: Dataset, batches: tuple[Tensor, ...], epoch: int
) -> Epoch:
    device = data.train_y.device
    total = torch.zeros((), device=device)  # stays on the device: no step waits for it
    _wait(device)
    start = time.perf_counter()
    for batch in batches:
        rows = batch.to(device)
        total += _step(model, optimiser, data.train_x[rows], data.train_y[rows]) * len(batch)
    _wait(device)
    seconds = time.perf_counter() - start
    return _evaluate(model, data, epoch, total.item() / len(data.train_y), seconds)


def _step(model: CometMLP, optimiser: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimiser.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimiser.step()
    return loss.detach()


@torch.no_grad()
def _evaluate(model: CometMLP, data: Dataset, epoch: int, loss: float, seconds: float) -> Epoch:
    right, utilisation = 0, Utilisation()
    for x, y in zip(data.test_x.split(1000), data.test_y.split(1000), strict=True):
        right += int((model(x).argmax(-1) == y).sum())
        utilisation.update(model.masks(x))
    return Epoch(epoch, loss, right / len(data.test_y), seconds, utilisation.summary())


def _model(args: argparse.Namespace, data: Dataset, backend: str) -> CometMLP:
    # Drawn on the CPU, so that one seed gives one network on every device.
    model = comet_mlp(
        data.train_x.shape[1],
        args.width,
        len(data.classes),
        layers=args.layers,
        p=args.keep,
        activation=args.activation,
        ties=args.ties,
        backend=backend,
        seed=args.seed,
        device="cpu",
    )
    return model.to(data.train_x.device)


def _check_batches(args: argparse.Namespace, data: Dataset) -> Iterator[tuple[Tensor, Tensor]]:
    generator, left = torch.Generator().manual_seed(args.seed), args.check_steps
    while left:
        for batch in _order(len(data.train_y), args.batch_size, generator)[:left]:
            rows = batch.to(data.train_y.device)
            yield data.train_x[rows], data.train_y[rows]
            left -= 1


def _order(n: int, batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randperm(n, generator=generator).split(batch_size)


def _error(a: Tensor, b: Tensor) -> Tensor:
    """Worst |a - b| / max(1, |b|); equal infinities and NaN on both sides are no error."""
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs() / b.abs().clamp(min=1)).max()


def _to(data: Dataset, device: torch.device) -> Dataset:
    names = ("train_x", "train_y", "test_x", "test_y")
    return replace(data, **{name: getattr(data, name).to(device) for name in names})


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _progress(epochs: int) -> Iterable[int]:
    numbers = range(1, epochs + 1)
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        return importlib.import_module("rich.progress").track(numbers, "training", transient=True)
    return numbers


def _print_settings(args: argparse.Namespace, data: Dataset, device: torch.device, backend: str) -> None:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} thread(s)"
    widths = "-".join(map(str, [data.train_x.shape[1], *[args.width] * (args.layers - 1), len(data.classes)]))
    print(
        f"{data.name}: {len(data.train_y)} training and {len(data.test_y)} test images {data.image_shape}; "
        f"MLP {widths}, {args.activation}\n"
        f"SGD, learning rate {args.lr:g}, momentum {args.momentum:g}, batches of {args.batch_size}, seed {args.seed}; "
        f"kWTA keeps {k_from_fraction(args.keep, args.width)} of {args.width}, ties {args.ties}, backend {backend}; "
        f"{device.type}, {where}\n"
    )


def _line(name: str, e: Epoch) -> str:
    u = e.utilisation
    return (
        f"{e.epoch:>5}  {name:<12} {e.accuracy:>8.2%} {e.loss:>8.4f} {e.seconds:>8.3f} {u['min']:>7.2%} "
        f"{u['mean']:>8.2%} {u['dead']:>5} of {u['neurons']}"
    )


def _print_table(histories: list[History]) -> None:
    print(f"\n{'network':<12} {'accuracy':>8} {'best':>8} {'loss':>8} {'s/epoch':>8}  active: min, mean     dead")
    for history in histories:
        last, seconds, best = history.start, math.nan, history.start.accuracy
        if history.epochs:
            last, best = history.epochs[-1], max(e.accuracy for e in history.epochs)
            seconds = sorted(e.seconds for e in history.epochs)[len(history.epochs) // 2]
        u = last.utilisation
        print(
            f"{history.name:<12} {last.accuracy:>8.2%} {best:>8.2%} {last.loss:>8.4f} {seconds:>8.3f} "
            f"{u['min']:>7.2%} {u['mean']:>8.2%} {u['dead']:>5} of {u['neurons']}"
        )
    print("s/epoch: median. Active: share of the test images for which a neuron wins; dead: for none.")


def _write_json(
    args: argparse.Namespace,
    data: Dataset,
    device: torch.device,
    backend: str,
    agreement: Agreement | None,
    histories: list[History],
    status: int,
) -> None:
    report: dict[str, Any] = {
        "settings": {k: v for k, v in vars(args).items() if isinstance(v, str | int | float | None)},
        "data": {"name": data.name, "train": len(data.train_y), "test": len(data.test_y), "shape": data.image_shape},
        "machine": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
        "backend": backend,
        "agreement": None
        if agreement is None
        else {"passed": agreement.passed, "tolerance": TOLERANCE, "steps": [asdict(s) for s in agreement.steps]},
        "networks": [asdict(history) for history in histories],
        "status": status,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(_finite(report), indent=1) + "\n")


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _at_least(kind: type, low: float) -> Any:
    def parse(text: str) -> Any:
        value = kind(text)
        if not low <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {text}")
        return value

    parse.__name__ = kind.__name__  # argparse names it in "invalid int value"
    return parse
